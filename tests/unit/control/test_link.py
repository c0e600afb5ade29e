"""An agent's tie to the others: what it takes for silence, for the end, for its run's record."""

import logging
import threading
from dataclasses import replace
from uuid import UUID

import pytest
from support.agreement import CutBoard
from support.runs import wait_until

from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import RECORD_KEY, ControlRecord, Member, RunPhase
from gpuops.control.store import CLOSED_FENCE_S, ControlStoreError, ControlStoreResetError
from gpuops.control.threads import (
    COORDINATE_S_MAX,
    RETRY_S,
    UNREACHABLE_S,
    AgentCallbacks,
    ControlThreads,
)
from gpuops.host.clock import FakeClock
from gpuops.incident.decision import NodeReport, ReportKind

RUN_ID = "01890000-0000-7000-8000-000000000001"
OTHER_ID = "01890000-0000-7000-8000-000000000002"
FENCE_S = 10.0


class SlowBoard(CutBoard):
    """Answers a beat *late_s* after it has taken it in."""

    def __init__(self, board, clock):
        super().__init__(board)
        self._clock = clock
        self.late_s = 0.0

    def __getattr__(self, name):
        act = super().__getattr__(name)

        def call(*args, **kwargs):
            answer = act(*args, **kwargs)
            self._clock.advance(self.late_s)
            return answer

        return call


class Bench:
    """One link over a board in this process, on a clock that stands still."""

    def __init__(self, fence_s=FENCE_S, coordinator=None, **callbacks):
        self.clock = FakeClock()
        self.shared = MemoryControlStore(self.clock)
        self.store = SlowBoard(self.shared, self.clock)
        me = Member(agent=str(UUID(int=1)), node="n0", address="n0", n_workers=1)
        self.fresh = ControlRecord(
            run_id=RUN_ID, folder="run", generation=0, phase=RunPhase.RUN, since_s=0.0
        )
        view = join(self.store, me, self.fresh, self.clock, lambda _s: None)
        self.link = ControlClient(self.store, me, view, self.clock, fence_timeout_s=fence_s)
        self.fenced = []
        self.threads = ControlThreads(
            self.link,
            AgentCallbacks(**{"on_fence": self.fenced.append, **callbacks}),
            coordinator,
            self.clock,
        )

    def run_once(self):
        self.threads.run_once(hold_s=0.0)


def test_a_beat_counts_from_when_it_was_sent_because_that_is_what_peers_saw():
    bench = Bench()
    bench.store.late_s = 6.0
    bench.run_once()
    bench.clock.advance(4.5)

    bench.threads.check_fence()

    assert bench.fenced == [10.5]


def test_an_answer_that_waited_for_a_frozen_host_does_not_save_its_workers():
    bench = Bench()
    bench.store.late_s = 75.0
    bench.run_once()

    bench.threads.check_fence()

    assert bench.fenced == [75.0]
    assert not bench.link.clear_fence()


def test_a_thawed_host_is_fenced_before_it_beats_again():
    bench = Bench()
    bench.clock.advance(75.0)

    bench.run_once()

    assert bench.fenced == [75.0]
    assert bench.link.is_fenced


def test_a_board_that_takes_two_seconds_for_each_answer_fences_nobody():
    bench = Bench()
    bench.store.late_s = 3.0  # with the hold of a heartbeat
    for _ in range(20):
        bench.run_once()
        bench.threads.check_fence()

    assert bench.fenced == []
    assert bench.link.unreachable_s == 0


def test_a_host_that_thaws_has_not_asked_in_vain():
    bench = Bench()
    bench.run_once()
    bench.clock.advance(75.0)

    assert bench.link.since_reply_s == 75
    assert bench.link.unreachable_s == 0


def test_a_board_that_does_not_answer_is_lost_by_and_by_and_found_at_once():
    bench = Bench()
    bench.store.is_cut = True
    for _ in range(3):
        with pytest.raises(ControlStoreError):
            bench.run_once()
        bench.clock.advance(20.0)
    assert bench.link.unreachable_s == 60

    bench.store.is_cut = False
    bench.run_once()

    assert bench.link.unreachable_s == 0


def test_who_was_fenced_comes_back_once_it_is_heard_again():
    bench = Bench()
    bench.clock.advance(11.0)
    bench.threads.check_fence()
    assert not bench.link.clear_fence()
    assert bench.link.is_fenced

    bench.run_once()

    assert bench.link.clear_fence()
    assert not bench.link.is_fenced


def test_a_closed_connection_that_no_new_one_follows_ends_the_workers():
    bench = Bench()
    bench.store.closed_s = CLOSED_FENCE_S - 0.01
    bench.threads.check_fence()
    assert bench.fenced == []

    bench.store.closed_s = CLOSED_FENCE_S
    bench.threads.check_fence()
    assert len(bench.fenced) == 1
    assert not bench.link.clear_fence()
    bench.store.closed_s = 0.0
    assert bench.link.clear_fence()


def test_so_does_one_that_a_new_one_follows_too_late():
    bench = Bench()
    bench.store.lose = lambda _name: setattr(bench.store, "closed_s", CLOSED_FENCE_S)
    bench.run_once()

    assert len(bench.fenced) == 1


def test_a_board_in_this_process_fences_nobody():
    bench = Bench(fence_s=None)
    bench.clock.advance(1000.0)
    bench.threads.check_fence()

    assert bench.fenced == []
    assert bench.link.clear_fence()


