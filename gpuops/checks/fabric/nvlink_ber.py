"""Are the bit error rates of the NVLinks low? NVLink 5 (Blackwell) and later report them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    counted,
    judge_each,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvLink, NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "nvlink_ber"
_CALLS = ("NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER", "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER")
_UNIT = "errors/bit"
_KINDS: dict[str, Callable[[NvLink], float | None]] = {
    "effective": lambda link: link.effective_ber,
    "symbol": lambda link: link.symbol_ber,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Errors per bit of one link, counted by the GPU since its counters were cleared.

    ``effective_ber``: after forward error correction. ``symbol_ber``: after all correction; such
    errors reach the data.
    """

    effective_ber: CheckLimit
    symbol_ber: CheckLimit


@dataclass(frozen=True, slots=True)
class _Rate:
    link: int
    ber: float


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU and kind of rate that is too high on a link that is up.

    A link has two ends: the fault may be at the other end.
    """
    return judge_each(_NAME, facts, context, lambda gpu: _judge(gpu, parameters), _summary, _CALLS)


def _rates(gpu: NvmlGpu, kind: str) -> list[_Rate]:
    """Return the rates of the links, without those that are down: theirs are of earlier."""
    links = [link for link in gpu.nvlinks or () if link.active is not False]
    return [_Rate(link.link, ber) for link in links if (ber := _KINDS[kind](link)) is not None]


def _judge(gpu: NvmlGpu, parameters: Parameters) -> GpuResult:
    rates = {kind: found for kind in _KINDS if (found := _rates(gpu, kind))}
    if not rates:
        return NotReported(_why_none(gpu))
    limits = {"effective": parameters.effective_ber, "symbol": parameters.symbol_ber}
    return [
        verdict
        for kind, found in rates.items()
        if (verdict := _verdict(kind, found, limits[kind])).status is not Status.PASS
    ]


def _why_none(gpu: NvmlGpu) -> str:
    asked = (*(error.call for error in gpu.errors), *gpu.unsupported)
    if gpu.nvlinks is None or gpu.hung_call or any(call in _CALLS for call in asked):
        return ""
    return "it has no NVLink that reports bit error rates (NVLink 5 and later do)"


def _verdict(kind: str, rates: Sequence[_Rate], limit: CheckLimit) -> GpuVerdict:
    worst = max(rates, key=lambda rate: rate.ber)
    above = sum(limit.ceiling(rate.ber) is not Status.PASS for rate in rates)
    return GpuVerdict(
        status=limit.ceiling(worst.ber),
        message=f"NVLink {worst.link}: {kind} bit error rate {worst.ber:g};"
        f" {above} of {len(rates)} links are at the limit or above",
        value=worst.ber,
        unit=_UNIT,
        threshold=limit.text("<", _UNIT),
        source=limit.source,
        failure_class=FailureClass.GPU_NVLINK,
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    rates = [rate.ber for gpu in gpus for kind in _KINDS for rate in _rates(gpu, kind)]
    return GpuVerdict(
        message=f"the bit error rates of the NVLinks are low on {counted(gpus)}",
        value=max(rates),
        unit=_UNIT,
    )


CHECK = Check(
    name=_NAME,
    about="the bit error rates of NVLinks are low",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
