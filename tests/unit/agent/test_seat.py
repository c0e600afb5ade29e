"""How an agent gets its seat, and what becomes of one that it never took."""

from dataclasses import replace
from uuid import UUID

import pytest
from support.agreement import CutBoard

from gpuops.agent.elastic.rendezvous import (
    ControlRendezvous,
    ExcludedError,
    Preflight,
    RunOverError,
)
from gpuops.agent.monitors.preflight import PreflightResult
from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import RECORD_KEY, ControlRecord, Member, Roster, RunPhase, unpack
from gpuops.control.threads import AgentCallbacks, ControlThreads
from gpuops.control.transitions import readmit
from gpuops.host.clock import FakeClock

pytestmark = pytest.mark.torch
FENCE_S = 10.0


class GivenUpError(Exception):
    """The test has seen enough."""


class Hooks:
    """Does what the test has prepared, one thing for each wait; then gives up."""

    def __init__(self):
        self.acts = []
        self.found = Preflight(passed=True)
        self.parks = False

    def gate(self):
        return self.found

    def excluded(self, reason):
        if not self.parks:
            raise ExcludedError(reason)

    def waiting(self, _record):
        if not self.acts:
            raise GivenUpError
        self.acts.pop(0)()


class Bench:
    """One agent that wants a seat; the other side is played by writing the record."""

    def __init__(self):
        self.clock = FakeClock()
        self.shared = MemoryControlStore(self.clock)
        self.store = CutBoard(self.shared)
        self.reads = []
        self.store.lose = self.reads.append
        self.me = Member(agent=str(UUID(int=1)), node="n0", address="n0", n_workers=1)
        fresh = ControlRecord(
            run_id=str(UUID(int=7)),
            folder="run",
            generation=0,
            phase=RunPhase.RENDEZVOUS,
            since_s=0.0,
        )
        view = join(self.store, self.me, fresh, self.clock, lambda _s: None)
        self.link = ControlClient(self.store, self.me, view, self.clock, fence_timeout_s=FENCE_S)
        self.threads = ControlThreads(self.link, AgentCallbacks(), None, self.clock)
        self.hooks = Hooks()
        self.rendezvous = ControlRendezvous(self.link, "key", self.hooks, pick_port=lambda: 4711)

    def becomes(self, **changes):
        """Return what changes the record and lets the agent hear of it."""

        def act():
            entry = self.shared.get(RECORD_KEY)
            record = replace(ControlRecord.from_bytes(entry.value), **changes)
            self.shared.put(RECORD_KEY, record.to_bytes())
            self.threads.run_once(hold_s=0.0)

        return act

    def seated(self, generation, *members):
        roster = Roster(generation=generation, members=members)
        self.shared.put(self.link.keys.roster(generation), roster.to_bytes())

    def ask(self, *acts):
        self.hooks.acts = list(acts)
        return self.rendezvous.next_rendezvous()

    def reports(self):
        found = self.shared.list(f"{self.link.keys.prefix}/gen/")
        return [unpack(entry.value) for key, entry in found.items() if "/report/" in key]


@pytest.fixture
def bench():
    return Bench()


def other(number):
    return Member(agent=str(UUID(int=number)), node=f"n{number}", address="x", n_workers=2)


def test_it_says_that_it_is_there_and_takes_the_seat_it_gets(bench):
    bench.seated(0, other(5), bench.me)

    info = bench.ask(bench.becomes(phase=RunPhase.RUN))

    assert (info.rank, info.world_size) == (1, 2)
    ready = bench.shared.list(bench.link.keys.ready(0))
    assert [unpack(entry.value)["master_port"] for entry in ready.values()] == [4711]


@pytest.mark.parametrize("phase", [RunPhase.DRAIN, RunPhase.COLLECT])
def test_a_seat_that_was_not_taken_in_time_is_passed_up_so_that_nobody_waits(bench, phase):
    bench.seated(0, bench.me, other(5))

    with pytest.raises(GivenUpError):
        bench.ask(bench.becomes(phase=phase), lambda: None)

    assert [(r["kind"], r["generation"], r["node"]) for r in bench.reports()] == [
        ("stopped", 0, "n0")
    ]


