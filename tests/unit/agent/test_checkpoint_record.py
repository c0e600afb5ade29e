"""What a keeper told, in the run's record, for the restart decision and for the user."""

from dataclasses import replace

import pytest
from support.keepers import FakeKeeper

from gpuops.agent.checkpoint.api import FinalFlush
from gpuops.agent.checkpoint.keeper_events import read_events
from gpuops.agent.checkpoint.record import COUNTS_EVERY_S, CheckpointRecord, OverdueReporter
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.monitors.progress import StepTracker
from gpuops.checkpoint.types import KeeperError, StateId
from gpuops.host.clock import FakeClock
from gpuops.model import Severity


class Desk:
    """A record with a keeper at its side; what it recorded and said."""

    def __init__(self):
        self.clock = FakeClock()
        self.events, self.said, self.news = [], [], []
        self.pace = StepTracker()
        chronicle = RunJournal(self.emit, self.clock, run_id="run-1", node="n1", rules=())
        self.record = CheckpointRecord(
            chronicle,
            self.pace,
            self.clock,
            self.said.append,
            say_news=self.news.append,
            n_ranks=2,
        )
        self.overdue = OverdueReporter(chronicle, self.said.append)
        self.keeper = FakeKeeper()

    def emit(self, *news):
        self.events += [(item.kind, item.payload, item.severity) for item in news]

    def hear(self):
        told, self.keeper.told = self.keeper.told, []
        self.record.record_events(read_events(told))

    def of(self, kind):
        return [payload for name, payload, _ in self.events if name == kind]


@pytest.fixture
def desk():
    return Desk()


def test_commits_are_told_once_a_minute_and_when_a_generation_ends(desk):
    for step in range(5):
        desk.keeper.commit(step)
    desk.hear()
    assert desk.events == []
    desk.clock.advance(COUNTS_EVERY_S)
    desk.keeper.commit(5)
    desk.hear()
    desk.keeper.commit(6)
    desk.hear()
    desk.record.end_generation()

    assert [(p["count"], p["step"]) for p in desk.of("checkpoint.committed")] == [(6, 5), (1, 6)]


def test_a_restore_is_said_once_all_ranks_have_loaded(desk):
    desk.keeper.restored(41, rank=0)
    desk.hear()
    assert desk.news == []
    desk.keeper.restored(41, rank=1)
    desk.hear()
    desk.record.end_generation()
    desk.keeper.restored(44, rank=0)
    desk.hear()
    desk.keeper.restored(44, rank=1)
    desk.hear()

    assert desk.said == []
    assert desk.news == [
        "resumed from step 41: ranks 0-1 from memory; 2.0 kB in all in 0.25 s",
        "resumed from step 44: ranks 0-1 from memory; 2.0 kB in all in 0.25 s",
    ]
    assert [(p["step"], p["rank"], p["tier"]) for p in desk.of("checkpoint.restored")] == [
        (41, 0, "memory"),
        (41, 1, "memory"),
        (44, 0, "memory"),
        (44, 1, "memory"),
    ]
    assert desk.pace.base_step == 44


def test_a_start_without_a_state_is_shown_once_with_its_reason(desk):
    why = "no state is in memory, and no directory is set"
    for _ in range(2):
        desk.keeper.told.append({"kind": "fresh_start", "why": why})
        desk.hear()

    assert desk.news == [f"the Checkpointer starts at step 0: {why}"]
    assert [payload["why"] for payload in desk.of("checkpoint.fresh_start")] == [why] * 2


def begin_again(desk, offer):
    """Begin a generation whose two ranks load what *offer* says."""
    desk.record.end_generation()
    desk.keeper.told.append(offer)
    for rank in (0, 1):
        desk.keeper.restored(
            offer["state"][1], rank=rank, epoch=offer["state"][0], tier=offer["tier"]
        )
    desk.hear()


LOST = (
    "the keeper of the checkpoints died, and the states in memory were lost with it "
    "(the last one known: step 80)"
)


def test_a_start_from_the_directory_after_the_death_of_a_keeper_gives_that_reason(desk):
    desk.record.keeper_started(desk.keeper.started(), None, lost=StateId(0, 80))
    begin_again(desk, {"kind": "offered", "state": [0, 20], "tier": "persistent"})

    assert desk.news == [
        "resumed from step 20: ranks 0-1 from the directory; 2.0 kB in all in 0.25 s, because "
        + LOST
    ]
    (offered,) = desk.of("checkpoint.offered")
    assert (offered["lost_step"], offered["why"]) == (80, LOST)


