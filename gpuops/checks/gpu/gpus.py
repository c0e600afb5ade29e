"""What the checks of GPUs share: the probe, which GPUs to judge, and which could not be judged.

A judge of one GPU returns what is wrong with it. `judge_each` makes findings of that: one for each
fault, one for all healthy GPUs, one for each reason why some could not be judged.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gpuops.checks.core.check import CheckLimit, JudgeContext, Probe
from gpuops.checks.core.profile import Expectation
from gpuops.host.gpu_names import Gpus, read_gpus
from gpuops.host.nvml.facts import NO_PERMISSION, NvmlGpu, NvmlStatus
from gpuops.host.sysfs import sysfs_address
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason
from gpuops.slurm.env import NUMBERED

V = TypeVar("V", bound=Hashable)

PROBE = Probe(
    "gpus",
    Gpus,
    lambda machine, budget_s: read_gpus(machine.root, budget_s),
    locks=frozenset({"gpus"}),
    sources=("libnvidia-ml.so.1 (NVML)", "/sys/bus/pci/devices"),
)

_SILENT = {
    NvmlStatus.TIMEOUT: UnknownReason.TIMEOUT,
    NvmlStatus.CRASH: UnknownReason.CRASH,
    NvmlStatus.ABSENT: UnknownReason.MISSING_TOOL,
    NvmlStatus.ERROR: UnknownReason.MISSING_TOOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuVerdict:
    """The result for one GPU, or for all healthy ones; the fields are those of `Finding`."""

    message: str
    status: Status = Status.PASS
    value: float | str | None = None
    unit: str | None = None
    threshold: str | None = None
    source: str | None = "nvml"
    failure_class: FailureClass | None = None
    unknown_reason: UnknownReason | None = None
    hardware_reported: bool = False


@dataclass(frozen=True, slots=True)
class NotReported:
    """A GPU could not be judged: why; "" if it gave no answer and `judge_each` finds the reason."""

    why: str = ""


GpuResult = Sequence[GpuVerdict] | GpuVerdict | NotReported
_Reason = tuple[str, UnknownReason | None]


def judge_each(
    check: str,
    facts: Gpus,
    context: JudgeContext,
    judge_one: Callable[[NvmlGpu], GpuResult],
    summarize: Callable[[Sequence[NvmlGpu]], GpuVerdict],
    calls: tuple[str, ...] = (),
) -> list[Finding]:
    """Return the findings of *check* about the GPUs that *context* selects.

    Args:
        check: Its name.
        facts: Of all GPUs.
        context: See `JudgeContext`.
        judge_one: Returns what is wrong with one GPU.
        summarize: Returns the result for the healthy GPUs; called only if there are any.
        calls: The NVML calls and fields (their prefixes) that *judge_one* depends on.
    """
    silent = unanswered(check, facts, context)
    if silent is not None:
        return [silent]
    findings, healthy, not_judged = [], [], dict[_Reason, list[NvmlGpu]]()
    for gpu in selected(facts, context):
        result = judge_one(gpu)
        if isinstance(result, NotReported):
            not_judged.setdefault(_reason(gpu, result, calls), []).append(gpu)
            continue
        verdicts = [result] if isinstance(result, GpuVerdict) else result
        entity = entity_of(gpu, context.node)
        findings += [finding(check, entity, verdict, gpu) for verdict in verdicts]
        if not verdicts:
            healthy.append(gpu)
    if healthy and not findings:
        findings.append(finding(check, context.node, summarize(healthy)))
    everywhere = not healthy and not findings and len(not_judged) == 1
    for (why, unknown), gpus in not_judged.items():
        which = "any GPU" if everywhere and len(gpus) > 1 else listed(gpus)
        verdict = GpuVerdict(
            status=Status.SKIP if unknown is None else Status.UNKNOWN,
            message=f"not judged on {which}: {why}",
            unknown_reason=unknown,
        )
        findings.append(finding(check, context.node, verdict))
    return findings + not_found(check, facts, context)


def beyond(
    limit: CheckLimit, value: float, message: str, failure_class: FailureClass, unit: str = ""
) -> list[GpuVerdict]:
    """Return a verdict if *value* is at *limit* or above, else nothing.

    Without a *unit* the value is a flag of the driver's: 1 if it is set. A flag, and a count of
    errors whose first one fails, is the hardware's own report; what other limits judge is not.
    """
    status = limit.ceiling(value)
    if status is Status.PASS:
        return []
    return [
        GpuVerdict(
            status=status,
            message=message,
            value=round(value, 1) if isinstance(value, float) else int(value),
            unit=unit or "flag",
            threshold=limit.text("<", unit),
            source=limit.source,
            failure_class=failure_class,
            hardware_reported=value >= 1 and limit.fail == 1 and unit in {"", "errors"},
        )
    ]


def unless_virtual(
    verdicts: Sequence[GpuVerdict], facts: Gpus, expected: Expectation[float] | None
) -> Sequence[GpuVerdict]:
    """Return *verdicts* about links; as warnings where a shipped profile meets a virtual machine.

    A virtual machine may show links that are not the real ones, or fewer. What *expected* says
    counts there only if it was written or captured for this site's nodes.
    """
    if facts.hypervisor is None or expected is None or not expected.is_shipped:
        return verdicts
    why = (
        f"; only a warning: this virtual machine ({facts.hypervisor}) may not show the real links,"
        " and the value is a shipped profile's"
    )
    return [
        replace(item, status=Status.WARN, message=item.message + why)
        if item.status is Status.FAIL
        else item
        for item in verdicts
    ]


def unanswered(check: str, facts: Gpus, context: JudgeContext) -> Finding | None:
    """Return the finding of *check* if NVML reported no GPU; None if there is something to judge.

    `gpu_driver` judges NVML itself.
    """
    nvml = facts.nvml
    if nvml.status is NvmlStatus.OK:
        if context.gpus is not None and not context.gpus:
            return finding(check, context.node, _skip("no GPU is selected"))
        return None if nvml.gpus else finding(check, context.node, _skip("NVML lists no GPU"))
    if nvml.status is NvmlStatus.ABSENT and not facts.pci:
        return finding(check, context.node, _skip("no GPU, and no NVIDIA driver library"))
    refused = nvml.error_code == NO_PERMISSION
    return finding(
        check,
        context.node,
        GpuVerdict(
            status=Status.UNKNOWN,
            message=f"{nvml.error or 'NVML gave no answer'}; see gpu_driver",
            unknown_reason=UnknownReason.NO_PERMISSION if refused else _SILENT[nvml.status],
        ),
    )


def selected(facts: Gpus, context: JudgeContext) -> tuple[NvmlGpu, ...]:
    """Return the GPUs that *context* selects, in NVML's order.

    A number of Slurm's (``slurm:3``, see `gpuops.slurm.env`) is an index into a list of device
    files or of PCI addresses: the GPUs of that minor number and of that index are returned, of that
    index alone if NVML reports no minor number. If a GPU is divided (MIG), such numbers count
    its parts: all GPUs are returned.
    """
    if context.gpus is None or _counts_parts(facts, context.gpus):
        return facts.nvml.gpus
    names = _spellings(context.gpus)
    return tuple(gpu for gpu in facts.nvml.gpus if _names(gpu) & names)


def surely_selected(facts: Gpus, context: JudgeContext) -> bool:
    """Return whether the GPUs are selected and surely none of them is another job's.

    That holds if the numbers of Slurm select the same GPUs as indices and as minor numbers.
    """
    if context.gpus is None or _counts_parts(facts, context.gpus):
        return False
    gpus, names = facts.nvml.gpus, _spellings(context.gpus)
    by_index = {gpu.index for gpu in gpus if f"{NUMBERED}{gpu.index}" in names}
    by_minor = {gpu.index for gpu in gpus if f"{NUMBERED}{_minor(gpu)}" in names}
    return by_index == by_minor


def not_found(check: str, facts: Gpus, context: JudgeContext) -> list[Finding]:
    """Return one warning about the GPUs that *context* selects and NVML does not list."""
    names = context.gpus or frozenset()
    if _counts_parts(facts, names):
        names = frozenset(_without_numbers(names))
    known = {name for gpu in facts.nvml.gpus for name in _names(gpu)}
    missing = sorted(name for name in names if not known & _spellings([name]))
    if not missing:
        return []
    text = f"selected {', '.join(missing)}, which NVML does not list"
    verdict = GpuVerdict(
        status=Status.WARN,
        message=text,
        value=len(missing),
        unit="GPUs",
        threshold="= 0",
        failure_class=FailureClass.GPU_MISSING,
    )
    return [finding(check, context.node, verdict)]


def entity_of(gpu: NvmlGpu, node: Entity) -> Entity:
    """Return the GPU by its UUID, else by its PCI address, else its node."""
    if gpu.uuid:
        return Entity(EntityKind.GPU, gpu.uuid)
    return Entity(EntityKind.GPU, f"PCI:{gpu.address}") if gpu.address else node


def counter_name(check: str, gpu: NvmlGpu, counter: str) -> str | None:
    """Return the name of a GPU's counter; None if the GPU cannot be identified."""
    name = gpu.uuid or (gpu.address and f"PCI:{gpu.address}")
    return f"{check}:{name}:{counter}" if name else None


