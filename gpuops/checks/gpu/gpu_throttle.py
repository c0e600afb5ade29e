"""Does heat or the power supply reduce a GPU's clocks?"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext
from gpuops.checks.gpu.gpus import PROBE, GpuResult, GpuVerdict, NotReported, counted, judge_each
from gpuops.errors import ConfigError
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import SAMPLED_REASONS, SAMPLES, NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_throttle"
_CALLS = ("nvmlDeviceGetCurrentClocks",)

# nvml.h, nvmlClocksEventReasons. Idle, application clocks and the power cap are ordinary.
REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
REASON_TEXTS = {
    "sw_power_cap": "its power limit",
    "hw_slowdown": "the hardware",
    "sync_boost": "a slower GPU of its group",
    "sw_thermal": "the driver, for heat",
    "hw_thermal": "the hardware, for heat",
    "power_brake": "the power brake of the system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Which reasons, by the names in `REASONS`, fail or warn, and the source."""

    fail: tuple[str, ...]
    warn: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        for name in (*self.fail, *self.warn):
            if name not in REASONS:
                raise ConfigError(
                    f"there is no clock reason {name!r} (there is: {', '.join(REASONS)})"
                )


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose clocks are reduced now, with the reasons.

    Heat and the power brake reported by the hardware reduce the clocks to half or less (nvml.h). A
    reason of `SAMPLED_REASONS` fails only if it is in each of `SAMPLES` samples, and warns if it is
    in one: the driver also sets it for a moment. The summary bit `hw_slowdown` may also show a
    change of clocks.
    """
    return judge_each(_NAME, facts, context, lambda gpu: _judge(gpu, parameters), _summary, _CALLS)


def _judge(gpu: NvmlGpu, parameters: Parameters) -> GpuResult:
    mask = gpu.clocks.reasons
    if mask is None:
        return NotReported()
    samples = gpu.clocks.samples or (mask,)
    counts = {name: sum(bool(item & bit) for item in samples) for name, bit in REASONS.items()}
    found = [
        name for name in REASONS if counts[name] and name in {*parameters.fail, *parameters.warn}
    ]
    if not found:
        return ()
    needed = {name: SAMPLES if bit & SAMPLED_REASONS else 1 for name, bit in REASONS.items()}
    failing = [name for name in found if name in parameters.fail and counts[name] >= needed[name]]
    reasons = ", ".join(REASON_TEXTS[name] for name in found)
    often = f", in {max(counts[name] for name in found)} of {len(samples)} samples"
    return GpuVerdict(
        status=Status.FAIL if failing else Status.WARN,
        message=f"its clocks are reduced by {reasons}{often}",
        value=f"{mask:#x}",
        unit="clock reasons",
        threshold=f"without {', '.join((*parameters.fail, *parameters.warn))}",
        source=parameters.source,
        failure_class=FailureClass.GPU_THERMAL_POWER,
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    capped = sum(bool((gpu.clocks.reasons or 0) & REASONS["sw_power_cap"]) for gpu in gpus)
    return GpuVerdict(
        message=f"nothing slows {counted(gpus)} down"
        + (f"; {capped} at their power limit, as under load" if capped else ""),
        value=0,
        unit="GPUs slowed",
    )


CHECK = Check(
    name=_NAME,
    about="neither heat nor the power supply slows a GPU",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
