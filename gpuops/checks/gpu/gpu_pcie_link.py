"""Is each GPU's PCIe link as wide and as fast as it should be?"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext
from gpuops.checks.core.profile import NumberExpectation
from gpuops.checks.gpu.gpus import PROBE, GpuVerdict, NotReported, counted, judge_each, span
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_pcie_link"
# nvml.h, nvmlClocksEventReasonGpuIdle.
_IDLE = 0x1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``busy_percent``: at this utilization and above, the link must run at its full generation.

    An idle link falls to a lower generation to save power, and that is no fault. Utilization is of
    up to a second ago, so a GPU whose clocks are down because it idles is not busy.
    """

    busy_percent: float
    source: str


@dataclass(frozen=True, slots=True)
class _Held:
    what: str
    now: int | None
    most: int | None
    expected: NumberExpectation | None


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose link is narrower or slower than expected.

    Less than the profile says fails. Less than the device and its slot can do only warns: a
    virtual machine may show a link that is not the real one.
    """
    return judge_each(
        _NAME,
        facts,
        context,
        lambda gpu: _one(gpu, parameters, context),
        lambda gpus: _well(gpus, parameters),
        ("nvmlDeviceGetCurrPcieLink", "nvmlDeviceGetMaxPcieLink"),
    )


def _one(
    gpu: NvmlGpu, parameters: Parameters, context: JudgeContext
) -> Sequence[GpuVerdict] | NotReported:
    pcie, profile = gpu.pcie, context.profile
    if pcie.width is None and pcie.generation_max is None and pcie.generation is None:
        return NotReported()
    now = pcie.generation if _busy(gpu, parameters) else None
    width = _Held("lanes", pcie.width, pcie.width_max, profile.pcie_width)
    speed = _Held("generation", now, pcie.generation_max, profile.pcie_generation)
    return [*_lacking(width, profile.name), *_lacking(speed, profile.name)]


def _busy(gpu: NvmlGpu, parameters: Parameters) -> bool:
    used, reasons = gpu.utilization_percent, gpu.clocks.reasons
    idle = reasons is not None and bool(reasons & _IDLE)
    return used is not None and used >= parameters.busy_percent and not idle


def _lacking(held: _Held, profile: str) -> list[GpuVerdict]:
    """Return what is wrong with the width or the generation: nothing, or one verdict."""
    if held.expected is not None:
        told = [value for value in (held.now, held.most) if value is not None]
        wanted, source = int(held.expected.value), f"profile {profile}: {held.expected.source}"
        lacking = told and min(told) < wanted
        return [_verdict(held, min(told), wanted, Status.FAIL, source)] if lacking else []
    if held.now is not None and held.most is not None and held.now < held.most:
        return [_verdict(held, held.now, held.most, Status.WARN, "the device and its slot")]
    return []


def _verdict(held: _Held, value: int, wanted: int, status: Status, source: str) -> GpuVerdict:
    return GpuVerdict(
        status=status,
        message=f"PCIe {held.what}: {value}, expected {wanted}",
        value=value,
        unit=held.what,
        threshold=f">= {wanted}",
        source=source,
        failure_class=FailureClass.HOST_PCIE,
    )


def _well(gpus: Sequence[NvmlGpu], parameters: Parameters) -> GpuVerdict:
    busy = sum(_busy(gpu, parameters) for gpu in gpus)
    widths = [gpu.pcie.width for gpu in gpus]
    return GpuVerdict(
        message=f"{counted(gpus)}: {span(widths)} lanes, at most generation "
        f"{span(gpu.pcie.generation_max for gpu in gpus)}; the generation in use judged on "
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