def peers_of(gpu: NvmlGpu, facts: Gpus) -> list[NvmlGpu]:
    """Return all GPUs of the model of *gpu*, including itself."""
    return [other for other in facts.nvml.gpus if other.name == gpu.name]


def majority(values: Iterable[V | None]) -> V | None:
    """Return the value of more than half of those that are known; None if there is none."""
    known = [value for value in values if value is not None]
    for value, count in Counter(known).most_common(1):
        if 2 * count > len(known):
            return value
    return None


def alone(facts: Gpus) -> bool:
    """Return whether this machine has a single GPU, which has no peer to link to."""
    return max(len(facts.pci), len(facts.nvml.gpus)) < 2


def listed(gpus: Sequence[NvmlGpu]) -> str:
    """Return ``"GPU 3"``, or ``"GPUs 0, 3"``."""
    word = "GPU" if len(gpus) == 1 else "GPUs"
    return f"{word} {', '.join(str(gpu.index) for gpu in gpus)}"


def counted(gpus: Sequence[NvmlGpu]) -> str:
    """Return ``"1 GPU"`` or ``"8 GPUs"``."""
    return "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def span(values: Iterable[float | None]) -> str:
    """Return ``"31 to 40"``, ``"31"`` if all are equal, ``"?"`` if none is known."""
    known = [value for value in values if value is not None]
    if not known:
        return "?"
    low, high = min(known), max(known)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def finding(check: str, entity: Entity, verdict: GpuVerdict, gpu: NvmlGpu | None = None) -> Finding:
    """Return *verdict* as a finding about *entity*; the message names *gpu*."""
    return Finding(
        check=check,
        entity=entity,
        status=verdict.status,
        value=verdict.value,
        unit=verdict.unit,
        threshold=verdict.threshold,
        source=verdict.source,
        message=verdict.message if gpu is None else f"GPU {gpu.index}: {verdict.message}",
        failure_class=verdict.failure_class,
        unknown_reason=verdict.unknown_reason,
        hardware_reported=verdict.hardware_reported and verdict.status is Status.FAIL,
    )


