"""Does the kernel count errors of the host's memory?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject, skipped
from gpuops.host.memory_modules import Edac, MemoryController, read_edac
from gpuops.model import EntityKind, FailureClass, Finding, Status
from gpuops.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``uncorrected`` errors since boot; ``corrected_per_day``, of one memory controller.

    After an acknowledged repair without a reboot, only new uncorrected errors count.
    """

    uncorrected: CheckLimit
    corrected_per_day: CheckLimit


def judge(facts: Edac, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each controller with errors beyond a limit, else one for all."""
    subject = Subject("edac", context.node, FailureClass.HOST_DIMM)
    if not facts.controllers:
        return [skipped(subject, "no memory controller reports (no EDAC driver)")]
    findings = []
    for controller in facts.controllers:
        findings += [
            _uncorrected(controller, parameters.uncorrected, subject, context),
            _corrected(controller, parameters.corrected_per_day, subject, context),
        ]
    found = [item for item in findings if item is not None and item.status is not Status.PASS]
    if found:
        return found
    corrected = sum(controller.corrected for controller in facts.controllers)
    limit = parameters.corrected_per_day
    text = f"{len(facts.controllers)} memory controllers, {corrected} corrected errors"
    text += " since boot, few of them new"
    threshold = limit.text("<", "per day")
    about = replace(subject, unit="errors")
    return [about.compared(Status.PASS, corrected, threshold, limit.source, text)]


def _name(controller: MemoryController, kind: str) -> str:
    return f"edac:{controller.name}:{kind}"


def _uncorrected(
    controller: MemoryController, limit: CheckLimit, subject: Subject, context: JudgeContext
) -> Finding:
    count: float = controller.uncorrected
    if _repaired(context):
        growth = context.counters.since(_name(controller, "uncorrected"), count)
        count = 0 if growth is None else growth.grown
    text = f"{controller.name}: {count:g} uncorrected memory errors{_where(controller)}"
    # The first such error is the memory's own report; no number of ours judged it.
    about = replace(subject, unit="errors", hardware_reported=count >= 1 and limit.fail == 1)
    return about.below(limit, count, text)


def _repaired(context: JudgeContext) -> bool:
    return any(
        repair.entity_kind == EntityKind.NODE.value and repair.t_us > context.boot_us
        for repair in context.repairs
    )


def _corrected(
    controller: MemoryController, limit: CheckLimit, subject: Subject, context: JudgeContext
) -> Finding | None:
    growth = context.counters.since(_name(controller, "corrected"), controller.corrected)
    if growth is None:
        return None
    text = (
        f"{controller.name}: {growth.grown:g} corrected memory errors"
        f" in {format_seconds(growth.elapsed_s)}{_where(controller)}"
    )
    about = replace(subject, unit="per day")
    return about.below(limit, growth.per_day, text, digits=1, unit="per day")


def _where(controller: MemoryController) -> str:
    named = ", ".join(f"{label} {count}" for label, count in controller.dimms.items())
    return f" (since boot: {named})" if named else ""


def counters(facts: Edac) -> Mapping[str, float]:
    """Return both counts of each controller."""
    return {
        _name(controller, kind): count
        for controller in facts.controllers
        for kind, count in (
            ("corrected", controller.corrected),
            ("uncorrected", controller.uncorrected),
        )
    }


CHECK = Check(
    name="edac",
    about="uncorrected errors of the host's memory since boot, corrected ones as a rate",
    probe=Probe(
        "edac",
        Edac,
        lambda machine, _budget_s: read_edac(machine.root),
        sources=("/sys/devices/system/edac/mc",),
    ),
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
