"""Can a munge credential be created and decoded? Slurm authenticates with nothing else."""

from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject, skipped
from gpuops.host.munge import MungeTrip, read_munge
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``elapsed_s`` of one round trip; ``required``: a node without a working munge fails.

    If it is not required, a broken one warns: the package may be installed and not in use.
    """

    elapsed_s: CheckLimit
    required: bool = False


def judge(facts: MungeTrip, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding about the round trip."""
    subject = Subject("munge", context.node, FailureClass.HOST_SERVICE)
    if not facts.installed:
        return [skipped(subject, "munge is not installed")]
    if facts.error is not None:
        status = Status.FAIL if parameters.required else Status.WARN
        value = "not decoded" if facts.decoding else "not created"
        return [subject.compared(status, value, "created and decoded", "munged", facts.error)]
    text = f"a credential was created and decoded in {format_seconds(facts.elapsed_s)}"
    about = replace(subject, unit="s")
    return [about.below(parameters.elapsed_s, facts.elapsed_s, text, digits=3, unit="s")]


CHECK = Check(
    name="munge",
    about="a munge credential can be created and decoded",
    probe=Probe(
        "munge",
        MungeTrip,
        lambda machine, budget_s: read_munge(machine.root, budget_s),
        sources=("munge --no-input", "unmunge --no-output"),
    ),
    parameters=Parameters,
    judge=judge,
)
