"""The one that decides in a sweep: who takes part, who is tested with whom, and what it means."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuops.burnin.blame import BlameVerdict, blame, open_questions
from gpuops.burnin.pairs import NodePair, PairOutcome, PairTest, node_pair
from gpuops.burnin.schedule import (
    CONFIRMATION_ROUNDS,
    SweepRound,
    confirmation_round,
    first_rounds,
    share_tested,
)
from gpuops.burnin.speed import speed_limits, with_speed
from gpuops.burnin.sweep_findings import (
    passed_findings,
    sweep_findings,
    unmeasured_findings,
    untested_findings,
)
from gpuops.control.store import ControlStore, Entry
from gpuops.host.clock import Clock
from gpuops.model import FailureClass, Finding, Json
from gpuops.sweep.messages import (
    ALIVE,
    COORDINATOR_KEY,
    FINDING,
    LEFT,
    ORDER,
    REPORT,
    STEP_KEY,
    PairOrder,
    PairReport,
    Participant,
    SweepStep,
    decode,
    encode,
    key,
)
from gpuops.units import NS_PER_S

# To start the processes of a test: torch alone takes seconds to import on a busy machine.
START_S = 120.0
# Small enough for a minute of a slow network, large enough that latency is not what is measured.
GPU_SIZE_BYTES, CPU_SIZE_BYTES = 2**30, 2**25
JOIN_S = 120.0  # for a health check, and for a job to start on all nodes
_POLL_S = 0.1
_LEAVE_S = 15.0  # for the participants to read what was found about them

Pause = Callable[[float], None]
OnRound = Callable[[int, Sequence[PairTest]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How to sweep. ``expected``: the nodes that should take part, ``join_s`` how long they have.

    ``size_bytes`` (None: by the nodes' devices), ``seconds`` and ``timeout_s``: see
    `gpuops.sweep.messages.PairOrder`. ``tested``: the pairs that earlier sweeps tested.
    ``nightly``: the first round of confirmation tests all nodes. ``slow_percent``: see
    `gpuops.burnin.speed.speed_limits`. ``nodes_max``, where the nodes are not known before: take
    part may whoever joins, up to so many. ``why_not`` gets the nodes that could
    be tested, and says why they are not; None: they are. ``is_stopped``: it was interrupted.
    """

    sweep: str
    seed: int
    expected: tuple[str, ...] = ()
    size_bytes: int | None = None
    seconds: float = 5.0
    timeout_s: float = 20.0
    join_s: float = JOIN_S
    tested: frozenset[NodePair] = frozenset()
    nightly: bool = False
    slow_percent: float | None = None
    nodes_max: int | None = None
    why_not: Callable[[Collection[str]], str | None] = lambda _nodes: None
    is_stopped: Callable[[], bool] = lambda: False

    @property
    def round_s(self) -> float:
        """Return after how many seconds a report is not waited for any more."""
        return START_S + 3 * self.seconds + 2 * self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep did and found.

    ``missing``: nodes that did not join, and why as far as known; ``unfit``: those that their
    health check kept out, and why; ``share_tested``: of all pairs, with those of earlier sweeps.
    ``is_interrupted``: these are the tests until then, and nobody was judged by them.
    """

    sweep: str
    nodes: tuple[str, ...]
    missing: Mapping[str, str]
    unfit: Mapping[str, str]
    tests: tuple[PairTest, ...]
    details: Mapping[NodePair, str]
    verdicts: tuple[BlameVerdict, ...]
    findings: tuple[Finding, ...]
    share_tested: float
    is_interrupted: bool = False


def coordinate(
    store: ControlStore,
    settings: SweepSettings,
    clock: Clock,
    pause: Pause,
    *,
    failed: Callable[[], Mapping[str, str]] = dict,
    on_round: OnRound = lambda _number, _tests: None,
) -> SweepResult:
    """Sweep the nodes that join; tell each of them what was found about it, and that it is over.

    *failed* returns the nodes that cannot take part, and why: they are not waited for. What is slow
    follows from the first rounds (`gpuops.burnin.speed`). *on_round* gets the number of rounds and
    all tests so far. Once ``settings.is_stopped``, the result is what was done until then.

    Raises:
        ControlStoreError: The store cannot be reached.
    """
    coordinator = _Coordinator(store, settings, clock, pause)
    store.heartbeat(COORDINATOR_KEY, b"1", watch=COORDINATOR_KEY, seen_version=0, hold_s=0.0)
    try:
        joined = coordinator.gather(failed)
        fit = coordinator.choose(joined)
        domains = {node: one.domain for node, one in fit.items() if one.domain is not None}
        tests: tuple[PairTest, ...] = ()
        for one in first_rounds(fit, seed=settings.seed, tested=settings.tested, domains=domains):
            tests = (*tests, *coordinator.run_round(one, fit))
            if settings.is_stopped():
                break
            on_round(coordinator.step, tests)
        limits = speed_limits(tests, domains=domains, slow_percent=settings.slow_percent)
        tests = tuple(with_speed(test, limits, domains) for test in tests)
        for number in range(CONFIRMATION_ROUNDS):
            one = confirmation_round(
                open_questions(tests, domains),
                seed=settings.seed + coordinator.step,
                domains=domains,
                fill=settings.nightly and number == 0,
                tested=settings.tested,
            )
            if not one.pairs or settings.is_stopped():
                break
            again = coordinator.run_round(one, fit)
            tests = (*tests, *(with_speed(test, limits, domains) for test in again))
            on_round(coordinator.step, tests)
        is_interrupted = settings.is_stopped()
        verdicts = () if is_interrupted else blame(tests, domains)
        limit = min(limits.values(), key=lambda one: one.low, default=None)
        has_gpus = any(one.devices for one in fit.values())
        slow_node = FailureClass.GPU_SLOW if has_gpus else FailureClass.HOST_SLOW
        findings = sweep_findings(verdicts, slow_node=slow_node, limit=limit)
        if not is_interrupted:
            findings += unmeasured_findings(tests, coordinator.left)
            coordinator.publish((*findings, *passed_findings(tests, findings)))
        return SweepResult(
            sweep=settings.sweep,
            nodes=tuple(sorted(fit)),
            missing=_missing(settings, joined, failed()),
            unfit={node: one.unfit for node, one in joined.items() if one.unfit is not None},
            tests=tests,
            details=coordinator.details,
            verdicts=verdicts,
            findings=tuple(findings),
            share_tested=share_tested(fit, settings.tested | _measured(tests)),
            is_interrupted=is_interrupted,
        )
    finally:
        coordinator.end()


class _Coordinator:
    """The store's side of a sweep: ``step`` is the last step, ``details`` says what went wrong.

    ``left``: in which step a node was gone. That is no fault of a link, and perhaps ours.
    """

    def __init__(
        self, store: ControlStore, settings: SweepSettings, clock: Clock, pause: Pause
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._pause = pause
        self._is_stopped = settings.is_stopped
        self.step = 0
        self.details: dict[NodePair, str] = {}
        self.left: dict[str, int] = {}

    def gather(self, failed: Callable[[], Mapping[str, str]]) -> dict[str, Participant]:
        """Return who has joined once all nodes have that can, or their time is over."""
        expected, nodes_max = set(self._settings.expected), self._settings.nodes_max

        def are_all_here() -> bool:
            here = self._alive().keys() | failed().keys()
            is_full = here >= expected if nodes_max is None else len(here) >= nodes_max
            return is_full or self._is_stopped()

        self._wait(are_all_here, self._settings.join_s)
        joined = self._alive().items()
        return {node: one for node, one in joined if nodes_max or node in expected}

    def choose(self, joined: Mapping[str, Participant]) -> Mapping[str, Participant]:
        """Return who is to be tested; tell them why, if nobody is."""
        fit = {node: one for node, one in joined.items() if one.unfit is None}
        why_not = self._settings.why_not(fit)
        if why_not is None:
            return fit
        self.publish(untested_findings(fit, why_not))
        return {}

    def run_round(self, one: SweepRound, joined: Mapping[str, Participant]) -> list[PairTest]:
        """Have the pairs of a round tested; return what came of each; if stopped, of those done."""
        if not one.pairs or self._is_stopped():
            return []
        self.step += 1
        self._note_left(joined)
        here = [pair for pair in one.pairs if self.left.keys().isdisjoint(pair)]
        for pair in here:
            order = encode(self._order(pair, joined))
            for node in pair:
                self._store.put(key(ORDER, self.step, node), order)
        self._store.put(STEP_KEY, encode(SweepStep(number=self.step)))
        reports = self._reports({node for pair in here for node in pair})
        is_stopped = self._is_stopped()
        done = [pair for pair in one.pairs if not is_stopped or reports.keys() >= set(pair)]
        return [self._test(pair, reports) for pair in done]

    def publish(self, findings: Iterable[Finding]) -> None:
        """Write what was found about each node and its pairs, for the node itself."""
        by_node: dict[str, list[Json]] = {}
        for finding in findings:
            for node in finding.entity.id.split(","):
                by_node.setdefault(node, []).append(finding.to_json())
        for node, found in by_node.items():
            self._store.put(key(FINDING, node), json.dumps(found).encode())

    def end(self) -> None:
        """Tell all participants that the sweep is over, and wait until they know."""
        over = SweepStep(number=self.step, is_over=True, is_interrupted=self._is_stopped())
        self._store.put(STEP_KEY, encode(over))
        self._wait(lambda: self._by_node(LEFT).keys() >= self._alive().keys(), _LEAVE_S)

    def _by_node(self, *words: object) -> dict[str, Entry]:
        prefix = key(*words, "")
        return {name.removeprefix(prefix): e for name, e in self._store.list(prefix).items()}

    def _alive(self) -> dict[str, Participant]:
        found = self._by_node(ALIVE).items()
        return {node: decode(Participant, entry, "a participant") for node, entry in found}

    def _order(self, pair: NodePair, joined: Mapping[str, Participant]) -> PairOrder:
        a, b = pair
        settings = self._settings
        devices = min(joined[a].devices, joined[b].devices)
        return PairOrder(
            a=a,
            b=b,
            devices=devices,
            size_bytes=settings.size_bytes or (GPU_SIZE_BYTES if devices else CPU_SIZE_BYTES),
            seconds=settings.seconds,
            timeout_s=settings.timeout_s,
        )

    def _reports(self, nodes: Collection[str]) -> dict[str, PairReport]:
        """Return the reports of *nodes* as far as they come; a node that left sends none."""

        def awaited() -> set[str]:
            return (set(nodes) - self._by_node(REPORT, self.step).keys()) & self._alive().keys()

        self._wait(lambda: self._is_stopped() or not awaited(), self._settings.round_s)
        found = self._by_node(REPORT, self.step).items()
        reports = {node: decode(PairReport, entry, "a report") for node, entry in found}
        silent = set() if self._is_stopped() else set(nodes) - reports.keys()
        self._note_left(silent)
        late = f"no report in {self._settings.round_s:g} s"
        for node in silent - self.left.keys():
            reports[node] = PairReport(outcome=PairOutcome.TIMEOUT, detail=late)
        return reports

    def _note_left(self, nodes: Iterable[str]) -> None:
        """Record which of *nodes* are gone since an earlier look."""
        alive = self._alive()
        for node in nodes:
            if node not in alive:
                self.left.setdefault(node, self.step)

    def _test(self, pair: NodePair, reports: Mapping[str, PairReport]) -> PairTest:
        a, b = (self._report(node, reports) for node in pair)
        outcome = _joint_outcome(a.outcome, b.outcome)
        named = zip(pair, (a, b), strict=True)
        texts = [f"{node}: {report.detail}" for node, report in named if report.detail]
        if texts:
            self.details[pair] = "; ".join(texts)
        return PairTest(
            nodes=node_pair(*pair),
            outcome=outcome,
            round=self.step - 1,
            value=a.value if outcome is PairOutcome.PASS else None,
            sweep=self._settings.sweep,
            t_us=self._clock.now_us(),
        )

    def _report(self, node: str, reports: Mapping[str, PairReport]) -> PairReport:
        why = "it left the sweep" if node in self.left else ""
        return reports.get(node, PairReport(outcome=PairOutcome.UNKNOWN, detail=why))

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> None:
        end_ns = self._clock.mono_ns() + round(limit_s * NS_PER_S)
        while not condition() and self._clock.mono_ns() < end_ns:
            self._pause(_POLL_S)


def _missing(
    settings: SweepSettings, joined: Collection[str], failed: Mapping[str, str]
) -> Mapping[str, str]:
    late = f"it did not join within {settings.join_s:g} s"
    if settings.is_stopped():
        late = "it had not joined when the sweep was interrupted"
    return {node: failed.get(node, late) for node in sorted(set(settings.expected) - {*joined})}


def _measured(tests: Iterable[PairTest]) -> frozenset[NodePair]:
    return frozenset(test.nodes for test in tests if test.outcome is not PairOutcome.UNKNOWN)


def _joint_outcome(a: PairOutcome, b: PairOutcome) -> PairOutcome:
    """Return what two nodes saw of one test. Who could not test at all says nothing of the link."""
    for outcome in (PairOutcome.UNKNOWN, PairOutcome.FAIL, PairOutcome.TIMEOUT):
        if outcome in (a, b):
            return outcome
    return a
