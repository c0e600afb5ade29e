"""Are ECC, MIG, persistence and compute mode set as they should be?"""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.core.profile import FlagExpectation, Profile
from gpuops.checks.gpu.gpus import PROBE, GpuResult, GpuVerdict, NotReported, counted, judge_each
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import Modes, NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_modes"
_CALLS = (
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode",
)

# nvml.h, nvmlComputeMode_t. 1 (exclusive thread) is no longer supported.
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each mode of a GPU that is not as profiled, or is about to change.

    A difference from the profile fails. Without a profile only a mode that waits for a reset and
    persistence that is off warn: a driver that unloads when idle takes seconds to start again.
    """
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu.modes, context.profile), _summary, _CALLS
    )


def _judge(modes: Modes, profile: Profile) -> GpuResult:
    if all(m is None for m in (modes.ecc, modes.mig, modes.persistence, modes.compute)):
        return NotReported()
    return [
        *_wrong("ECC", modes.ecc, profile.ecc, profile.name),
        *_wrong("MIG", modes.mig, profile.mig, profile.name),
        *_wrong("persistence mode", modes.persistence, profile.persistence, profile.name),
        *_wrong_compute(modes.compute, profile),
        *_pending("ECC", modes.ecc, modes.ecc_pending),
        *_pending("MIG", modes.mig, modes.mig_pending),
        *_volatile(modes, profile),
    ]


def _wrong(
    what: str, now: bool | None, expected: FlagExpectation | None, profile: str
) -> list[GpuVerdict]:
    if now is None or expected is None or now == expected.value:
        return []
    return [
        GpuVerdict(
            status=Status.FAIL,
            message=f"{what} is {_word(now)}, expected {_word(expected.value)}",
            value=_word(now),
            threshold=f"= {_word(expected.value)}",
            source=f"profile {profile}: {expected.source}",
            failure_class=FailureClass.GPU_CONFIG,
        )
    ]


def _wrong_compute(now: int | None, profile: Profile) -> list[GpuVerdict]:
    expected = profile.compute_mode
    if now is None or expected is None or COMPUTE_MODES.get(now) in expected.value:
        return []
    return [
        GpuVerdict(
            status=Status.FAIL,
            message=f"its compute mode is {COMPUTE_MODES.get(now, now)}, "
            f"expected {' or '.join(expected.value)}",
            value=COMPUTE_MODES.get(now, str(now)),
            threshold=f"= {' or '.join(expected.value)}",
            source=f"profile {profile.name}: {expected.source}",
            failure_class=FailureClass.GPU_CONFIG,
        )
    ]


def _pending(what: str, now: bool | None, later: bool | None) -> list[GpuVerdict]:
    if now is None or later is None or now == later:
        return []
    return [
        GpuVerdict(
            status=Status.WARN,
            message=f"{what} is {_word(now)} and will be {_word(later)} after a reset",
            value=_word(now),
            threshold="pending = current",
            failure_class=FailureClass.GPU_CONFIG,
        )
    ]


def _volatile(modes: Modes, profile: Profile) -> list[GpuVerdict]:
    if modes.persistence is not False or profile.persistence is not None:
        return []
    return [
        GpuVerdict(
            status=Status.WARN,
            message="persistence mode is off: an idle driver unloads, and starting takes seconds",
            value="off",
            threshold="= on",
            source="DCGM, gpud",
            failure_class=FailureClass.GPU_CONFIG,
        )
    ]


def _word(mode: bool) -> str:
    return "on" if mode else "off"


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    modes = {
        "ECC": [gpu.modes.ecc for gpu in gpus],
        "MIG": [gpu.modes.mig for gpu in gpus],
        "persistence": [gpu.modes.persistence for gpu in gpus],
    }
    words = [f"{what} {_all(each)}" for what, each in modes.items()]
    return GpuVerdict(message=f"{counted(gpus)}: {', '.join(words)}")


def _all(modes: Sequence[bool | None]) -> str:
    words = ["unknown" if mode is None else _word(mode) for mode in modes]
    return " or ".join(sorted(set(words)))


CHECK = Check(
    name=_NAME,
    about="ECC, MIG, persistence and compute mode are as profiled, and none is about to change",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
