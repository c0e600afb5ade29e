"""A whole sweep over a control store in memory: participants are threads, tests are a table."""

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.runs import wait_until

from gpuops.burnin.blame import BlameKind
from gpuops.burnin.pairs import PairOutcome, PairTest, node_pair
from gpuops.cli.sweep_result import check_run_of, stored_body, sweep_body, sweep_events
from gpuops.control.memory import MemoryControlStore
from gpuops.control.store import ControlStore
from gpuops.host.clock import Clock, SystemClock
from gpuops.model import FailureClass, Finding, Status
from gpuops.sweep.coordinator import SweepResult, SweepSettings, coordinate
from gpuops.sweep.messages import ALIVE, PairOrder, PairReport, Participant, key
from gpuops.sweep.participant import CoordinatorLostError, Exchange, IsOver, participate

NODES = ("n1", "n2", "n3", "n4")
PASSED = PairReport(outcome=PairOutcome.PASS, value=10.0)
FAILED = PairReport(outcome=PairOutcome.FAIL, detail="connection closed by peer")


class LeftError(Exception):
    """The node is gone."""


def pause(seconds: float) -> None:
    threading.Event().wait(min(seconds, 0.01))


@dataclass
class FakeTester:
    """Fails the tests of *bad* nodes and pairs; notes which pairs were tested."""

    bad: Collection[str | tuple[str, str]] = ()
    done: list[tuple[str, str]] = field(default_factory=list)

    def __call__(
        self, order: PairOrder, node: str, _address: str, exchange: Exchange, is_over: IsOver
    ) -> PairReport:
        assert not is_over()
        if node == order.a:
            exchange(4711)
            self.done.append(order.nodes)
        else:
            assert exchange(None) == (f"address of {order.a}", 4711)
        is_bad = order.nodes in self.bad or not set(order.nodes).isdisjoint(self.bad)
        return FAILED if is_bad else PASSED


