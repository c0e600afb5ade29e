"""Has each GPU joined the NVSwitch fabric, and is the fabric healthy?"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    alone,
    counted,
    judge_each,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import Fabric, NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_fabric"
_CALLS = ("nvmlDeviceGetGpuFabricInfo",)

# nvml.h: NVML_GPU_FABRIC_STATE_*, nvmlGpuFabricInfo_t.
_NOT_SUPPORTED, _COMPLETED = 0, 3
# HGX boards of four GPUs link each to each, those of eight through NVSwitches (NVIDIA HGX).
_SWITCHLESS_MAX = 4
_STATES = {0: "not supported", 1: "not started", 2: "in progress"}
_OUTSIDE = frozenset({1, 2})
# nvml.h: NVML_GPU_FABRIC_HEALTH_MASK_*: two bits each, 1 is true; shift, text, status.
_TRUE, _BOTH_BITS = 1, 3
_CONDITIONS = (
    (0, "its bandwidth is degraded", Status.FAIL),
    (2, "its routes are being recovered", Status.WARN),
    (4, "its route is unhealthy", Status.FAIL),
    (6, "an access time-out is being recovered", Status.WARN),
)
_CONFIGURATION_SHIFT, _CONFIGURATION_WIDTH = 8, 0xF
_CONFIGURATIONS = {
    2: "wrong system GUID",
    3: "wrong chassis serial number",
    4: "no partition",
    5: "too few NVLinks",
    6: "incompatible GPU firmware",
    7: "wrong location",
}
# nvml.h: NVML_GPU_FABRIC_HEALTH_SUMMARY_*.
_SUMMARIES = {2: ("unhealthy", Status.FAIL), 3: ("of limited capacity", Status.WARN)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``joining_s``: seconds after boot in which a GPU may still be joining the fabric."""

    joining_s: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU that is not in the fabric, or whose fabric is not healthy.

    CUDA cannot start (error 802) on a GPU that has not joined. That fails if the profile has a
    fabric; a failed registration and a bad health mask always fail. A board of four GPUs connects
    them without a switch, and a GPU that is divided (MIG) needs no fabric.
    """
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu, parameters, facts, context), _summary, _CALLS
    )


def _judge(gpu: NvmlGpu, parameters: Parameters, facts: Gpus, context: JudgeContext) -> GpuResult:
    fabric, profiled = gpu.fabric, context.profile.fabric
    expected = profiled is not None and profiled.value
    # A shipped profile does not know whether a board of four has switches.
    is_known = _has_switches(facts) or (profiled is not None and not profiled.is_shipped)
    if fabric is None or (fabric.state == _NOT_SUPPORTED and not expected):
        return NotReported("" if fabric is None else "it has no fabric")
    if fabric.state != _COMPLETED:
        why = _not_needed(gpu, fabric.state, facts)
        if why is not None:
            return NotReported(f"{why} (state: {_STATES.get(fabric.state, fabric.state)})")
        return [_outside(fabric, parameters, context, expected=expected and is_known)]
    if fabric.status:
        return [_bad(f"joining the fabric failed (NVML code {fabric.status})", fabric.status)]
    return _health(fabric)


def _not_needed(gpu: NvmlGpu, state: int, facts: Gpus) -> str | None:
    """Return why *gpu* works without the fabric; None if it needs it."""
    if alone(facts):
        return "the only GPU here needs no fabric"
    if gpu.modes.mig:
        return "MIG is on, it needs no fabric"
    if state == _NOT_SUPPORTED and not _has_switches(facts):
        return "a board of four GPUs has no fabric"
    return None


def _has_switches(facts: Gpus) -> bool:
    return max(len(facts.pci), len(facts.nvml.gpus)) > _SWITCHLESS_MAX


def _outside(
    fabric: Fabric, parameters: Parameters, context: JudgeContext, *, expected: bool
) -> GpuVerdict:
    young = parameters.joining_s.ceiling(context.counters.since_boot_s) is not Status.FAIL
    # A state that only a newer driver knows is not a known fault.
    is_fault = expected and not young and fabric.state in _OUTSIDE
    return GpuVerdict(
        status=Status.FAIL if is_fault else Status.WARN,
        message=f"it has not joined the fabric: {_STATES.get(fabric.state, 'unknown state')}"
        + (" (the node has only just booted)" if expected and young else ""),
        value=fabric.state,
        unit="fabric state",
        threshold=f"= {_COMPLETED} (completed)",
        source="nvml; CUDA error 802",
        failure_class=FailureClass.GPU_FABRIC,
    )


def _health(fabric: Fabric) -> list[GpuVerdict]:
    mask = fabric.health_mask or 0
    if any(mask >> shift & _BOTH_BITS == _BOTH_BITS for shift, _, _ in _CONDITIONS):
        mask = 0  # Neither true nor false: garbage.
    verdicts = [
        _bad(text, f"{mask:#x}", status)
        for shift, text, status in _CONDITIONS
        if mask >> shift & 0x3 == _TRUE
    ]
    configuration = mask >> _CONFIGURATION_SHIFT & _CONFIGURATION_WIDTH
    if configuration > _TRUE:
        text = _CONFIGURATIONS.get(configuration, f"code {configuration}")
        verdicts.append(_bad(f"the fabric is configured wrongly: {text}", f"{mask:#x}"))
    if not verdicts and fabric.health_summary in _SUMMARIES:
        text, status = _SUMMARIES[fabric.health_summary]
        verdicts.append(_bad(f"the fabric is {text}", fabric.health_summary, status))
    return verdicts


def _bad(message: str, value: float | str, status: Status = Status.FAIL) -> GpuVerdict:
    return GpuVerdict(
        status=status,
        message=message,
        value=value,
        threshold="completed, success, healthy",
        failure_class=FailureClass.GPU_FABRIC,
        hardware_reported=True,
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    unknown = sum(gpu.fabric is not None and gpu.fabric.health_mask is None for gpu in gpus)
    text = f"; {unknown} do not report the fabric's health" if unknown else ""
    return GpuVerdict(
        message=f"{counted(gpus)} in the fabric{text}", value=_COMPLETED, unit="fabric state"
    )


CHECK = Check(
    name=_NAME,
    about="every GPU has joined the NVSwitch fabric, and the fabric is healthy",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