def test_a_fresh_start_after_the_death_of_a_keeper_gives_that_reason_too(desk):
    desk.record.keeper_started(desk.keeper.started(), None, lost=StateId(0, 80))
    why = "no state is in memory, and no directory is set"
    desk.keeper.told.append({"kind": "fresh_start", "why": why})
    desk.hear()

    assert desk.news == [f"the Checkpointer starts at step 0: {LOST}; {why}"]
    assert [p["lost_step"] for p in desk.of("checkpoint.fresh_start")] == [80]


def test_once_a_newer_state_is_in_memory_the_death_of_a_keeper_is_no_reason(desk):
    desk.record.keeper_started(desk.keeper.started(), None, lost=StateId(0, 80))
    desk.record.newest(StateId(0, 20), is_new=True)  # what the ranks load from the directory
    begin_again(desk, {"kind": "offered", "state": [0, 20], "tier": "persistent"})
    desk.record.newest(StateId(1, 30), is_new=True)
    begin_again(desk, {"kind": "offered", "state": [1, 30], "tier": "persistent"})

    assert [LOST in text for text in desk.news] == [True, False]
    assert [p["lost_step"] for p in desk.of("checkpoint.offered")] == [80, None]


def test_a_start_from_an_older_state_says_why_newer_ones_were_passed_over(desk):
    why = "step 44 (epoch 0) is skipped: /c/shard-00000-of-00002.safetensors is corrupt"
    begin_again(desk, {"kind": "offered", "state": [0, 40], "tier": "persistent", "why": why})

    (text,) = desk.news
    assert text.endswith(f"because {why}")


def test_the_decision_learns_what_is_safe(desk):
    desk.record.newest(StateId(0, 30), is_new=True)
    desk.record.newest(StateId(1, 8), is_new=True)

    assert (desk.pace.checkpoint_step, desk.pace.base_step) == (8, 8)


def test_trouble_becomes_an_incident_of_our_own(desk):
    desk.keeper.told += [
        {"kind": "persist_failed", "state": [0, 8], "why": "No space left on device"},
        {"kind": "corrupt", "state": [0, 6], "rank": 1, "why": "2 chunks are not what was saved"},
    ]
    desk.hear()

    first, second = desk.of("tool.failed")
    assert first["what"] == "persisting a checkpoint"
    assert "step 8 (epoch 0): No space left on device" in first["error"]
    assert "2 chunks" in second["error"]
    assert len(desk.of("checkpoint.persist_failed")) == len(desk.of("checkpoint.corrupt")) == 1


def test_a_state_that_is_damaged_on_disk_is_an_incident_of_storage_and_said_once(desk):
    why = "/c/step-000000000044.e00000/shard-00000-of-00002.safetensors is corrupt in piece 0 of 1"
    where = {"kind": "corrupt", "why": why}
    desk.keeper.told += [
        {**where, "state": [0, 44], "rank": 0, "tier": "persistent"},
        {**where, "state": [0, 44], "rank": 1, "tier": "persistent"},
        {**where, "state": [0, 43], "directory": "/c"},
    ]
    desk.hear()

    assert desk.of("tool.failed") == []
    desk.keeper.told.append({**where, "kind": "unreadable", "state": [0, 42], "directory": "/c"})
    desk.hear()
    assert [payload["what"] for payload in desk.of("tool.failed")] == ["reading a checkpoint"]
    assert desk.said == [
        f"the checkpoint of step {step} is damaged on disk: {why}" for step in (44, 43)
    ]
    told = [(p["title"], p["failure_class"], p["state"]) for p in desk.of("incident.recorded")]
    assert told == [(text, "storage.io_error", "closed") for text in desk.said]