@dataclass
class Fleet:
    """Threads that take part; ``findings`` is what each node was told about itself."""

    store: MemoryControlStore
    tester: FakeTester
    findings: dict[str, Sequence[Finding]] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    devices: int = 0
    clock: Clock = field(default_factory=SystemClock)

    def join(self, *nodes: str, unfit: str | None = None) -> None:
        for node in nodes:
            thread = threading.Thread(target=self._run, args=(node, unfit), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _run(self, node: str, unfit: str | None) -> None:
        me = Participant(node=node, address=f"address of {node}", unfit=unfit, devices=self.devices)
        with contextlib.suppress(LeftError, CoordinatorLostError):
            self.findings[node] = participate(self.store.new_handle(), me, self.tester, pause)

    def sweep(
        self,
        join_s: float = 30.0,
        expected: tuple[str, ...] = NODES,
        tested: frozenset[tuple[str, str]] = frozenset(),
        **how: Any,
    ) -> SweepResult:
        settings = SweepSettings(
            sweep="s1",
            expected=expected,
            seed=1,
            seconds=1.0,
            join_s=join_s,
            tested=tested,
            **how,
        )
        result = coordinate(
            self.store.new_handle(),
            settings,
            self.clock,
            pause,
        )
        for thread in self.threads:
            thread.join(30)
        return result


@pytest.fixture
def fleet() -> Callable[..., Fleet]:
    def make(*bad: str | tuple[str, str]) -> Fleet:
        return Fleet(MemoryControlStore(SystemClock()), FakeTester(bad))

    return make


def test_four_healthy_nodes_test_all_pairs_and_name_nobody(fleet: Callable[..., Fleet]) -> None:
    four = fleet()
    four.join(*NODES)
    result = four.sweep()
    assert sorted(four.tester.done) == sorted(
        node_pair(a, b) for a in NODES for b in NODES if a < b
    )
    assert result.verdicts == ()
    assert result.share_tested == 1
    told = {node: [(f.entity.id, f.status) for f in four.findings[node]] for node in NODES}
    assert told == {node: [(node, Status.PASS)] for node in NODES}


def test_whoever_comes_to_a_run_is_swept_and_the_bad_one_alone_is_convicted(
    fleet: Callable[..., Fleet],
) -> None:
    three = fleet("n2")
    three.join("n1", "n2", "n3")
    result = three.sweep(expected=(), nodes_max=3)
    assert result.nodes == ("n1", "n2", "n3")
    assert result.missing == {}
    told = {
        node: [(f.entity.id, f.status) for f in found] for node, found in three.findings.items()
    }
    assert told == {
        "n1": [("n1", Status.PASS)],
        "n2": [("n2", Status.FAIL)],
        "n3": [("n3", Status.PASS)],
    }


def test_a_run_whose_nodes_do_not_all_come_is_swept_without_them(
    fleet: Callable[..., Fleet],
) -> None:
    some = fleet()
    some.join("n1", "n2")
    wait_until(lambda: len(some.store.list(key(ALIVE, ""))) == 2)
    result = some.sweep(join_s=0.1, expected=(), nodes_max=8)
    assert [test.nodes for test in result.tests] == [("n1", "n2")]


def test_nodes_that_need_no_sweep_are_told_why_and_nothing_is_tested(
    fleet: Callable[..., Fleet],
) -> None:
    four, asked = fleet(), list[Collection[str]]()

    def why_not(nodes: Collection[str]) -> str:
        asked.append(sorted(nodes))
        return "swept an hour ago"

    four.join(*NODES)
    result = four.sweep(expected=(), nodes_max=4, why_not=why_not)
    assert asked == [list(NODES)]
    assert (result.tests, four.tester.done) == ((), [])
    told = {node: [(f.status, f.message) for f in found] for node, found in four.findings.items()}
    assert told == {node: [(Status.SKIP, "swept an hour ago")] for node in NODES}


def test_both_ends_of_a_bad_link_are_told_of_it(fleet: Callable[..., Fleet]) -> None:
    four = fleet(("n1", "n2"))
    four.join(*NODES)
    four.sweep()
    told = {node: [f.entity.id for f in found] for node, found in four.findings.items()}
    assert told == {"n1": ["n1,n2", "n1"], "n2": ["n1,n2", "n2"], "n3": ["n3"], "n4": ["n4"]}


def test_successive_sweeps_draw_untested_pairs_and_a_nightly_one_uses_idle_nodes(
    fleet: Callable[..., Fleet],
) -> None:
    nodes = tuple(f"n{number:02}" for number in range(18))
    tested: frozenset[tuple[str, str]] = frozenset()
    for nightly, n_rounds in ((False, 2), (True, 3)):
        many = fleet()
        many.join(*nodes)
        result = many.sweep(expected=nodes, tested=tested, nightly=nightly)
        drawn = {test.nodes for test in result.tests}
        assert len(result.tests) == len(drawn) == 9 * n_rounds
        assert tested.isdisjoint(drawn)
        tested |= drawn
        assert result.share_tested == len(tested) / (18 * 17 / 2)


def test_clocks_an_hour_apart_change_nothing_and_tests_have_the_time_of_who_leads(
    fleet: Callable[..., Fleet],
) -> None:
    class HourAhead(SystemClock):
        def now_us(self) -> int:
            return super().now_us() + 3600 * 10**6

    four = fleet("n3")
    four.clock = HourAhead()
    four.join(*NODES)
    began_us = four.clock.now_us()
    result = four.sweep()
    assert [verdict.entity.id for verdict in result.verdicts] == ["n3"]
    assert min(test.t_us for test in result.tests) >= began_us


def test_a_bad_node_is_named_and_learns_it_itself(fleet: Callable[..., Fleet]) -> None:
    four = fleet("n3")
    four.join(*NODES)
    (verdict,) = four.sweep().verdicts
    assert (verdict.kind, verdict.entity.id, verdict.status) == (BlameKind.NODE, "n3", Status.FAIL)
    told = {node: [f.status for f in four.findings[node]] for node in NODES}
    assert told == {node: [Status.FAIL if node == "n3" else Status.PASS] for node in NODES}
    (found,) = four.findings["n3"]
    assert found.failure_class is FailureClass.NETWORK_NODE_FAILING


def test_a_bad_link_is_tested_once_more_and_named_as_a_pair(fleet: Callable[..., Fleet]) -> None:
    four = fleet(("n1", "n4"))
    four.join(*NODES)
    result = four.sweep()
    assert [(v.kind, v.entity.id) for v in result.verdicts] == [(BlameKind.PAIR, "n1,n4")]
    assert four.tester.done.count(("n1", "n4")) == 2
    assert "connection closed by peer" in result.details["n1", "n4"]


def test_who_does_not_come_is_missing_and_who_is_unfit_is_not_tested(
    fleet: Callable[..., Fleet],
) -> None:
    some = fleet()
    some.join("n1", "n2")
    some.join("n3", unfit="gpu_count: 7 GPUs")
    result = some.sweep(join_s=1.0)
    assert result.missing == {"n4": "it did not join within 1 s"}
    assert result.unfit == {"n3": "gpu_count: 7 GPUs"}
    assert some.tester.done == [("n1", "n2")]


def test_a_node_that_leaves_in_the_middle_of_a_round_is_named_and_not_convicted(
    fleet: Callable[..., Fleet],
) -> None:
    four, ordered = fleet(), set[tuple[str, ...]]()

    class Leaves(FakeTester):
        def __call__(
            self, order: PairOrder, node: str, address: str, exchange: Exchange, is_over: IsOver
        ) -> PairReport:
            if "n2" in order.nodes:
                ordered.add(order.nodes)
                store.delete(key(ALIVE, "n2"))
                if node == "n2":
                    raise LeftError
                return FAILED
            return super().__call__(order, node, address, exchange, is_over)

    store: ControlStore = four.store.new_handle()
    four.tester = Leaves()
    four.join(*NODES)
    result = four.sweep()
    # The partner saw a failed connection: whether of the node or of gpuops there, nobody knows.
    of_n2 = [test for test in result.tests if "n2" in test.nodes]
    assert len(of_n2) == 3
    assert {test.outcome for test in of_n2} == {PairOutcome.UNKNOWN}
    assert {test.outcome for test in result.tests if test not in of_n2} == {PairOutcome.PASS}
    assert all("n2: it left the sweep" in result.details[test.nodes] for test in of_n2)
    assert result.share_tested == 3 / 6
    assert result.verdicts == ()
    (found,) = result.findings
    assert (found.entity.id, found.status) == ("n2", Status.UNKNOWN)
    assert found.message.startswith("it left the sweep in round ")
    assert len(ordered) == 1  # later rounds do not wait for it


def test_a_test_that_measured_nothing_is_no_event_of_its_pair() -> None:
    tests = [
        PairTest(nodes=("n1", other), outcome=outcome, sweep="s1")
        for other, outcome in (("n2", PairOutcome.UNKNOWN), ("n3", PairOutcome.FAIL))
    ]
    result = SweepResult(
        sweep="s1",
        nodes=("n1", "n2", "n3"),
        missing={},
        unfit={},
        tests=tuple(tests),
        details={},
        verdicts=(),
        findings=(),
        share_tested=2 / 3,
    )
    body = sweep_body(result, check_run_of(result, "n1", (0, 1)))
    ended, *tested = sweep_events(body, tests, "n1", SystemClock())
    assert [event.payload["nodes"] for event in tested] == [["n1", "n3"]]
    assert ended.payload["n_tests"] == 1


def test_an_interrupted_sweep_has_what_was_done_and_names_nobody(
    fleet: Callable[..., Fleet],
) -> None:
    four, stopped, started = fleet("n3"), threading.Event(), list[str]()

    class Stops(FakeTester):
        """Interrupts the second round, in which n1 alone goes on until it is over."""

        def __call__(
            self, order: PairOrder, node: str, address: str, exchange: Exchange, is_over: IsOver
        ) -> PairReport:
            started.append(node)
            if started.count(node) == 1 or "n1" not in order.nodes:
                return super().__call__(order, node, address, exchange, is_over)
            stopped.set()
            while node == "n1" and not is_over():
                pause(0.01)
            return FAILED

    four.tester = Stops(("n3",))
    four.join(*NODES)
    result = four.sweep(is_stopped=stopped.is_set)
    assert not any(thread.is_alive() for thread in four.threads)
    assert four.findings == {}  # each raised that the sweep was interrupted
    assert (result.is_interrupted, result.verdicts, result.findings) == (True, (), ())
    assert 2 <= len(result.tests) <= 3
    assert {test.outcome for test in result.tests} == {PairOutcome.PASS, PairOutcome.FAIL}
    check_run = check_run_of(result, "n1", (0, 1))
    body, _ = stored_body(
        sweep_events(sweep_body(result, check_run), result.tests, "n1", SystemClock())[0].payload
    )
    (found,) = [item for item in body["findings"] if item["status"] == "unknown"]
    assert found["message"].startswith(f"interrupted: {len(result.tests)} tests of pairs were done")


def test_a_sweep_that_is_interrupted_before_it_began_waits_for_nobody(
    fleet: Callable[..., Fleet],
) -> None:
    result = fleet().sweep(join_s=600.0, is_stopped=lambda: True)
    assert (result.is_interrupted, result.tests) == (True, ())
    assert set(result.missing.values()) == {"it had not joined when the sweep was interrupted"}


def test_participants_end_when_nobody_leads(fleet: Callable[..., Fleet]) -> None:
    me = Participant(node="n1", address="here")
    with pytest.raises(CoordinatorLostError):
        participate(fleet().store, me, FakeTester(), pause, hold_s=0.01, coordinator_s=0.05)


def test_a_pair_below_the_median_of_the_others_is_slow(fleet: Callable[..., Fleet]) -> None:
    class Slow(FakeTester):
        def __call__(
            self, order: PairOrder, node: str, address: str, exchange: Exchange, is_over: IsOver
        ) -> PairReport:
            report = super().__call__(order, node, address, exchange, is_over)
            return replace(report, value=7.0) if "n2" in order.nodes else report

    four = fleet()
    four.tester, four.devices = Slow(), 8
    four.join(*NODES)
    result = four.sweep()
    assert [found.failure_class for found in result.findings] == [FailureClass.GPU_SLOW]
    assert [(v.kind, v.entity.id) for v in result.verdicts] == [(BlameKind.NODE, "n2")]
    assert {test.outcome for test in result.verdicts[0].evidence} == {PairOutcome.SLOW}
