"""Did the BMC log a fault of memory, processor, power or cooling lately?"""

import re
from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext, Probe, Subject, skipped
from gpuops.host.bmc import BmcEvent, BmcLog, read_bmc_log
from gpuops.model import EntityKind, FailureClass, Finding, Status
from gpuops.units import format_seconds

_NAME = "bmc_events"
_THRESHOLD = "not asserted"
# IPMI 2.0, table 42-3 (sensor type codes) and 42-2 (threshold events), in ipmitool's words. A
# processor's "State Asserted" is CATERR on Intel's boards (System Event Log Troubleshooting Guide).
_FAULTS = (
    (re.compile(r"Memory\b"), re.compile(r"Uncorrectable ECC"), FailureClass.HOST_DIMM),
    (
        re.compile(r"Processor\b"),
        re.compile(
            r"IERR\b|CATERR\b|State Asserted|FRB1/BIST failure|FRB3/Processor startup"
            r"|SM BIOS Uncorrectable|Uncorrectable machine check"
        ),
        FailureClass.HOST_CPU,
    ),
    (re.compile(r"Processor\b"), re.compile(r"Thermal Trip"), FailureClass.GPU_THERMAL_POWER),
    (
        re.compile(r"Power Supply\b"),
        re.compile(r"Failure detected|Power Supply AC lost|AC lost or out-of-range"),
        FailureClass.GPU_THERMAL_POWER,
    ),
    (
        re.compile(r"Temperature\b"),
        re.compile(r"Upper (Critical|Non-recoverable) going high"),
        FailureClass.GPU_THERMAL_POWER,
    ),
    (
        re.compile(r"Fan\b"),
        re.compile(r"Lower (Critical|Non-recoverable) going low"),
        FailureClass.GPU_THERMAL_POWER,
    ),
)
# These end because the machine was reset or switched off, which repairs nothing.
_ENDED_BY_RESET = re.compile(r"IERR\b|CATERR\b|Thermal Trip|Uncorrectable machine check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``hours``: how long an event counts, unless it ends; and the source."""

    hours: int = 24
    source: str = "suite"


def judge(facts: BmcLog, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each sensor that reported a fault lately, else one for all.

    An uncorrectable error of memory since boot fails; one from before may have been repaired by the
    reboot, so it only warns, as all others do. A state that ended does not count, unless a reset
    ended it; nor does an event without a usable time or from before the node's last repair.
    """
    subject = Subject(_NAME, context.node, FailureClass.HOST_DIMM)
    if facts.missing is not None:
        return [skipped(subject, facts.missing)]
    findings = []
    for (sensor, failure_class), events in _standing(facts, parameters, context).items():
        newest = events[-1]
        in_this_boot = newest.age_s is not None and newest.age_s <= context.counters.since_boot_s
        is_memory = failure_class is FailureClass.HOST_DIMM
        about = Subject(_NAME, context.node, failure_class)
        status = Status.FAIL if is_memory and in_this_boot else Status.WARN
        times = f", {len(events)} times" if len(events) > 1 else ""
        text = f"{sensor}: {newest.text}{times}, last {format_seconds(newest.age_s or 0)} ago"
        findings.append(about.compared(status, newest.text, _THRESHOLD, parameters.source, text))
    if findings:
        return findings
    undated = sum(event.age_s is None for event in facts.events)
    text = f"no fault in the newest {len(facts.events)} events of {parameters.hours} hours"
    text += f"; {undated} without a usable time" if undated else ""
    return [subject.compared(Status.PASS, None, _THRESHOLD, parameters.source, text)]


def _standing(
    facts: BmcLog, parameters: Parameters, context: JudgeContext
) -> dict[tuple[str, FailureClass], list[BmcEvent]]:
    """Return the faults by sensor and class that were asserted lately and did not end."""
    standing: dict[tuple[str, FailureClass], list[BmcEvent]] = {}
    for event in facts.events:
        failure_class = _class_of(event)
        if failure_class is None:
            continue
        key = (event.sensor, failure_class)
        if not event.asserted:
            # The log is in order, so an end counts without a usable time.
            if _ENDED_BY_RESET.match(event.text):
                continue
            # Of two thresholds of one sensor the higher ends first.
            others = [item for item in standing.pop(key, []) if _state(item) != _state(event)]
            if others:
                standing[key] = others
        elif _is_recent(event.age_s, parameters, context):
            standing.setdefault(key, []).append(event)
    return standing


def _is_recent(age_s: float | None, parameters: Parameters, context: JudgeContext) -> bool:
    if age_s is None or age_s > parameters.hours * 3600:
        return False
    return not _repaired(age_s, context)


def _state(event: BmcEvent) -> str:
    """Return the text without the details of a vendor, which may differ when the state ends."""
    return event.text.partition(" (")[0].strip().lower()


def _class_of(event: BmcEvent) -> FailureClass | None:
    for sensor, text, failure_class in _FAULTS:
        if sensor.match(event.sensor) and text.match(event.text):
            return failure_class
    return None


def _repaired(age_s: float, context: JudgeContext) -> bool:
    at_us = context.counters.t_us - age_s * 1e6
    return any(
        repair.entity_kind == EntityKind.NODE.value and repair.t_us >= at_us
        for repair in context.repairs
    )


CHECK = Check(
    name=_NAME,
    about="the BMC's event log has no standing fault of memory, CPU, power or cooling",
    probe=Probe(
        "bmc_log",
        BmcLog,
        lambda machine, budget_s: read_bmc_log(machine.root, budget_s),
        locks=frozenset({"bmc"}),
        sources=("ipmitool sel time get", "ipmitool sel list"),
    ),
    parameters=Parameters,
    judge=judge,
)