@pytest.mark.parametrize("value", [None, b"", b"\xff", b"{}", b'{"v":2}', b"[" * 100_000])
def test_a_record_that_is_none_is_the_boards_fault_and_changes_nothing(value):
    bench = Bench()
    bench.shared.delete("")
    if value is not None:
        bench.shared.put(RECORD_KEY, value)

    with pytest.raises(ControlStoreError):
        bench.link.update_record(lambda now: replace(now, phase=RunPhase.STOP))

    assert bench.link.record.phase is RunPhase.RUN
    assert bench.shared.get(RECORD_KEY).value == (value or b"")


def test_the_record_of_another_run_is_left_alone():
    bench = Bench()
    bench.shared.delete("")
    theirs = replace(bench.fresh, run_id=OTHER_ID).to_bytes()
    bench.shared.put(RECORD_KEY, theirs)

    with pytest.raises(ControlStoreResetError):
        bench.link.update_record(lambda now: replace(now, phase=RunPhase.COLLECT))

    assert bench.shared.get(RECORD_KEY).value == theirs
    assert bench.link.reset_error is not None


def test_a_heartbeat_that_finds_another_runs_record_says_so():
    bench = Bench()
    for _ in range(3):
        bench.shared.put(RECORD_KEY, replace(bench.fresh, run_id=OTHER_ID).to_bytes())

    with pytest.raises(ControlStoreResetError):
        bench.run_once()

    assert bench.link.record.run_id == RUN_ID


def test_progress_that_cannot_be_told_costs_no_heartbeat(caplog):
    def broken():
        raise RuntimeError("dictionary changed size during iteration")

    bench = Bench(heartbeat_payload=broken)
    before = bench.shared.get(bench.link.keys.heartbeat(bench.link.me.agent)).version
    with caplog.at_level(logging.WARNING):
        bench.run_once()
        bench.run_once()

    assert bench.shared.get(bench.link.keys.heartbeat(bench.link.me.agent)).version == before + 2
    assert len([line for line in caplog.messages if "dictionary changed" in line]) == 1


def test_a_report_for_a_silent_agent_does_not_replace_what_that_agent_said():
    bench = Bench()
    ours = NodeReport(kind=ReportKind.NODE_LOST, node="n1", generation=0, how="ours")
    key = bench.link.keys.report(0, "a")
    bench.link.file_report_for("a", ours)
    assert b"ours" in bench.shared.get(key).value
    bench.shared.delete(key)

    bench.shared.put(key, b"theirs")
    bench.link.file_report_for("a", ours)

    assert bench.shared.get(key).value == b"theirs"


def test_an_agent_that_was_away_while_its_run_was_cleaned_up_hears_of_it():
    bench = Bench()
    bench.run_once()
    bench.shared.delete("")
    bench.clock.advance(UNREACHABLE_S + 1)

    with pytest.raises(ControlStoreResetError):
        bench.run_once()
    assert bench.link.reset_error is not None


def test_only_who_is_answered_late_several_times_in_a_row_is_slow():
    bench = Bench()
    told = []
    for late_s in (2.0, 2.0, 2.0, 0.1, 2.0, 2.0, 2.0, 2.0, 0.1):
        bench.store.late_s = late_s
        bench.run_once()
        told.append(bench.link.is_slow)

    assert told == [False] * 7 + [True, False]


def test_an_answer_that_brings_news_does_not_tell_how_long_it_took():
    bench = Bench()
    bench.store.late_s = 2.0
    for _ in range(6):
        bench.shared.put(RECORD_KEY, bench.fresh.to_bytes())
        bench.run_once()

    assert not bench.link.is_slow


class Busy:
    """A leader whose turn takes until it is told."""

    is_candidate = True

    def __init__(self):
        self.began, self.may_end = threading.Event(), threading.Event()

    def tick(self, _view):
        self.began.set()
        assert self.may_end.wait(60)


def test_an_agent_beats_while_it_leads_unless_that_comes_to_no_end():
    busy = Busy()
    bench = Bench(coordinator=busy)

    def goes_on(after):
        bench.shared.put(RECORD_KEY, bench.fresh.to_bytes())  # a record that changes ends the hold
        beats = bench.shared.get(bench.link.keys.heartbeat(bench.link.me.agent)).version
        return beats if beats > after else 0

    bench.threads.start()
    try:
        assert busy.began.wait(30)
        first = goes_on(0)
        wait_until(lambda: goes_on(first + 3))
        bench.clock.advance(COORDINATE_S_MAX)
        last = goes_on(0) + 1  # one may be under way
        with pytest.raises(AssertionError):
            wait_until(lambda: goes_on(last), limit_s=4 * RETRY_S)
        wait_until(lambda: bench.fenced, what="the fence")
        assert not bench.link.clear_fence()

        busy.may_end.set()
        wait_until(bench.link.clear_fence)
    finally:
        busy.may_end.set()
        bench.threads.stop()


def test_a_watch_that_fails_is_tried_again_and_costs_no_fence():
    failures = []

    def fails(_silent_s):
        failures.append(threading.current_thread().name)
        if failures.count("gpuops-fence") < 2:
            raise RuntimeError("a bug")
        ended.set()

    ended = threading.Event()
    bench = Bench(running_generation=lambda: 0, on_fence=fails)
    bench.shared.put(RECORD_KEY, replace(bench.fresh, phase=RunPhase.COLLECT).to_bytes())
    bench.run_once()
    bench.threads.start()
    try:
        for _ in range(600):
            bench.clock.advance(20.0)  # overdue, whenever the thread looks
            if ended.wait(0.1):
                break
    finally:
        bench.threads.stop()

    assert failures.count("gpuops-fence") >= 2
