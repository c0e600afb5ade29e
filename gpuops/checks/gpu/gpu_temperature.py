"""Is a GPU or its memory near the temperature at which the device itself slows down or stops?"""

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
from gpuops.host.nvml.facts import NvmlGpu, Temperatures
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_temperature"
_CALLS = ("nvmlDeviceGetTemperature", "NVML_FI_DEV_TEMPERATURE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``margin_c`` below the device's own limit, in degrees Celsius."""

    margin_c: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose core or memory is at its own limit or near it.

    The core is compared with its slowdown temperature (else its shutdown
    temperature), from `nvmlDeviceGetTemperatureThreshold` or from the margins of newer devices
    (`nvmlDeviceGetMarginTemperature`, NVML_FI_DEV_TEMPERATURE_*_TLIMIT); the memory with its
    maximum. A limit of 0 °C means none, as virtual GPUs report it.
    """
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu, parameters.margin_c), _summary, _CALLS
    )


def _judge(gpu: NvmlGpu, limit: CheckLimit) -> GpuResult:
    t = gpu.temperature
    margins = [*_core(t), *_memory(t)]
    if not margins:
        known = t.core_c is not None
        return NotReported("the device reports no limit of its own" if known else "")
    return [
        GpuVerdict(
            status=limit.floor(margin_c),
            message=text,
            value=round(margin_c, 1),
            unit="°C of margin",
            threshold=limit.text(">", "°C"),
            source=limit.source,
            failure_class=FailureClass.GPU_THERMAL_POWER,
        )
        for margin_c, text in margins
        if limit.floor(margin_c) is not Status.PASS
    ]


def _core(t: Temperatures) -> list[tuple[float, str]]:
    """Return the smallest margin of the core with its text, if one is known."""
    margins = []
    limit_c = t.slowdown_c or t.shutdown_c
    if t.core_c is not None and limit_c:
        margins.append(
            (limit_c - t.core_c, f"core at {t.core_c:g} °C, its limit is {limit_c:g} °C")
        )
    offset_c = t.shutdown_margin_c if t.slowdown_margin_c is None else t.slowdown_margin_c
    if t.margin_c is not None and offset_c is not None:
        left_c = t.margin_c - offset_c
        margins.append((left_c, f"core {left_c:g} °C below where it slows down"))
    return [min(margins)] if margins else []


def _memory(t: Temperatures) -> list[tuple[float, str]]:
    if t.memory_c is None or not t.memory_max_c:
        return []
    text = f"memory at {t.memory_c:g} °C, its limit is {t.memory_max_c:g} °C"
    return [(t.memory_max_c - t.memory_c, text)]


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    core = [gpu.temperature.core_c for gpu in gpus]
    memory = [gpu.temperature.memory_c for gpu in gpus]
    return GpuVerdict(
        message=f"{counted(gpus)}: core {span(core)} °C, memory {span(memory)} °C",
        value=max((value for value in core if value is not None), default=None),
        unit="°C",
    )


CHECK = Check(
    name=_NAME,
    about="GPU and memory are cooler than the device's own limits",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
