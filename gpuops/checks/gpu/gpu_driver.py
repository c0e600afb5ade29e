"""Does the GPU driver respond, as a whole and for each GPU?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.core.profile import NumberExpectation
from gpuops.checks.gpu.gpu_count import gpus_expected
from gpuops.checks.gpu.gpus import PROBE, GpuVerdict, entity_of, finding
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import (
    GPU_IS_LOST,
    HANG_S,
    NO_ACCESS,
    NO_PERMISSION,
    OPERATING_SYSTEM,
    RESET_REQUIRED,
    NvmlSnapshot,
    NvmlStatus,
)
from gpuops.model import FailureClass, Finding, Status, UnknownReason

_NAME = "gpu_driver"
_DRIVER_NOT_LOADED = 9
_MISMATCH = 18
_EXPLANATIONS = {
    NO_PERMISSION: "this user has no access to the driver",
    _DRIVER_NOT_LOADED: "the kernel module nvidia is not loaded",
    OPERATING_SYSTEM: "the operating system or a cgroup keeps this process from the driver",
    _MISMATCH: "the library is of another version than the loaded kernel module, so no CUDA"
    " program starts here; reload the module or reboot",
}
# Codes by which the loaded module itself reports a fault of its library or GPUs.
_FAULTS = (_MISMATCH, GPU_IS_LOST, RESET_REQUIRED)
_COLD = "a cold driver takes 10 to 20 s to initialise"


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding about the driver, or one for each GPU with a call that hung.

    A hang fails the node from the second time in a boot on, and only if the driver was kept loaded
    (persistence mode) or the call was inside the kernel (state D): a first call to a cold driver
    may take longer than a prolog has. A call that had less than a second does not count, nor does
    one on a node without an NVIDIA device on its PCI bus: there is no driver to hang. A call
    that crashes its process fails from the second time in a boot on: the GPU whose calls do so when
    it is asked alone, or the node if those of each GPU do.
    `gpu_lost` judges codes about single GPUs.
    """
    nvml = facts.nvml
    bad = _crashed_gpus(nvml, context)
    if nvml.hang is not None:
        if not facts.pci:
            return bad or [finding(_NAME, context.node, _without_device(nvml))]
        bad += _hung(nvml, context)
    if bad:
        return bad
    if nvml.status is NvmlStatus.OK:
        verdict = _summary(nvml) if nvml.crash is None else _crashed_in_parallel(nvml)
        return [finding(_NAME, context.node, verdict)]
    if nvml.status is NvmlStatus.CRASH:
        return [finding(_NAME, context.node, _crashed(nvml, context))]
    expected = gpus_expected(facts, context)
    is_unexpected = not facts.pci if expected is None else not expected.value
    if is_unexpected and nvml.error_code not in NO_ACCESS:
        text = f"no GPU is expected here; {nvml.error}"
        return [
            finding(_NAME, context.node, GpuVerdict(status=Status.SKIP, message=text, source=None))
        ]
    return [finding(_NAME, context.node, _refused(facts, expected))]


def _summary(nvml: NvmlSnapshot) -> GpuVerdict:
    versions = [
        f"{name} {version}"
        for name, version in (("driver", nvml.driver), ("NVML", nvml.nvml_version))
        if version
    ]
    return GpuVerdict(
        message=f"NVML answers about {len(nvml.gpus)} GPUs ({', '.join(versions) or 'no version'})"
    )


def _crashed_gpus(nvml: NvmlSnapshot, context: JudgeContext) -> list[Finding]:
    return [
        finding(
            _NAME,
            entity_of(gpu, context.node),
            _crash_verdict(f"asked alone, its calls end their process by {gpu.crash}", context),
            gpu,
        )
        for gpu in nvml.gpus
        if gpu.crash is not None
    ]


def _crashed_in_parallel(nvml: NvmlSnapshot) -> GpuVerdict:
    return GpuVerdict(
        status=Status.WARN,
        message=f"asked about all GPUs at once, NVML ended its process by {nvml.crash};"
        f" asked one by one, it answers about all {len(nvml.gpus)}",
        failure_class=FailureClass.GPU_DRIVER,
    )


