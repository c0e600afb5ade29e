"""Is the load high, or is a process stuck inside the kernel?"""

import os
from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject
from gpuops.host.process.abandoned import AbandonedProbes, abandoned
from gpuops.host.process.inspect import ancestors
from gpuops.host.procfs import Load, Process, read_load
from gpuops.model import Entity, FailureClass, Finding, Status

_NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``per_cpu``: 1-minute load average over CPUs; ``blocked``: processes that stay in state D."""

    per_cpu: CheckLimit
    blocked: CheckLimit


def without_probes(load: Load, run_pid: int, left: AbandonedProbes) -> Load:
    """Return *load* without our own hung children: their checks report them.

    These are the descendants of *run_pid* and those on record; a name proves nothing.
    """

    def is_ours(item: Process) -> bool:
        return item.pid in left.pids or run_pid in ancestors(item.pid)

    return replace(load, blocked=tuple(item for item in load.blocked if not is_ours(item)))


def judge(facts: Load, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding about load and one about blocked processes.

    Those that wait for a network file system are only mentioned: `mount_alive` judges its mounts.
    """
    return [
        _load(facts, parameters.per_cpu, context.node),
        _blocked(facts, parameters.blocked, context.node),
    ]


def _load(facts: Load, limit: CheckLimit, node: Entity) -> Finding:
    text = f"load {facts.load1:g}, {facts.load5:g}, {facts.load15:g} on {facts.cpus} CPUs"
    # A high load is a symptom of an unknown failure.
    subject = Subject("load", node, FailureClass.UNRESOLVED, "per CPU")
    found = subject.below(limit, facts.load1 / facts.cpus, text, digits=2)
    return found if found.status is Status.FAIL else replace(found, failure_class=None)


def _blocked(facts: Load, limit: CheckLimit, node: Entity) -> Finding:
    count = len(facts.blocked)
    named = ", ".join(f"{item.name} ({item.pid})" for item in facts.blocked[:_NAMED_MAX])
    more = f" and {count - _NAMED_MAX} more" if count > _NAMED_MAX else ""
    text = f"stuck inside the kernel: {named}{more}" if count else "none stuck in state D"
    if facts.on_network:
        text += f"; {facts.on_network} wait for a network file system (see mount_alive)"
    subject = Subject("load", node, FailureClass.HUNG_TASK, "processes")
    return subject.below(limit, count, text)


CHECK = Check(
    name="load",
    about="load average and processes stuck in state D",
    probe=Probe(
        "load",
        Load,
        lambda machine, _budget_s: without_probes(
            read_load(machine.root), os.getppid(), abandoned()
        ),
        sources=("/proc/loadavg", "/proc/stat", "/proc/*/stat"),
    ),
    parameters=Parameters,
    judge=judge,
)
