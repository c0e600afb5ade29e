"""Did earlier jobs leave processes behind?

`load` reports those that are stuck inside the kernel.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject, not_judged
from gpuops.host.leftovers import Leftovers, UserProcess, read_leftovers
from gpuops.host.procfs import is_named
from gpuops.model import FailureClass, Finding, UnknownReason
from gpuops.units import format_seconds

_NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``zombies`` on the node; ``leftovers``: users' processes that belong to no Slurm job.

    Without ``leftovers`` those are not judged: on a login node they are not a fault.
    ``age_s``: younger ones do not count; ``ignore``: patterns of names that do not.
    """

    zombies: CheckLimit
    leftovers: CheckLimit | None = None
    age_s: float = 0.0
    ignore: tuple[str, ...] = ()


def judge(facts: Leftovers, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding about zombies and one about leftovers, if they are judged."""
    findings = [_counted(facts.zombies, parameters.zombies, f"{facts.zombies} zombies", context)]
    if parameters.leftovers is None:
        return findings
    if facts.hidden:
        text = "other users' processes are hidden (hidepid)"
        hidden = not_judged("processes", context.node, text, UnknownReason.NO_PERMISSION)
        return [*findings, hidden]
    left = [item for item in facts.processes if _counts(item, parameters)]
    beyond = facts.count - len(facts.processes)
    text = f"left over: {_named(left, beyond)}" if left else "no process is left over"
    return [*findings, _counted(len(left) + beyond, parameters.leftovers, text, context)]


def _counts(item: UserProcess, parameters: Parameters) -> bool:
    return item.age_s >= parameters.age_s and not is_named(item.name, parameters.ignore)


def _named(items: list[UserProcess], beyond: int) -> str:
    shown: Iterable[str] = (
        f"{item.name} ({item.pid}, user {item.uid}, {format_seconds(item.age_s)} old)"
        for item in items[:_NAMED_MAX]
    )
    more = len(items) - _NAMED_MAX + beyond
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _counted(count: int, limit: CheckLimit, message: str, context: JudgeContext) -> Finding:
    subject = Subject("processes", context.node, FailureClass.HOST_LEFTOVERS, "processes")
    return subject.below(limit, count, message)


CHECK = Check(
    name="processes",
    about="zombies, and users' processes that belong to no job",
    probe=Probe(
        "leftovers",
        Leftovers,
        lambda machine, _budget_s: read_leftovers(machine.root),
        sources=("/proc/*/stat", "/proc/*/status", "/proc/*/cgroup"),
    ),
    parameters=Parameters,
    judge=judge,
)