def test_the_same_trouble_again_is_counted_until_it_has_passed(desk):
    def fail(why):
        desk.keeper.told.append({"kind": "persist_failed", "state": [0, 8], "why": why})
        desk.hear()

    for nonce in ("0123456789abcdef", "fedcba9876543210"):
        fail(f"cannot write /c/step-000000000008.e00000.tmp.n1.7.{nonce}: Read-only file system")
    fail("No space left on device")
    fail("No space left on device")
    desk.keeper.told.append({"kind": "persisted", "state": [0, 9]})
    fail("No space left on device")
    desk.record.end_generation()

    told = [payload["error"] for payload in desk.of("tool.failed")]
    assert ["Read-only" in error for error in told[:1]] == [True]
    assert ["No space" in error for error in told[1:3]] == [True, True]
    assert told[3:] == ["failed 2 more times"]
    assert len(desk.of("checkpoint.persist_failed")) == 5


def test_a_keeper_that_hung_and_was_ended_is_a_failure_of_ours_and_said(desk):
    started = replace(desk.keeper.started(), ended="it was stopped by a signal")
    desk.record.keeper_started(started, None, lost=StateId(0, 41))

    (told,) = desk.of("tool.failed")
    assert "it was stopped by a signal" in told["error"]
    assert [p["ended"] for p in desk.of("checkpoint.keeper")] == [started.ended]
    (said,) = desk.said
    assert started.ended in said
    assert "the states in memory are lost (the last one known: step 41)" in said


def test_a_last_state_that_did_not_persist_is_a_failure_of_ours_unless_an_incident_says_it(desk):
    missed = FinalFlush(newest=StateId(0, 12), why="n1: no space", directory="/ckpt")
    desk.record.flushed(missed)
    assert desk.of("tool.failed") == []

    desk.record.flushed(replace(missed, is_end=True))

    (told,) = desk.of("tool.failed")
    assert told["what"] == "persisting the last checkpoint"
    assert "the newest checkpoint of step 12 did not persist" in told["error"]
    assert "n1: no space" in told["error"]


def test_each_state_that_waited_too_long_for_a_node_is_a_warning_and_the_same_is_said_once(desk):
    for step in (5, 9):
        desk.overdue.gave_up(StateId(2, step), "n1 did not have it")

    assert [(p["step"], p["epoch"], p["why"]) for p in desk.of("checkpoint.given_up")] == [
        (5, 2, "n1 did not have it"),
        (9, 2, "n1 did not have it"),
    ]
    assert {severity for _, _, severity in desk.events} == {Severity.WARNING}
    assert desk.said == ["the checkpoint of step 5 was given up: n1 did not have it"]


def test_an_adopted_state_is_said(desk):
    desk.record.keeper_started(desk.keeper.started(adopted=True), StateId(3, 41))
    desk.record.keeper_started(desk.keeper.started(), None)

    assert [p["adopted"] for p in desk.of("checkpoint.keeper")] == [True, False]
    assert desk.said == []
    assert len(desk.news) == 1
    assert "step 41 in memory" in desk.news[0]


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (
            FinalFlush(
                state=StateId(0, 12),
                newest=StateId(0, 12),
                fitted=True,
                seconds=2.0,
                within_s=20.0,
                directory="/ckpt",
            ),
            "the checkpoint of step 12 persisted in /ckpt (2.00 s of 20.0 s)",
        ),
        (
            FinalFlush(
                state=StateId(0, 4),
                newest=StateId(0, 12),
                seconds=20.0,
                within_s=20.0,
                directory="/ckpt",
                why="the disk is slow",
            ),
            (
                "the newest checkpoint of step 12 did not persist (20.0 s of 20.0 s): the disk is "
                "slow; that of step 4 is there in /ckpt"
            ),
        ),
        (
            FinalFlush(within_s=5.0, why="the keeper did not answer in time"),
            (
                "the newest checkpoint did not persist (0.00 s of 5.00 s): "
                "the keeper did not answer in time; nothing of this run is there"
            ),
        ),
    ],
)
def test_what_became_of_the_last_save(desk, done, said):
    desk.record.flushed(done)

    assert (desk.news if done.fitted else desk.said) == [said]
    assert len(desk.news + desk.said) == 1
    (payload,) = desk.of("checkpoint.flushed")
    assert (payload["fitted"], payload["within_s"]) == (done.fitted, done.within_s)


def test_a_lost_keeper_is_our_own_failure(desk):
    desk.record.failed("hearing the keeper", KeeperError("gone"))

    (payload,) = desk.of("tool.failed")
    assert (payload["what"], payload["error"]) == ("hearing the keeper", "KeeperError: gone")
