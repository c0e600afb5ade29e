"""Error counters before and after a test, read and judged by the checks that do so every day.

A test that passes while errors grow fails: what was measured was measured on failing hardware.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuops.checks.core.runner import CheckRun, run_suite
from gpuops.gate.node_state import load_state
from gpuops.gate.session import CheckPlan, CheckRequest, make_plan, run_context
from gpuops.host.clock import Clock
from gpuops.host.node_state import BootMoment, CounterSample
from gpuops.host.process.abandoned import abandoned
from gpuops.model import Entity, FailureClass, Finding, Status

COUNTING = ("gpu_ecc", "nvlink_errors", "gpu_pcie_replays", "ib_errors", "pci_aer", "gpu_xid")
# Nobody waits for a job to start: a reading that is late would hide errors that grew.
READ_S = 60.0
DIAGNOSTIC_S = 1800.0
_BAD = (Status.WARN, Status.FAIL)
_Key = tuple[str, Entity, FailureClass | None]


def counting_plan(request: CheckRequest) -> CheckPlan:
    """Return the plan of *request* with only the checks of its suite that count errors.

    Raises:
        UsageError, ConfigError: See `gpuops.gate.session.make_plan`.
    """
    plan = make_plan(request)
    kept = tuple(
        replace(item, timeout_s=max(item.timeout_s, READ_S))
        for item in plan.suite.planned
        if item.check.name in COUNTING
    )
    suite = replace(plan.suite, planned=kept, deadline_s=max(plan.suite.deadline_s, 2 * READ_S))
    return replace(plan, suite=suite)


def diagnostic_plan(plan: CheckPlan) -> CheckPlan:
    """Return *plan* with `dcgm_diag` only, at level 3, as the suite's file sets it otherwise.

    DCGM's documentation gives level 3 less than 30 minutes.

    Raises:
        UsageError, ConfigError: See `gpuops.gate.session.make_plan`.
    """
    plan = make_plan(plan.request)
    kept = tuple(
        replace(item, parameters=replace(item.parameters, level=3), timeout_s=DIAGNOSTIC_S)
        for item in plan.suite.planned
        if item.check.name == "dcgm_diag"
    )
    return replace(plan, suite=replace(plan.suite, planned=kept, deadline_s=DIAGNOSTIC_S + READ_S))


@dataclass(frozen=True, slots=True)
class CounterReading:
    """The counters at one time: the run of the checks, and when it was."""

    run: CheckRun
    moment: BootMoment


def read_counters(plan: CheckPlan, clock: Clock, before: CounterReading | None) -> CounterReading:
    """Return what the checks of *plan* find, compared with *before* if given.

    The caller must have a single thread.
    """
    request, left = plan.request, abandoned()
    stored = load_state(request.state_dir, request.root, request.uid, left)
    moment = BootMoment(
        boot_id=stored.boot_id, since_boot_s=stored.since_boot_s, t_us=clock.now_us()
    )
    samples = () if before is None else (_sample(before),)
    compared = replace(stored, state=replace(stored.state, samples=samples, jobs={}))
    selector = plan.selector(stored.state.profile)
    run = run_context(plan, selector, compared, moment, lambda _findings: None)
    machine = replace(plan.machine, kernel=stored.state.kernel.of_boot(stored.boot_id))
    return CounterReading(run_suite(plan.suite, machine, run, clock, left), moment)


def _sample(reading: CounterReading) -> CounterSample:
    return CounterSample(
        boot_id=reading.moment.boot_id,
        since_boot_s=reading.moment.since_boot_s,
        t_us=reading.moment.t_us,
        values=dict(reading.run.counters),
    )


def new_errors(before: CheckRun, after: CheckRun, test: str) -> list[Finding]:
    """Return a failure for each error in *after* that *before*, ahead of *test*, did not have.

    A check that could be judged before and not after *test* is unknown: its errors may have grown.
    """
    known = _by_key(before.findings)
    unread = {item.check for item in before.findings if item.status is Status.UNKNOWN}
    late = [
        replace(found, message=f"{found.message}; after the burn-in test {test}")
        for found in after.findings
        if found.status is Status.UNKNOWN and found.check not in unread
    ]
    return late + [
        replace(
            found,
            status=Status.FAIL if found.failure_class else found.status,
            message=f"{found.message}; new during the burn-in test {test}",
        )
        for key, found in _by_key(after.findings).items()
        if key not in known or _grew(known[key], found)
    ]


def _by_key(findings: Iterable[Finding]) -> dict[_Key, Finding]:
    return {
        (item.check, item.entity, item.failure_class): item
        for item in findings
        if item.status in _BAD
    }


def _grew(before: Finding, after: Finding) -> bool:
    numbers = (before.value, after.value)
    if all(isinstance(value, int | float) for value in numbers):
        return float(after.value or 0) > float(before.value or 0)
    return before.message != after.message
