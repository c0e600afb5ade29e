"""Run a suite: look at everything, then judge what was seen.

Judging is a pure function of what the looks gave, so that a recording of it (`gpuops facts`) gets
the verdict that the node itself got. Nothing here can wait past the deadline by more than
`gpuops.host.process.probe.STOP_S`, and nothing that goes wrong in a look or a judge can fail the
node.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuops.checks.core.check import JudgeContext, Probe, ProbeContext
from gpuops.checks.core.probes import ProbeResult, ProfileChooser, by_look, collect
from gpuops.checks.core.suite import PlannedCheck, Suite
from gpuops.errors import ConfigError, ProbeError
from gpuops.host.clock import Clock
from gpuops.host.node_state import BootMoment
from gpuops.host.process.run_with_deadline import AbandonedProcess
from gpuops.host.records import from_json
from gpuops.model import Entity, Finding, Json, Status, UnknownReason
from gpuops.units import iso_utc

OnFinding = Callable[[Iterable[Finding]], None]
Amend = Callable[[list[Finding]], list[Finding]]

NO_CHOICE = ProfileChooser()


@dataclass(frozen=True, slots=True)
class CheckFailure:
    """A failure of gpuops itself: what was being done, and how it went wrong."""

    what: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """What one run of a suite found. ``late``: checks that gave no answer in time.

    ``counters``: what the next run will compare with (`gpuops.checks.core.check.Check.counters`).
    ``profile``: the name of the one that it was held against. ``facts``: what each look gave, by
    its name, where it gave any. ``moment``: the run's start; None where a recording was judged.
    """

    suite: str
    node: str
    start_us: int
    end_us: int
    findings: tuple[Finding, ...]
    late: tuple[str, ...] = ()
    failures: tuple[CheckFailure, ...] = field(default=())
    counters: Mapping[str, float] = field(default_factory=dict)
    profile: str = "none"
    facts: Mapping[str, Any] = field(default_factory=dict)
    moment: BootMoment | None = None

    @property
    def verdict(self) -> Status:
        """Return the worst status; pass where anything passed and the rest had nothing to see."""
        statuses = {finding.status for finding in self.findings} or {Status.PASS}
        if Status.PASS in statuses:
            statuses.discard(Status.SKIP)
        return max(statuses)

    def to_json(self) -> Json:
        return {
            "node": self.node,
            "suite": self.suite,
            "verdict": self.verdict.word,
            "start": iso_utc(self.start_us),
            "end": iso_utc(self.end_us),
            "late": list(self.late),
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True)
class RunContext:
    """On what terms a suite is judged: against what, and who hears of it.

    ``chooser`` finds the profile; ``amend`` has the last word on a check's findings (silences);
    ``tell`` hears them as they come.
    """

    case: JudgeContext
    chooser: ProfileChooser = NO_CHOICE
    amend: Amend = list
    tell: OnFinding = lambda _findings: None


def run_suite(
    suite: Suite,
    machine: ProbeContext,
    terms: RunContext,
    clock: Clock,
    left: Mapping[str, AbandonedProcess],
) -> CheckRun:
    """Return what *suite* finds on *machine*.

    *left*: see `gpuops.host.process.probe.start_call`. The caller must have a single thread.
    """
    return judge(suite, collect(suite, machine, terms.chooser, left), terms, clock)


def judge(suite: Suite, looks: Iterable[ProbeResult], terms: RunContext, clock: Clock) -> CheckRun:
    """Return what *suite* makes of *looks*; that of ``terms.chooser.look`` has to come first.

    *clock* dates the run and is read for nothing else.
    """
    start_us, case = clock.now_us(), replace(terms.case, profile=terms.chooser.first)
    groups, bench = by_look(suite), _Bench()
    for looked in looks:
        group = groups.get(looked.look, [])
        if looked.look == terms.chooser.look:
            case = replace(case, profile=terms.chooser.choose(looked))
        facts = _facts(group[0].check.look, looked) if group else None
        for planned in group:
            found = [settled(item, suite.unknown) for item in bench.judged(planned, facts, case)]
            bench.findings[planned.check.name] = terms.amend(found)
            terms.tell(bench.findings[planned.check.name])
    return CheckRun(
        suite=suite.name,
        node=case.node.id,
        start_us=start_us,
        end_us=clock.now_us(),
        findings=tuple(item for name in suite.names for item in bench.findings.get(name, ())),
        late=tuple(name for name in suite.names if name in bench.late),
        failures=tuple(bench.failures[name] for name in suite.names if name in bench.failures),
        counters=bench.counters,
        profile=case.profile.name,
        facts=bench.facts,
    )


@dataclass(slots=True)
class _Bench:
    """What has been judged so far; findings and failures are by check."""

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    failures: dict[str, CheckFailure] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def judged(
        self,
        planned: PlannedCheck,
        facts: Any,  # noqa: ANN401 facts differ by check
        case: JudgeContext,
    ) -> list[Finding]:
        findings, failure = _judged(planned, facts, case)
        self.counters |= _counted(planned, facts)
        if failure is not None:
            self.failures[planned.check.name] = failure
        if any(finding.unknown_reason is UnknownReason.TIMEOUT for finding in findings):
            self.late.add(planned.check.name)
        if not isinstance(facts, ProbeError):
            self.facts[planned.check.look.name] = facts
        return findings


def settled(finding: Finding, policy: Mapping[UnknownReason, Status]) -> Finding:
    """Return *finding* with what the suite makes of its reason, where it could not be judged."""
    reason = finding.unknown_reason
    if finding.status is not Status.UNKNOWN or reason is None:
        return finding
    return replace(finding, status=policy.get(reason, Status.UNKNOWN))


def _facts(look: Probe[Any], looked: ProbeResult) -> Any:  # noqa: ANN401 facts differ by look
    if looked.error is not None:
        error = ProbeError(looked.error, looked.reason or UnknownReason.CRASH)
        if looked.notes:
            error.add_note(looked.notes)
        return error
    try:
        return from_json(look.facts, looked.facts, f"the facts of {look.name!r}")
    except (ConfigError, ValueError) as exc:
        return ProbeError(f"the look gave something else: {exc}", UnknownReason.CRASH)


def _judged(
    planned: PlannedCheck,
    facts: Any,  # noqa: ANN401 facts differ by check
    case: JudgeContext,
) -> tuple[list[Finding], CheckFailure | None]:
    check = planned.check
    if isinstance(facts, ProbeError):
        failure = None
        if facts.reason == UnknownReason.CRASH:
            notes = "".join(getattr(facts, "__notes__", ()))
            failure = CheckFailure(f"look of check {check.name}", str(facts), notes)
        return [_unknown(check.name, case.node, str(facts), UnknownReason(facts.reason))], failure
    try:
        return check.judge(facts, planned.parameters, case), None
    except Exception as exc:  # noqa: BLE001 boundary: our own bug must not fail the node
        error = f"{type(exc).__name__}: {exc}"
        failure = CheckFailure(f"judge of check {check.name}", error, traceback.format_exc())
        text = f"a bug in gpuops, not a fault of the node: {error}"
        return [_unknown(check.name, case.node, text, UnknownReason.CRASH)], failure


def _counted(planned: PlannedCheck, facts: Any) -> Mapping[str, float]:  # noqa: ANN401 as above
    if isinstance(facts, ProbeError):
        return {}
    try:
        return planned.check.counters(facts)
    except Exception:  # noqa: BLE001 boundary: the judge of the same facts tells of the bug
        return {}


def _unknown(check: str, node: Entity, message: str, reason: UnknownReason) -> Finding:
    return Finding(
        check=check, entity=node, status=Status.UNKNOWN, message=message, unknown_reason=reason
    )
