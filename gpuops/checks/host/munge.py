"""Can a munge credential be made and read back? Slurm trusts nothing else."""

from dataclasses import dataclass

from gpuops.checks.core.check import (
    Check,
    CheckLimit,
    JudgeContext,
    Probe,
    Subject,
    skipped,
)
from gpuops.host.munge import MungeTrip, read_munge
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``elapsed_s`` of one round trip; ``required``: a node without a working munge fails.

    Where it is not required a broken one warns: the package may be installed and not in use.
    """

    elapsed_s: CheckLimit
    required: bool = False


def judge(facts: MungeTrip, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding about the round trip."""
    subject = Subject(check="munge", entity=context.node, failure_class=FailureClass.HOST_SERVICE)
    limit = parameters.elapsed_s
    if not facts.installed:
        return [skipped(subject, "munge is not installed")]
    if facts.error is not None:
        return [
            Finding(
                check="munge",
                entity=context.node,
                status=Status.FAIL if parameters.required else Status.WARN,
                value="not read back" if facts.decoding else "not made",
                threshold="made and read back",
                source="munged",
                message=facts.error,
                failure_class=FailureClass.HOST_SERVICE,
            )
        ]
    status = limit.ceiling(facts.elapsed_s)
    return [
        Finding(
            check="munge",
            entity=context.node,
            status=status,
            value=round(facts.elapsed_s, 3),
            unit="s",
            threshold=limit.text("<", "s"),
            source=limit.source,
            message=f"a credential was made and read back in {format_seconds(facts.elapsed_s)}",
            failure_class=None if status is Status.PASS else FailureClass.HOST_SERVICE,
        )
    ]


CHECK = Check(
    name="munge",
    about="a munge credential is made and read back",
    probe=Probe(
        "munge",
        MungeTrip,
        lambda machine, budget_s: read_munge(machine.root, budget_s),
        sources=("munge --no-input", "unmunge --no-output"),
    ),
    parameters=Parameters,
    judge=judge,
)
