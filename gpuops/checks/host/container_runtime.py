"""Does the container runtime respond, if the operator configured one?"""

import json
from dataclasses import dataclass, replace

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    Probe,
    ProbeContext,
    Subject,
    not_judged,
    skipped,
)
from gpuops.checks.core.profile import Profile
from gpuops.host.systemd import RuntimeAnswer, read_runtime
from gpuops.model import FailureClass, Finding, Status, UnknownReason
from gpuops.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``command``: a program and its arguments that exits 0 if all is well; none: not checked."""

    command: tuple[str, ...] = ()
    source: str = "suite"


def judge(facts: RuntimeAnswer, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding: an exit code other than 0 fails, a missing program is unknown."""
    subject = Subject("container_runtime", context.node, FailureClass.HOST_SERVICE)
    if not parameters.command:
        return [skipped(subject, "no command is configured")]
    line = " ".join(parameters.command)
    if not facts.found:
        text = f"{parameters.command[0]} is not installed"
        return [not_judged("container_runtime", context.node, text, UnknownReason.MISSING_TOOL)]
    if facts.exit_code is None:
        return [
            not_judged(
                "container_runtime", context.node, f"{line}: {facts.ending}", UnknownReason.TIMEOUT
            )
        ]
    output = f": {facts.said}" if facts.said else ""
    status, text = Status.FAIL, f"{line} {facts.ending}{output}"
    if facts.exit_code == 0:
        status, text = Status.PASS, f"{line} answered in {format_seconds(facts.elapsed_s)}"
    about = replace(subject, unit="exit code")
    return [about.compared(status, facts.exit_code, "= 0", parameters.source, text)]


def inputs(parameters: Parameters, _profile: Profile) -> tuple[str, ...]:
    """Return the command as one text: duplicate inputs are removed, and arguments may repeat."""
    return (json.dumps(parameters.command),) if parameters.command else ()


def _read(machine: ProbeContext, budget_s: float) -> RuntimeAnswer:
    command = tuple(json.loads(machine.inputs[0])) if machine.inputs else ()
    return read_runtime(machine.root, budget_s, command)


CHECK = Check(
    name="container_runtime",
    about="the operator's command for the container runtime succeeds",
    probe=Probe("container_runtime", RuntimeAnswer, _read, sources=("the command of the suite",)),
    parameters=Parameters,
    judge=judge,
    inputs=inputs,
)
