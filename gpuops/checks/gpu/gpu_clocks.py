"""May each GPU run at the full clock of its model?"""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    counted,
    judge_each,
    majority,
    peers_of,
    span,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_clocks"
_CALLS = ("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetMaxClockInfo")


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose clock limit is below the profile's or its peers'.

    The limit is the SM clock for applications, else the maximum one. The current clock is not
    judged: an idle GPU runs slowly.
    """
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu, facts, context), _summary, _CALLS
    )


def _allowed_mhz(gpu: NvmlGpu) -> int | None:
    clocks = gpu.clocks
    return clocks.sm_max_mhz if clocks.sm_application_mhz is None else clocks.sm_application_mhz


def _judge(gpu: NvmlGpu, facts: Gpus, context: JudgeContext) -> GpuResult:
    allowed_mhz, profile = _allowed_mhz(gpu), context.profile
    if allowed_mhz is None:
        return NotReported()
    expected = profile.sm_clock_mhz_min
    if expected is not None:
        source = f"profile {profile.name}: {expected.source}"
        slow = allowed_mhz < expected.value
        return _slow(allowed_mhz, expected.value, Status.FAIL, source) if slow else ()
    usual_mhz = majority(_allowed_mhz(peer) for peer in peers_of(gpu, facts))
    if usual_mhz is not None and allowed_mhz < usual_mhz:
        return _slow(allowed_mhz, usual_mhz, Status.WARN, "most GPUs of this model here")
    return ()


def _slow(allowed_mhz: int, wanted_mhz: float, status: Status, source: str) -> GpuVerdict:
    return GpuVerdict(
        status=status,
        message=f"its SM clock may reach {allowed_mhz} MHz, expected {wanted_mhz:g} MHz",
        value=allowed_mhz,
        unit="MHz",
        threshold=f">= {wanted_mhz:g} MHz",
        source=source,
        failure_class=FailureClass.GPU_CONFIG,
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    allowed = [_allowed_mhz(gpu) for gpu in gpus]
    return GpuVerdict(
        message=f"the SM clocks of {counted(gpus)} may reach {span(allowed)} MHz",
        value=min((mhz for mhz in allowed if mhz is not None), default=None),
        unit="MHz",
    )


CHECK = Check(
    name=_NAME,
    about="the clocks that are allowed are the profile's, or the same on all GPUs",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