def _skip(message: str) -> GpuVerdict:
    return GpuVerdict(status=Status.SKIP, message=message, source=None)


def _minor(gpu: NvmlGpu) -> int:
    return gpu.index if gpu.minor is None else gpu.minor


def _without_numbers(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(NUMBERED)]


def _counts_parts(facts: Gpus, names: Iterable[str]) -> bool:
    numbered = any(name.startswith(NUMBERED) for name in names)
    return numbered and any(gpu.modes.mig for gpu in facts.nvml.gpus)


def _names(gpu: NvmlGpu) -> set[str]:
    names = {str(gpu.index), f"{NUMBERED}{gpu.index}", f"{NUMBERED}{_minor(gpu)}"}
    return names | {name.lower() for name in (gpu.uuid, gpu.address) if name}


def _spellings(names: Iterable[str]) -> set[str]:
    return {spelt for name in names for spelt in (name.strip().lower(), sysfs_address(name))}


def _silence(gpu: NvmlGpu) -> _Reason:
    if gpu.hung_call:
        return f"no answer in {gpu.hung_call}", UnknownReason.TIMEOUT
    return f"its calls end their process by {gpu.crash}", UnknownReason.CRASH


def _reason(gpu: NvmlGpu, result: NotReported, calls: tuple[str, ...]) -> _Reason:
    if result.why:
        return result.why, None
    if gpu.hung_call or gpu.crash:
        return _silence(gpu)
    if gpu.error:
        refused = gpu.error_code == NO_PERMISSION
        return f"{gpu.error}; see gpu_lost", UnknownReason.NO_PERMISSION if refused else None
    for error in gpu.errors:
        if error.call.startswith(calls):
            refused = error.code == NO_PERMISSION
            text = f"{error.call}: {error.text}"
            return text, UnknownReason.NO_PERMISSION if refused else None
    if any(call.startswith(calls) for call in gpu.unsupported):
        return "not supported by the GPU or its driver", None
    return "no answer", None
