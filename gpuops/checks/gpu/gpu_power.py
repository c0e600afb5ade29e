"""May each GPU draw the full power of its model?"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    counted,
    judge_each,
    span,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_power"
_CALLS = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``off_w``: the difference of the limit in force from the expected one, in watts."""

    off_w: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose power limit is not the profile's or the board's default.

    Below the profile's limit may fail; above it, or other than the default without a profile, only
    warns: an administrator may have set that on purpose.
    """
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu, parameters.off_w, context), _summary, _CALLS
    )


def _judge(gpu: NvmlGpu, limit: CheckLimit, context: JudgeContext) -> GpuResult:
    power, profile = gpu.power, context.profile
    if power.limit_w is None:
        return NotReported()
    if profile.power_limit_w is not None:
        expected_w = profile.power_limit_w.value
        source = f"profile {profile.name}: {profile.power_limit_w.source}"
    elif power.default_limit_w is not None:
        expected_w, source = power.default_limit_w, "the board's default"
    else:
        return NotReported("neither the profile nor the board has an expected power limit")
    status = limit.ceiling(abs(power.limit_w - expected_w))
    if status is Status.PASS:
        return ()
    only_warns = profile.power_limit_w is None or power.limit_w > expected_w
    return GpuVerdict(
        status=Status.WARN if only_warns else status,
        message=f"its power limit is {power.limit_w:g} W, expected {expected_w:g} W",
        value=power.limit_w,
        unit="W",
        threshold=f"= {expected_w:g} W",
        source=source,
        failure_class=FailureClass.GPU_CONFIG,
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    limits = [gpu.power.limit_w for gpu in gpus]
    drawn = [gpu.power.drawn_w for gpu in gpus]
    return GpuVerdict(
        message=f"{counted(gpus)} limited to {span(limits)} W, drawing {span(drawn)} W",
        value=min((value for value in limits if value is not None), default=None),
        unit="W",
    )


CHECK = Check(
    name=_NAME,
    about="the power limit is the profile's or the board's default",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
