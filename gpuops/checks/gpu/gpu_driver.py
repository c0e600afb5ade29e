"""Does the GPU driver answer, as a whole and for each GPU?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import PROBE, GpuVerdict, entity_of, finding
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import (
    GPU_IS_LOST,
    HANG_S,
    NO_PERMISSION,
    RESET_REQUIRED,
    NvmlSnapshot,
    NvmlStatus,
)
from gpuops.model import FailureClass, Finding, Status, UnknownReason

_NAME = "gpu_driver"
_DRIVER_NOT_LOADED = 9
_OPERATING_SYSTEM = 17
_MISMATCH = 18
_WORDS = {
    NO_PERMISSION: "this user may not ask the driver",
    _DRIVER_NOT_LOADED: "the kernel module nvidia is not loaded",
    _OPERATING_SYSTEM: "the operating system or a cgroup keeps this process from the driver",
    _MISMATCH: "the library is of another version than the loaded kernel module, so no CUDA"
    " program starts here; reload the module or reboot",
}
# What a process in a container, or without root, is told of a driver that is well.
_KEPT_OUT = (NO_PERMISSION, _OPERATING_SYSTEM)
# What the loaded module itself says of its library and its GPUs.
_VERDICTS = (_MISMATCH, GPU_IS_LOST, RESET_REQUIRED)
_COLD = "a cold driver takes 10 to 20 s to initialise"


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding about the driver, or one for each GPU of which a call gave no answer.

    A hang is evidence against the node from its second time in a boot on, and only where the
    driver was kept loaded (persistence mode) or the call was inside the kernel (state D): a first
    call to a cold driver may rightly take longer than a prolog has. A call that was waited for
    less than a second is no evidence at all. Codes about single GPUs are
    judged by `gpu_lost`.
    """
    nvml = facts.nvml
    if nvml.hang is not None:
        return _hung(nvml, context)
    if nvml.status is NvmlStatus.OK:
        return [finding(_NAME, context.node, _well(nvml))]
    if nvml.status is NvmlStatus.CRASH:
        return [finding(_NAME, context.node, _crashed(nvml))]
    expected = context.profile.gpu_count
    wanted = expected is not None and expected.value > 0
    unwanted = not wanted and (expected is not None or not facts.pci)
    if unwanted and nvml.error_code not in _KEPT_OUT:
        text = f"no GPU is expected here; {nvml.error}"
        return [
            finding(_NAME, context.node, GpuVerdict(status=Status.SKIP, message=text, source=None))
        ]
    return [finding(_NAME, context.node, _refused(facts, wanted=wanted))]


def _well(nvml: NvmlSnapshot) -> GpuVerdict:
    versions = [
        f"{name} {version}"
        for name, version in (("driver", nvml.driver), ("NVML", nvml.nvml_version))
        if version
    ]
    return GpuVerdict(
        message=f"NVML answers about {len(nvml.gpus)} GPUs ({', '.join(versions) or 'no version'})"
    )


def _crashed(nvml: NvmlSnapshot) -> GpuVerdict:
    return GpuVerdict(
        status=Status.UNKNOWN,
        message=nvml.error or "asking NVML failed",
        unknown_reason=UnknownReason.CRASH,
    )


def _refused(facts: Gpus, *, wanted: bool) -> GpuVerdict:
    """Return what an NVML that does not start says of the node.

    That library and module differ, or that a GPU is lost or must be reset, is the loaded module's
    own verdict. Whether a driver must be
    there at all is for the profile to say: the GPUs may be another's, as a virtual machine's.
    """
    nvml, code = facts.nvml, facts.nvml.error_code
    on_bus = f"{len(facts.pci)} GPUs on the PCI bus"
    if nvml.status is NvmlStatus.ABSENT:
        text = f"libnvidia-ml.so.1 is not installed; {on_bus}"
        if not wanted:
            return GpuVerdict(
                status=Status.UNKNOWN, message=text, unknown_reason=UnknownReason.MISSING_TOOL
            )
    else:
        words = f": {_WORDS[code]}" if code in _WORDS else ""
        text = f"{nvml.error} (code {code}){words}; {on_bus}"
    if code in _KEPT_OUT:
        return GpuVerdict(
            status=Status.UNKNOWN, message=text, unknown_reason=UnknownReason.NO_PERMISSION
        )
    loaded = any(gpu.driver == "nvidia" for gpu in facts.pci)
    return GpuVerdict(
        status=Status.FAIL if wanted or (code in _VERDICTS and loaded) else Status.WARN,
        message=text,
        value=code,
        unit="NVML code",
        threshold="NVML starts",
        failure_class=FailureClass.GPU_DRIVER,
    )


def _hung(nvml: NvmlSnapshot, context: JudgeContext) -> list[Finding]:
    hung = [gpu for gpu in nvml.gpus if gpu.hung_call is not None]
    if nvml.status is NvmlStatus.TIMEOUT or not hung:
        return [finding(_NAME, context.node, _verdict(nvml, nvml.hang, nvml.hung_s, context))]
    return [
        finding(
            _NAME,
            entity_of(gpu, context.node),
            _verdict(nvml, gpu.hung_call, gpu.hung_s, context),
            gpu,
        )
        for gpu in hung
    ]


def _verdict(
    nvml: NvmlSnapshot, call: str | None, waited_s: float | None, context: JudgeContext
) -> GpuVerdict:
    told = f" in {waited_s:.1f} s" if waited_s is not None else ""
    inside = ", inside the kernel (state D)" if nvml.state == "D" else ""
    text = f"{call} gave no answer{told}{inside}; try {len(context.hangs) + 1} of this boot"
    if waited_s is not None and waited_s < HANG_S:
        return _undecided(f"{text}: the driver is slow, or this run had too little time for it")
    if not context.hangs:
        return _undecided(f"{text}: {_COLD}, so another try decides")
    in_kernel = nvml.state == "D" or any(hang.state == "D" for hang in context.hangs)
    if context.persistence is not True and not in_kernel:
        known = "off" if context.persistence is False else "not known"
        return _undecided(f"{text}: persistence mode is {known}, and {_COLD}")
    why = "a call stays inside the kernel" if in_kernel else "persistence mode keeps it loaded"
    return GpuVerdict(
        status=Status.FAIL,
        message=f"{text}; the driver is not cold: {why}",
        value=len(context.hangs) + 1,
        unit="calls without an answer",
        threshold="< 2",
        failure_class=FailureClass.GPU_DRIVER_HANG,
    )


def _undecided(message: str) -> GpuVerdict:
    return GpuVerdict(status=Status.UNKNOWN, message=message, unknown_reason=UnknownReason.TIMEOUT)


CHECK = Check(
    name=_NAME,
    about="the GPU driver is loaded, fits its library and answers",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
