"""Are all GPUs present, as NVML counts them?"""

from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, JudgeContext
from gpuops.checks.core.profile import NumberExpectation
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuVerdict,
    finding,
    listed,
    not_found,
    selected,
    surely_selected,
    unanswered,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NO_ACCESS, OPEN_CALL, UNREADABLE, NvmlGpu, NvmlStatus
from gpuops.model import FailureClass, Finding, Status
from gpuops.slurm.env import NUMBERED

_NAME = "gpu_count"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``expected`` GPUs and the source; None: the profile's, else as many as the PCI bus shows.

    Only a configured expectation can fail a node. One inferred from the bus warns: inside a
    container or a job's cgroup NVML rightly shows fewer. GPUs that Slurm assigned are an
    expectation if NVML lists none at all (`gpus_expected`). ``inside_job``: the suite runs there,
    so that a GPU that the bus shows and NVML does not is at most a warning.
    """

    expected: int | None = None
    source: str = "suite"
    inside_job: bool = False


@dataclass(frozen=True, slots=True)
class _Expected:
    count: int | None
    source: str


def gpus_expected(facts: Gpus, context: JudgeContext) -> NumberExpectation | None:
    """Return how many GPUs this node must have, and who says so; None if nobody does.

    The first of: flag, environment, configuration or suite; the profile; the GPUs that a job was
    given. The last says little where there is no NVIDIA library: Slurm counts the GPUs of all
    makers, so then its numbers only count where the bus shows NVIDIA's.
    """
    profiled = context.profile.gpu_count
    if context.gpus_expected is not None:
        return context.gpus_expected
    if profiled is not None:
        source = f"profile {context.profile.name}: {profiled.source}"
        return replace(profiled, source=source)
    by_slurm = any(name.startswith(NUMBERED) for name in context.gpus or ())
    is_nvidia = facts.nvml.status is not NvmlStatus.ABSENT or (by_slurm and bool(facts.pci))
    if context.gpus and is_nvidia:
        source = "the selected GPUs (--gpus, SLURM_JOB_GPUS)"
        return NumberExpectation(value=len(context.gpus), source=source)
    return None


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding about the count, and those about selected GPUs that are missing.

    GPUs of AMD are out of scope, which is said where there are no others. A GPU that Slurm surely
    gave a job fails if NVML does not list it or cannot open it.
    """
    expected = _expectation(parameters, facts, context)
    is_down = facts.nvml.status in {NvmlStatus.ABSENT, NvmlStatus.ERROR}
    if is_down and facts.nvml.error_code not in NO_ACCESS and expected.count is not None:
        return [finding(_NAME, context.node, _not_started(facts, expected.count, expected.source))]
    if facts.amd and not facts.pci and not facts.nvml.gpus and expected.count is None:
        text = f"{facts.amd} GPUs of AMD on the PCI bus: gpuops checks those of NVIDIA only"
        verdict = GpuVerdict(status=Status.SKIP, message=text, source=None)
        return [finding(_NAME, context.node, verdict)]
    if facts.nvml.status is not NvmlStatus.OK:
        silent = unanswered(_NAME, facts, context)
        assert silent is not None
        return [silent]
    counted = finding(
        _NAME, context.node, _counted(facts, expected, inside_job=parameters.inside_job)
    )
    return [counted, *_not_given(facts, context)]


def _not_given(facts: Gpus, context: JudgeContext) -> list[Finding]:
    by_slurm = any(name.startswith(NUMBERED) for name in context.gpus or ())
    if by_slurm and not facts.nvml.gpus:
        return []  # `_counted` says so.
    found = not_found(_NAME, facts, context)
    if not by_slurm or not surely_selected(facts, context):
        return found
    unopened = [gpu for gpu in selected(facts, context) if not _is_present(gpu)]
    if unopened:
        text = f"NVML cannot open {listed(unopened)}, which the job was given: {unopened[0].error}"
        verdict = GpuVerdict(
            message=text,
            value=len(unopened),
            unit="GPUs",
            threshold="= 0",
            failure_class=FailureClass.GPU_MISSING,
        )
        found.append(finding(_NAME, context.node, verdict))
    return [replace(item, status=Status.FAIL) for item in found]


