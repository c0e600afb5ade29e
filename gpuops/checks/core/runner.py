"""Run a suite: run every probe, then judge the facts.

Judging is a pure function of the probes' results, so that a recording of them (`gpuops facts`)
gives the same findings. No run exceeds its deadline by more than
`gpuops.host.process.probe.STOP_S`, and an error in a probe or a judge never fails the node.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuops.checks.core.check import JudgeContext, Probe, ProbeContext, not_judged
from gpuops.checks.core.probes import ProbeResult, ProfileChooser, by_probe, collect
from gpuops.checks.core.suite import PlannedCheck, Suite
from gpuops.errors import ConfigError, ProbeError
from gpuops.host.clock import Clock
from gpuops.host.node_state import BootMoment, FleetCount
from gpuops.host.process.abandoned import AbandonedProbes
from gpuops.host.records import from_json
from gpuops.model import Finding, Json, Status, UnknownReason
from gpuops.units import iso_utc

OnFinding = Callable[[Iterable[Finding]], None]
ApplySilences = Callable[[list[Finding]], list[Finding]]


@dataclass(frozen=True, slots=True)
class CheckFailure:
    """A failure of gpuops itself: the operation, and its error."""

    what: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """The result of one run of a suite. ``late``: checks that timed out.

    ``counters``: what the next run compares with (`gpuops.checks.core.check.Check.counters`).
    ``profile``: the name of the profile applied. ``facts``: those of each probe that succeeded, by
    its name. ``moment``: the run's start; None if a recording was judged. ``fleet``: what the
    node's file has about the fleet.
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
    fleet: FleetCount | None = None

    @property
    def verdict(self) -> Status:
        """Return the worst status; pass if anything passed and the others were skipped."""
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
    """What a suite is judged by, and who is notified.

    ``chooser`` finds the profile; ``apply_silences`` has the last word on a check's findings;
    ``on_finding`` gets them as they come.
    """

    judge_context: JudgeContext
    chooser: ProfileChooser = field(default_factory=ProfileChooser)
    apply_silences: ApplySilences = list
    on_finding: OnFinding = lambda _findings: None


def run_suite(
    suite: Suite,
    machine: ProbeContext,
    run: RunContext,
    clock: Clock,
    left: AbandonedProbes,
) -> CheckRun:
    """Return what *suite* finds on *machine*.

    *left*: see `gpuops.host.process.probe.start_call`. The caller must have a single thread.
    """
    return judge(suite, collect(suite, machine, run.chooser, left), run, clock)


def judge(suite: Suite, results: Iterable[ProbeResult], run: RunContext, clock: Clock) -> CheckRun:
    """Return what *suite* finds in *results*; that of ``run.chooser.probe`` must be the first.

    *clock* dates the run and is read for nothing else.
    """
    start_us = clock.now_us()
    context = replace(run.judge_context, profile=run.chooser.first)
    groups, judged = by_probe(suite), _Judged()
    for result in results:
        group = groups.get(result.probe, [])
        if result.probe == run.chooser.probe:
            context = replace(context, profile=run.chooser.choose(result))
        facts = _facts(group[0].check.probe, result) if group else None
        for planned in group:
            found = judged.add(planned, facts, context)
            found = run.apply_silences([apply_policy(item, suite.unknown) for item in found])
            judged.findings[planned.check.name] = found
            run.on_finding(found)
    return CheckRun(
        suite=suite.name,
        node=context.node.id,
        start_us=start_us,
        end_us=clock.now_us(),
        findings=tuple(item for name in suite.names for item in judged.findings.get(name, ())),
        late=tuple(name for name in suite.names if name in judged.late),
        failures=tuple(judged.failures[name] for name in suite.names if name in judged.failures),
        counters=judged.counters,
        profile=context.profile.name,
        facts=judged.facts,
    )


@dataclass(slots=True)
class _Judged:
    """What has been judged so far; findings and failures are by check."""

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    failures: dict[str, CheckFailure] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        planned: PlannedCheck,
        facts: Any,  # noqa: ANN401 facts differ by check
        context: JudgeContext,
    ) -> list[Finding]:
        check = planned.check
        if isinstance(facts, ProbeError):
            reason = UnknownReason(facts.reason)
            findings = [not_judged(check.name, context.node, str(facts), reason)]
            if reason is UnknownReason.CRASH:
                notes = "".join(getattr(facts, "__notes__", ()))
                what = f"probe of check {check.name}"
                self.failures[check.name] = CheckFailure(what, str(facts), notes)
        else:
            self.facts[check.probe.name] = facts
            findings = self._judge(planned, facts, context)
        if any(finding.unknown_reason is UnknownReason.TIMEOUT for finding in findings):
            self.late.add(check.name)
        return findings

    def _judge(
        self,
        planned: PlannedCheck,
        facts: Any,  # noqa: ANN401 facts differ by check
        context: JudgeContext,
    ) -> list[Finding]:
        check = planned.check
        self.counters |= _counters(planned, facts)
        try:
            return check.judge(facts, planned.parameters, context)
        except Exception as exc:  # noqa: BLE001 boundary: our own bug must not fail the node
            error = f"{type(exc).__name__}: {exc}"
            what = f"judge of check {check.name}"
            self.failures[check.name] = CheckFailure(what, error, traceback.format_exc())
            text = f"a bug in gpuops, not a fault of the node: {error}"
            return [not_judged(check.name, context.node, text, UnknownReason.CRASH)]


def _counters(planned: PlannedCheck, facts: Any) -> Mapping[str, float]:  # noqa: ANN401 as above
    try:
        return planned.check.counters(facts)
    except Exception:  # noqa: BLE001 boundary: the judge of the same facts reports the bug
        return {}


def apply_policy(finding: Finding, policy: Mapping[UnknownReason, Status]) -> Finding:
    """Return *finding*; if it could not be judged, with the status that the suite gives it."""
    reason = finding.unknown_reason
    if finding.status is not Status.UNKNOWN or reason is None:
        return finding
    return replace(finding, status=policy.get(reason, Status.UNKNOWN))


def _facts(probe: Probe[Any], result: ProbeResult) -> Any:  # noqa: ANN401 facts differ by probe
    if result.error is not None:
        error = ProbeError(result.error, result.reason or UnknownReason.CRASH)
        if result.notes:
            error.add_note(result.notes)
        return error
    try:
        return from_json(probe.facts, result.facts, f"the facts of {probe.name!r}")
    except (ConfigError, ValueError) as exc:
        return ProbeError(f"the probe returned facts of another form: {exc}", UnknownReason.CRASH)
