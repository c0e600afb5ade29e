"""What ``gpuops drill`` prints."""

from collections.abc import Sequence

from gpuops.drill.fault import Fault, Outcome
from gpuops.drill.scenario import Scenario
from gpuops.log import printable


def listing(scenarios: Sequence[Scenario]) -> str:
    """Return one line for each scenario."""
    width = max(len(item.name) for item in scenarios)
    return "\n".join(f"{item.name:{width}}  {item.summary}" for item in scenarios)


def statement(fault: Fault) -> str:
    """Return what *fault* will break and how that is undone."""
    return printable(f"{fault.scenario}: {fault.breaks}\n{fault.undone}")


def said(fault: Fault, outcome: Outcome) -> str:
    """Return what became of *fault*."""
    held = "" if fault.for_s is None else f", held {fault.for_s:g} s and undone"
    if outcome.not_undone:
        held = ", NOT UNDONE: " + "; ".join(outcome.not_undone)
    lines = [f"{fault.scenario}: injected{held}"]
    lines += [f"  not all of it: {problem}" for problem in outcome.failed]
    return printable("\n".join(lines))