def _expectation(parameters: Parameters, facts: Gpus, context: JudgeContext) -> _Expected:
    if parameters.expected is not None:
        return _Expected(parameters.expected, parameters.source)
    expected = gpus_expected(facts, context)
    configured = context.gpus_expected or context.profile.gpu_count
    # Single names may be MIG's, so that only the absence of all GPUs is certain.
    if expected is not None and (configured or not facts.nvml.gpus):
        return _Expected(int(expected.value), expected.source)
    return _Expected(None, "PCI bus")


def _counted(facts: Gpus, expected: _Expected, *, inside_job: bool) -> GpuVerdict:
    count = sum(map(_is_present, facts.nvml.gpus))
    driver = f", driver {facts.nvml.driver}" if facts.nvml.driver else ""
    names = sorted({gpu.name for gpu in facts.nvml.gpus if gpu.name})
    text = f"{count} GPUs" + (f" ({', '.join(names)})" if names else "") + driver
    if expected.count is None and not facts.pci and not count:
        return GpuVerdict(status=Status.SKIP, message="no GPU, and none expected", source=None)
    # Without a view of the bus (a container), NVML's own count is the expectation.
    number = expected.count if expected.count is not None else len(facts.pci) or count
    as_expected = GpuVerdict(
        message=text, value=count, unit="GPUs", threshold=f"= {number}", source=expected.source
    )
    if count == number:
        return as_expected
    if count > number:
        return replace(as_expected, status=Status.WARN, message=f"{text}: more than expected")
    hidden = inside_job and _alive_on_bus(facts) >= number
    return replace(
        as_expected,
        status=Status.WARN if expected.count is None or hidden else Status.FAIL,
        message=f"{text}: {number - count} missing"
        + (", or hidden from this job: the PCI bus shows all" if hidden else ""),
        failure_class=FailureClass.GPU_MISSING,
    )


def _is_present(gpu: NvmlGpu) -> bool:
    """Return whether NVML has *gpu*, even if its UUID is garbage or its calls hang or crash.

    One that this user may not ask counts too. `gpu_lost` judges what it reports wrongly,
    `gpu_driver` hangs and crashes.
    """
    if gpu.uuid is not None or gpu.hung_call is not None or gpu.crash is not None:
        return True
    is_opened = not any(error.call == OPEN_CALL for error in gpu.errors)
    may_ask = gpu.error_code not in NO_ACCESS
    return (is_opened and gpu.error_code in {None, UNREADABLE}) or not may_ask


def _alive_on_bus(facts: Gpus) -> int:
    return sum(gpu.answers is not False for gpu in facts.pci)


def _not_started(facts: Gpus, expected: int, source: str) -> GpuVerdict:
    none = GpuVerdict(
        message="no GPU in use, as expected",
        value=0,
        unit="GPUs",
        threshold=f"= {expected}",
        source=source,
    )
    if not expected:
        return none
    if facts.nvml.status is NvmlStatus.ERROR:
        text = f"NVML does not start and counts no GPU: {facts.nvml.error}; see gpu_driver"
        failure_class = FailureClass.GPU_DRIVER
    elif not facts.pci:
        text, failure_class = (
            "no GPU on the PCI bus and no NVIDIA driver library",
            FailureClass.GPU_MISSING,
        )
    else:
        text = f"{len(facts.pci)} GPUs on the PCI bus, but libnvidia-ml.so.1 is not installed"
        failure_class = FailureClass.GPU_DRIVER
    return replace(none, status=Status.FAIL, message=text, failure_class=failure_class)


CHECK = Check(
    name=_NAME,
    about="as many GPUs as the flag, the profile or the PCI bus say",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
