"""Run a suite: all looks at once, each in its own child, until the deadline; then judge.

Nothing here can wait past the deadline by more than `gpuops.host.probe.STOP_S`, and nothing that
goes wrong in a look or a judge can fail the node.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuops.checks.protocol import Case, Look, Machine
from gpuops.checks.suites import Planned, Suite
from gpuops.errors import ConfigError, ProbeError
from gpuops.host import probe
from gpuops.host.abandoned import Abandoned, abandoned
from gpuops.host.clock import Clock
from gpuops.host.records import from_json, to_json
from gpuops.model import Entity, Finding, Json, Status, UnknownReason
from gpuops.units import iso_utc

Tell = Callable[[Iterable[Finding]], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of gpuops itself: what was being done, and how it went wrong."""

    what: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """What one run of a suite found. ``late``: checks that gave no answer in time.

    ``counters``: what the next run will compare with (`gpuops.checks.protocol.Check.counters`).
    """

    suite: str
    node: str
    start_us: int
    end_us: int
    findings: tuple[Finding, ...]
    late: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = field(default=())
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Status:
        """Return the worst status; pass where there was nothing to find."""
        return max((finding.status for finding in self.findings), default=Status.PASS)

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


def run_suite(
    suite: Suite,
    machine: Machine,
    *,
    case: Case,
    clock: Clock,
    tell: Tell = lambda _findings: None,
) -> CheckRun:
    """Return what *suite* finds on *machine*; *tell* hears each check's findings as they come.

    The caller must have a single thread (see `gpuops.host.probe`).
    """
    start_us = clock.now_us()
    counters: dict[str, float] = {}
    judged: dict[str, list[Finding]] = {}
    failures: list[Failure] = []
    late: set[str] = set()
    for group, facts in _looked(suite, machine, case):
        for planned in group:
            findings, failure = _judged(planned, facts, case)
            counters |= _counted(planned, facts)
            if failure is not None:
                failures.append(failure)
            if any(finding.unknown_reason is UnknownReason.TIMEOUT for finding in findings):
                late.add(planned.check.name)
            judged[planned.check.name] = [settled(finding, suite.unknown) for finding in findings]
            tell(judged[planned.check.name])
    return CheckRun(
        suite=suite.name,
        node=case.node.id,
        start_us=start_us,
        end_us=clock.now_us(),
        findings=tuple(finding for name in suite.names for finding in judged[name]),
        late=tuple(name for name in suite.names if name in late),
        failures=tuple(failures),
        counters=counters,
    )


def settled(finding: Finding, policy: Mapping[UnknownReason, Status]) -> Finding:
    """Return *finding* with what the suite makes of its reason, where it could not be judged."""
    reason = finding.unknown_reason
    if finding.status is not Status.UNKNOWN or reason is None:
        return finding
    return replace(finding, status=policy.get(reason, Status.UNKNOWN))


Looked = tuple[list[Planned], Any]


def _looked(suite: Suite, machine: Machine, case: Case) -> Iterable[Looked]:
    """Yield the checks that share a look with its facts, or the ProbeError that came instead."""
    groups: dict[str, list[Planned]] = {}
    for planned in suite.planned:
        groups.setdefault(planned.check.look.name, []).append(planned)
    started, left = {}, abandoned()
    for group in groups.values():
        budget_s = min(max(planned.timeout_s for planned in group), suite.deadline_s)
        try:
            child = _start(group[0].check.look, _told(machine, group, case), budget_s, left)
        except ProbeError as exc:
            yield group, exc
        else:
            started[child.pid] = child, group
    for child, outcome in probe.watch([child for child, _ in started.values()]):
        group = started[child.pid][1]
        yield group, _facts(group[0].check.look, outcome)


def _told(machine: Machine, group: Iterable[Planned], case: Case) -> Machine:
    asked = [
        item for planned in group for item in planned.check.asks(planned.parameters, case.profile)
    ]
    return replace(machine, asked=tuple(dict.fromkeys(asked)))


def _start(
    look: Look[Any], machine: Machine, budget_s: float, left: Mapping[str, Abandoned]
) -> probe.Child:
    return probe.start_call(
        lambda: to_json(look.read(machine, budget_s)),
        deadline_s=budget_s,
        question=f"look {look.name} {machine.root}",
        left=left,
    )


def _facts(look: Look[Any], outcome: probe.Outcome) -> Any:  # noqa: ANN401 facts differ by look
    try:
        return from_json(look.facts, probe.answer(outcome), f"the facts of {look.name!r}")
    except ProbeError as exc:
        return exc
    except (ConfigError, ValueError) as exc:
        return ProbeError(f"the look gave something else: {exc}", UnknownReason.CRASH)


def _judged(
    planned: Planned,
    facts: Any,  # noqa: ANN401 facts differ by check
    case: Case,
) -> tuple[list[Finding], Failure | None]:
    check = planned.check
    if isinstance(facts, ProbeError):
        failure = None
        if facts.reason == UnknownReason.CRASH:
            notes = "".join(getattr(facts, "__notes__", ()))
            failure = Failure(f"look of check {check.name}", str(facts), notes)
        return [_unknown(check.name, case.node, str(facts), UnknownReason(facts.reason))], failure
    try:
        return check.judge(facts, planned.parameters, case), None
    except Exception as exc:  # noqa: BLE001 boundary: our own bug must not fail the node
        error = f"{type(exc).__name__}: {exc}"
        failure = Failure(f"judge of check {check.name}", error, traceback.format_exc())
        text = f"a bug in gpuops, not a fault of the node: {error}"
        return [_unknown(check.name, case.node, text, UnknownReason.CRASH)], failure


def _counted(planned: Planned, facts: Any) -> Mapping[str, float]:  # noqa: ANN401 as above
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