def _crashed(nvml: NvmlSnapshot, context: JudgeContext) -> GpuVerdict:
    """Return the verdict if nothing was read; without a signal the failure is gpuops' own."""
    text = nvml.error or "a call of NVML failed"
    if nvml.crash is not None:
        return _crash_verdict(text, context)
    return GpuVerdict(status=Status.UNKNOWN, message=text, unknown_reason=UnknownReason.CRASH)


def _crash_verdict(text: str, context: JudgeContext) -> GpuVerdict:
    count = len(context.crashes) + 1
    text = f"{text}; crash {count} of this boot"
    if not context.crashes:
        return GpuVerdict(
            status=Status.UNKNOWN,
            message=f"{text}, so the next check decides",
            unknown_reason=UnknownReason.CRASH,
        )
    return GpuVerdict(
        status=Status.FAIL,
        message=text,
        value=count,
        unit="crashes",
        threshold="< 2",
        failure_class=FailureClass.GPU_DRIVER,
    )


def _refused(facts: Gpus, expected: NumberExpectation | None) -> GpuVerdict:
    """Return the verdict if NVML does not start.

    The loaded module itself reports that the library does not match, or that a GPU is lost or must
    be reset. Apart from that there must be a driver only where GPUs are *expected*: those on the
    bus may belong to a virtual machine.
    """
    is_expected = expected is not None and expected.value > 0
    nvml, code = facts.nvml, facts.nvml.error_code
    on_bus = f"{len(facts.pci)} GPUs on the PCI bus"
    if nvml.status is NvmlStatus.ABSENT:
        text = f"libnvidia-ml.so.1 is not installed; {on_bus}"
        if not is_expected:
            return GpuVerdict(
                status=Status.UNKNOWN, message=text, unknown_reason=UnknownReason.MISSING_TOOL
            )
    else:
        why = f": {_EXPLANATIONS[code]}" if code in _EXPLANATIONS else ""
        text = f"{nvml.error} (code {code}){why}; {on_bus}"
    if code in NO_ACCESS:
        return GpuVerdict(
            status=Status.UNKNOWN, message=text, unknown_reason=UnknownReason.NO_PERMISSION
        )
    if expected is not None and is_expected:
        text += f"; expected: {expected.value:g} GPUs ({expected.source})"
    loaded = any(gpu.driver == "nvidia" for gpu in facts.pci)
    return GpuVerdict(
        status=Status.FAIL if is_expected or (code in _FAULTS and loaded) else Status.WARN,
        message=text,
        value=code,
        unit="NVML code",
        threshold="NVML starts",
        failure_class=FailureClass.GPU_DRIVER,
        hardware_reported=code in _FAULTS and loaded,
    )


def _without_device(nvml: NvmlSnapshot) -> GpuVerdict:
    text = f"no NVIDIA device is on the PCI bus; {nvml.hang} gave no answer, which is not judged"
    return GpuVerdict(status=Status.SKIP, message=text, source=None)


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
    waited = f" in {waited_s:.1f} s" if waited_s is not None else ""
    inside = ", inside the kernel (state D)" if nvml.state == "D" else ""
    text = f"{call} gave no answer{waited}{inside}; try {len(context.hangs) + 1} of this boot"
    if waited_s is not None and waited_s < HANG_S:
        return _undecided(f"{text}: the driver is slow, or this run had too little time")
    if not context.hangs:
        return _undecided(f"{text}: {_COLD}, so the next check decides")
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
        hardware_reported=in_kernel,
    )


def _undecided(message: str) -> GpuVerdict:
    return GpuVerdict(status=Status.UNKNOWN, message=message, unknown_reason=UnknownReason.TIMEOUT)


CHECK = Check(
    name=_NAME,
    about="the GPU driver is loaded, matches its library and responds",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
