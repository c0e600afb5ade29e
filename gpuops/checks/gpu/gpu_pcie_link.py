"""Is each GPU's PCIe link as wide and as fast as it should be?"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext
from gpuops.checks.core.profile import NumberExpectation
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    counted,
    judge_each,
    span,
    unless_virtual,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_pcie_link"
_CALLS = ("nvmlDeviceGetCurrPcieLink", "nvmlDeviceGetMaxPcieLink")
# nvml.h, nvmlClocksEventReasonGpuIdle.
_IDLE = 0x1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``busy_percent``: at this utilization and above, the link must run at its full generation.

    An idle link falls to a lower generation to save power, which is not a fault. Utilization may be
    a second old, so that a GPU with idle clocks is not busy.
    """

    busy_percent: float
    source: str


@dataclass(frozen=True, slots=True)
class _LinkValue:
    what: str
    now: int | None
    most: int | None
    expected: NumberExpectation | None


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose link is narrower or slower than expected.

    Less than in the profile fails, in a virtual machine only if the profile is the site's own.
    Less than the device and its slot support only warns: a virtual machine may show a link that is
    not the real one.
    """
    return judge_each(
        _NAME,
        facts,
        context,
        lambda gpu: _judge(gpu, facts, parameters, context),
        lambda gpus: _summary(gpus, parameters),
        _CALLS,
    )


def _judge(gpu: NvmlGpu, facts: Gpus, parameters: Parameters, context: JudgeContext) -> GpuResult:
    pcie, profile = gpu.pcie, context.profile
    if pcie.width is None and pcie.generation_max is None and pcie.generation is None:
        return NotReported()
    now = pcie.generation if _busy(gpu, parameters) else None
    width = _LinkValue("lanes", pcie.width, pcie.width_max, profile.pcie_width)
    speed = _LinkValue("generation", now, pcie.generation_max, profile.pcie_generation)
    return [
        verdict
        for link in (width, speed)
        for verdict in unless_virtual(_lacking(link, profile.name), facts, link.expected)
    ]


def _busy(gpu: NvmlGpu, parameters: Parameters) -> bool:
    used, reasons = gpu.utilization_percent, gpu.clocks.reasons
    idle = reasons is not None and bool(reasons & _IDLE)
    return used is not None and used >= parameters.busy_percent and not idle


def _lacking(link: _LinkValue, profile: str) -> list[GpuVerdict]:
    """Return the verdict on the width or the generation, if it is too low."""
    if link.expected is not None:
        known = [value for value in (link.now, link.most) if value is not None]
        expected, source = int(link.expected.value), f"profile {profile}: {link.expected.source}"
        lacking = known and min(known) < expected
        return [_verdict(link, min(known), expected, Status.FAIL, source)] if lacking else []
    if link.now is not None and link.most is not None and link.now < link.most:
        return [_verdict(link, link.now, link.most, Status.WARN, "the device and its slot")]
    return []


def _verdict(
    link: _LinkValue, value: int, expected: int, status: Status, source: str
) -> GpuVerdict:
    return GpuVerdict(
        status=status,
        message=f"PCIe {link.what}: {value}, expected {expected}",
        value=value,
        unit=link.what,
        threshold=f">= {expected}",
        source=source,
        failure_class=FailureClass.HOST_PCIE,
    )


def _summary(gpus: Sequence[NvmlGpu], parameters: Parameters) -> GpuVerdict:
    busy = sum(_busy(gpu, parameters) for gpu in gpus)
    widths = [gpu.pcie.width for gpu in gpus]
    return GpuVerdict(
        message=f"{counted(gpus)}: {span(widths)} lanes, at most generation "
        f"{span(gpu.pcie.generation_max for gpu in gpus)}; the generation in use is judged on "
        f"{busy}, the others are idle",
        value=min((width for width in widths if width is not None), default=None),
        unit="lanes",
    )


CHECK = Check(
    name=_NAME,
    about="the PCIe link is full width, and full speed where it is under load",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
