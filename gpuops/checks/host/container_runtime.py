"""Does the container runtime respond, if the operator configured one?"""

import json
from dataclasses import dataclass

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    Probe,
    ProbeContext,
    Subject,
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
    subject = Subject(
        check="container_runtime", entity=context.node, failure_class=FailureClass.HOST_SERVICE
    )
    if not parameters.command:
        return [skipped(subject, "no command is configured")]
    line = " ".join(parameters.command)
    if not facts.found:
        text = f"{parameters.command[0]} is not installed"
        return [_unknown(context, text, UnknownReason.MISSING_TOOL)]
    if facts.exit_code is None:
        return [_unknown(context, f"{line}: {facts.ending}", UnknownReason.TIMEOUT)]
    good = facts.exit_code == 0
    output = f": {facts.said}" if facts.said else ""
    return [
        Finding(
            check="container_runtime",
            entity=context.node,
            status=Status.PASS if good else Status.FAIL,
            value=facts.exit_code,
            unit="exit code",
            threshold="= 0",
            source=parameters.source,
            message=f"{line} answered in {format_seconds(facts.elapsed_s)}"
            if good
            else f"{line} {facts.ending}{output}",
            failure_class=None if good else FailureClass.HOST_SERVICE,
        )
    ]


def _unknown(context: JudgeContext, message: str, reason: UnknownReason) -> Finding:
    return Finding(
        check="container_runtime",
        entity=context.node,
        status=Status.UNKNOWN,
        message=message,
        unknown_reason=reason,
    )


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