def test_a_seat_is_passed_up_until_the_board_has_heard_it(bench):
    bench.seated(0, bench.me, other(5))
    lost = ["call", "answer"]
    bench.store.lose = lambda name: lost.pop() if name == "put" and lost else None

    with pytest.raises(GivenUpError):
        bench.ask(bench.becomes(phase=RunPhase.DRAIN), *3 * [lambda: None])

    assert len(bench.reports()) == 1


def test_an_agent_without_a_seat_passes_nothing_up(bench):
    bench.seated(0, other(5))

    with pytest.raises(GivenUpError):
        bench.ask(bench.becomes(phase=RunPhase.DRAIN), lambda: None)

    assert bench.reports() == []


def test_a_spare_reads_a_roster_once(bench):
    bench.seated(0, other(5))

    with pytest.raises(GivenUpError):
        bench.ask(bench.becomes(phase=RunPhase.RUN), *5 * [lambda: bench.reads.append("look")])

    first = bench.reads.index("look")
    assert "get" not in bench.reads[first:]


def test_a_fence_from_before_does_not_count_against_the_next_workers(bench):
    bench.seated(0, bench.me)

    def cut_off():
        bench.clock.advance(FENCE_S + 1)
        bench.threads.check_fence()
        assert bench.link.is_fenced

    bench.ask(cut_off, bench.becomes(phase=RunPhase.RUN))

    assert not bench.link.is_fenced


def test_no_seat_is_taken_while_peers_may_have_heard_nothing(bench):
    bench.seated(0, bench.me)

    def hears_and_is_cut_off():
        bench.becomes(phase=RunPhase.RUN)()
        bench.clock.advance(FENCE_S + 1)

    with pytest.raises(GivenUpError):
        bench.ask(hears_and_is_cut_off, lambda: None)

    bench.ask(bench.becomes())


def test_an_excluded_node_waits_no_more(bench):
    with pytest.raises(ExcludedError, match="sick"):
        bench.ask(bench.becomes(excluded={"n0": "sick"}))


def test_one_that_waits_is_checked_and_takes_a_place_again_once_it_is_readmitted(bench):
    bench.hooks.parks = True
    bench.hooks.found = Preflight(passed=False, reason="sick")

    def repaired():
        assert bench.link.record.excluded == {"n0": "sick"}
        bench.hooks.found = Preflight(passed=True)
        bench.link.update_record(lambda now: readmit(now, "n0"))

    def is_ready():
        assert bench.shared.list(bench.link.keys.ready(0))

    with pytest.raises(GivenUpError):
        bench.ask(lambda: None, repaired, lambda: None, is_ready)


def test_nobody_waits_after_the_end_of_the_run(bench):
    with pytest.raises(RunOverError, match="enough"):
        bench.ask(bench.becomes(phase=RunPhase.STOP, reason="enough", exit_code=0))


def test_a_gate_that_does_not_let_the_node_in_excludes_it(bench):
    result = PreflightResult(passed=False, reason="two GPUs are missing")
    bench.hooks.found = Preflight(passed=False, reason=result.reason, to_report=result.to_report)

    with pytest.raises((ExcludedError, GivenUpError)):
        bench.rendezvous.next_rendezvous()

    assert bench.link.record.excluded == {"n0": "two GPUs are missing"}
    assert [(r["kind"], r["node"], r["how"]) for r in bench.reports()] == [
        ("gate_failed", "n0", "two GPUs are missing")
    ]
    assert bench.shared.list(bench.link.keys.ready(0)) == {}


def test_a_node_that_fails_its_check_says_so_though_the_run_has_ended_for_it(bench):
    """The leader decides on the report: that may come before the node has excluded itself."""
    result = PreflightResult(passed=False, reason="sick")
    ends = bench.becomes(phase=RunPhase.STOP, reason="too few nodes", exit_code=85)

    def decided_at_once(*words):
        ends()
        return result.to_report(*words)

    bench.hooks.found = Preflight(passed=False, reason="sick", to_report=decided_at_once)

    with pytest.raises(ExcludedError, match="sick"):
        bench.rendezvous.next_rendezvous()
