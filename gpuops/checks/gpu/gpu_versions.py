"""Do driver, library and VBIOS match each other, the other GPUs and the profile?"""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    counted,
    finding,
    judge_each,
    majority,
    peers_of,
    unanswered,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu, NvmlSnapshot
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_versions"
_CALLS = ("nvmlDeviceGetVbiosVersion",)


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each version that is not as profiled, or differs from the others here.

    A difference from the profile fails; a difference among the GPUs only warns.
    """
    of_gpus = judge_each(
        _NAME,
        facts,
        context,
        lambda gpu: _vbios(gpu, facts, context),
        lambda gpus: _summary(gpus, facts.nvml),
        _CALLS,
    )
    if unanswered(_NAME, facts, context) is not None:
        return of_gpus
    of_node = [*_driver(facts.nvml, context), *_library(facts.nvml), *_models(facts.nvml)]
    if of_node:
        of_gpus = [item for item in of_gpus if item.status is not Status.PASS]
    return [*(finding(_NAME, context.node, verdict) for verdict in of_node), *of_gpus]


def _driver(nvml: NvmlSnapshot, context: JudgeContext) -> list[GpuVerdict]:
    profiled = context.profile.driver
    if profiled is None or nvml.driver in profiled.value:
        return []
    expected = " or ".join(profiled.value)
    if nvml.driver is None:
        text = f"NVML does not report the driver's version, {expected} is expected"
        return [GpuVerdict(status=Status.SKIP, message=text)]
    return [
        GpuVerdict(
            status=Status.FAIL,
            message=f"the driver is {nvml.driver}, expected {expected}",
            value=nvml.driver,
            threshold=f"= {expected}",
            source=f"profile {context.profile.name}: {profiled.source}",
            failure_class=FailureClass.GPU_CONFIG,
        )
    ]


def _library(nvml: NvmlSnapshot) -> list[GpuVerdict]:
    """Compare NVML's version (12.580.65.06, after CUDA's major version) with the driver's."""
    library, driver = nvml.nvml_version, nvml.driver
    if library is None or driver is None or library == driver or library.endswith(f".{driver}"):
        return []
    return [
        GpuVerdict(
            status=Status.WARN,
            message=f"the NVML library is {library}, the driver {driver}",
            value=library,
            threshold=f"of driver {driver}",
            failure_class=FailureClass.GPU_DRIVER,
        )
    ]


def _models(nvml: NvmlSnapshot) -> list[GpuVerdict]:
    names = [gpu.name for gpu in nvml.gpus if gpu.name]
    models = sorted(set(names))
    if len(models) < 2:
        return []
    text = ", ".join(f"{names.count(model)} x {model}" for model in models)
    return [
        GpuVerdict(
            status=Status.WARN,
            message=f"different models in one node: {text}",
            value=len(models),
            unit="models",
            threshold="= 1",
            failure_class=FailureClass.GPU_CONFIG,
        )
    ]


def _vbios(gpu: NvmlGpu, facts: Gpus, context: JudgeContext) -> GpuResult:
    if gpu.vbios is None:
        return NotReported()
    profile = context.profile
    if profile.vbios is not None:
        wrong, expected = gpu.vbios not in profile.vbios.value, " or ".join(profile.vbios.value)
        status, source = Status.FAIL, f"profile {profile.name}: {profile.vbios.source}"
    else:
        usual = majority(peer.vbios for peer in peers_of(gpu, facts))
        wrong = gpu.vbios != usual
        expected = usual or "the same on all"
        status, source = Status.WARN, "the GPUs of this model here"
    if not wrong:
        return ()
    return GpuVerdict(
        status=status,
        message=f"its VBIOS is {gpu.vbios}, expected {expected}",
        value=gpu.vbios,
        threshold=f"= {expected}",
        source=source,
        failure_class=FailureClass.GPU_CONFIG,
    )


def _summary(gpus: Sequence[NvmlGpu], nvml: NvmlSnapshot) -> GpuVerdict:
    versions = sorted({gpu.vbios for gpu in gpus if gpu.vbios})
    return GpuVerdict(
        message=f"{counted(gpus)}: driver {nvml.driver or 'unknown'}, "
        f"NVML {nvml.nvml_version or 'unknown'}, VBIOS {', '.join(versions)}",
        value=nvml.driver,
    )


CHECK = Check(
    name=_NAME,
    about="driver, NVML and VBIOS are as profiled, and the same on all GPUs of a model",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
