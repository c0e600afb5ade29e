"""What has NVIDIA's driver said about each GPU (Xid) since it was last known to be well?

The order of authority: what the driver itself wants done (the newest Xid 154 of a GPU), then the
catalogue in ``checks/xid``. What applications cause never fails a node. Counted is what came after
the last of these: the boot, the driver's loading, an Xid 154 that takes its wish back, a repair
that was acknowledged (`gpuops repair`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.core.kernel_rules import PROBE, KernelFacts, repaired_us, since
from gpuops.checks.core.xid_catalogue import XidClass, XidKind
from gpuops.host.gpu_names import GpuName
from gpuops.host.sysfs import sysfs_address
from gpuops.host.xid import RECOVERY_ACTION, Burst
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.slurm.env import NUMBERED
from gpuops.units import format_seconds

CLEANED_UP = 45
_NOTHING_WANTED = "None"
_MANY = CheckLimit(warn=10, source="gpuops judgement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``application_minutes``: minutes with an Xid of an application that make a GPU suspect."""

    application_minutes: CheckLimit = _MANY


@dataclass(slots=True)
class _Told:
    """What counts of one code about one GPU."""

    kind: XidKind
    bursts: list[Burst] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return sum(burst.count for burst in self.bursts)

    @property
    def status(self) -> Status:
        return max(self.kind.xid_class.verdict(fatal=burst.fatal) for burst in self.bursts)

    def words(self) -> str:
        """Return ``"Xid 79 (GPU has fallen off the bus), 3 min 20 s after boot"``."""
        first = min(burst.first_us for burst in self.bursts)
        last = max(burst.last_us for burst in self.bursts)
        when = f"{format_seconds(first / 1e6)} after boot"
        if self.lines > 1:
            when = f"{self.lines} times, first {when}, last {format_seconds(last / 1e6)}"
        return f"Xid {self.kind.code} ({self.kind.name}), {when}"


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU with what is told of it. ``wanted``: what the driver wants done, and still does."""

    entity: Entity
    asked: bool
    told: tuple[_Told, ...]
    wanted: str | None
    cut_us: int | None

    @property
    def worst(self) -> _Told:
        return max(self.told, key=lambda told: (told.status, told.bursts[-1].last_us))


def judge(facts: KernelFacts, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding for each GPU of which the driver said something that counts.

    Where none of them fails or passes one more says that the log was read and no GPU fails.
    """
    addresses = sorted({burst.address for burst in facts.driver.xids})
    gpus = [_gpu(address, facts, context) for address in addresses]
    findings = [_finding(gpu, parameters, context) for gpu in gpus if gpu.told]
    if facts.driver.more:
        findings.append(_too_many(facts.driver.more, context.node))
    if all(finding.status is Status.WARN for finding in findings):
        findings.append(_well(sum(not gpu.told for gpu in gpus), facts, context))
    return sorted(findings, key=lambda finding: -finding.status)


def _well(cleared: int, facts: KernelFacts, context: JudgeContext) -> Finding:
    older = f"; {cleared} GPUs have older ones, which no longer count" if cleared else ""
    return Finding(
        check="gpu_xid",
        entity=context.node,
        status=Status.PASS,
        value=0,
        unit="Xids",
        threshold="= 0",
        source="checks/xid",
        message=f"no Xid that fails a GPU {since(facts, repaired_us(context))}{older}",
    )


def _gpu(address: str, facts: KernelFacts, context: JudgeContext) -> _Gpu:
    known = next((gpu for gpu in facts.gpus if gpu.address == address), None)
    by_address = Entity(EntityKind.GPU, f"PCI:{address}")
    entity = Entity(EntityKind.GPU, known.uuid) if known and known.uuid else by_address
    newest = next((item for item in facts.driver.recovery if item.address == address), None)
    cuts = [repaired_us(context, (entity, by_address)), facts.driver.loaded_us]
    if newest is not None and newest.action == _NOTHING_WANTED:
        cuts.append(newest.since_boot_us)
    cut_us = max((cut for cut in cuts if cut is not None), default=None)

    def counts(when_us: int) -> bool:
        return cut_us is None or when_us > cut_us

    wanted = newest.action if newest and newest.action != _NOTHING_WANTED else None
    return _Gpu(
        entity=entity,
        asked=_is_asked(address, known, context),
        told=_told(address, facts, counts),
        wanted=wanted if newest and counts(newest.since_boot_us) else None,
        cut_us=cut_us,
    )


def _told(address: str, facts: KernelFacts, counts: Callable[[int], bool]) -> tuple[_Told, ...]:
    kinds = {kind.code: kind for kind in facts.xids}
    told: dict[int, _Told] = {}
    for burst in facts.driver.xids:
        if burst.address == address and counts(burst.last_us):
            kind = kinds.get(burst.code) or XidKind.unknown(burst.code)
            told.setdefault(burst.code, _Told(kind)).bursts.append(burst)
    return tuple(told.values())


def _is_asked(address: str, known: GpuName | None, context: JudgeContext) -> bool:
    """Say whether a job asks for this GPU; one that cannot be told from others is asked for."""
    if context.gpus is None:
        return True
    asked = {
        spelt for name in context.gpus for spelt in (name.strip().lower(), sysfs_address(name))
    }
    if address in asked:
        return True
    if known is None:
        return bool(asked)
    if known.uuid is None and any(name.startswith("gpu-") for name in asked):
        return True
    minor = known.index if known.minor is None else known.minor
    numbers = {f"{NUMBERED}{known.index}", f"{NUMBERED}{minor}"}
    return not asked.isdisjoint({str(known.index), (known.uuid or "").lower(), *numbers})


def _finding(gpu: _Gpu, parameters: Parameters, context: JudgeContext) -> Finding:
    worst = gpu.worst
    status, text = _verdict(gpu, parameters)
    others = [told for told in gpu.told if told is not worst]
    text += f": {worst.bursts[-1].line}"
    if others:
        text += "; also " + ", ".join(told.words() for told in others)
    if status is Status.FAIL and not gpu.asked:
        status, text = Status.WARN, f"{text}; not one of the GPUs asked about"
    if status is Status.FAIL:
        text += (
            "; counts until a reboot, a reset that the driver reports, or"
            f" `gpuops repair {context.node.id} --what TEXT`"
        )
    return Finding(
        check="gpu_xid",
        entity=gpu.entity,
        status=status,
        value=worst.kind.code,
        unit="Xid",
        threshold="no Xid of hardware, no recovery action wanted",
        source=worst.kind.source,
        message=text,
        failure_class=_failure_class(gpu, status),
    )


def _verdict(gpu: _Gpu, parameters: Parameters) -> tuple[Status, str]:
    worst = gpu.worst
    if gpu.wanted is not None:
        return Status.FAIL, f"the driver wants: {gpu.wanted} (Xid 154); {worst.words()}"
    if worst.kind.xid_class is XidClass.RECOVERY:
        return Status.WARN, f"{worst.words()}, in words that are not understood"
    if worst.status is not Status.PASS:
        action = f"; NVIDIA: {worst.kind.action}" if worst.kind.action else ""
        return worst.status, f"{worst.words()}{action}"
    return _of_applications(gpu, parameters)


def _of_applications(gpu: _Gpu, parameters: Parameters) -> tuple[Status, str]:
    """Return the verdict on a GPU of which nothing worse is told than what applications do."""
    caused = [told for told in gpu.told if told.kind.xid_class is XidClass.APPLICATION]
    minutes = {burst.minute for told in caused for burst in told.bursts}
    text = f"{gpu.worst.words()}; no fault of the node by itself"
    if [told.kind.code for told in gpu.told] == [CLEANED_UP]:
        text += "; alone it is a killed application, or the fabric manager to restart"
    status = parameters.application_minutes.ceiling(len(minutes)) if caused else Status.PASS
    if status is Status.PASS:
        return status, text
    limit = parameters.application_minutes
    suspect = (
        f"applications failed on it in {len(minutes)} different minutes"
        f" (limit {limit.text('<', 'minutes')}, {limit.source}): the GPU is suspect, try"
        " `dcgmi diag -r 3` on it"
    )
    return min(status, Status.WARN), f"{gpu.worst.words()}; {suspect}"


def _failure_class(gpu: _Gpu, status: Status) -> FailureClass | None:
    """Return what the page to read is about: the worst of the driver's own words, if it said why.

    Xid 154 says what to do, not why; the Xid that brought it does.
    """
    if status is Status.PASS:
        return None
    ranked: Sequence[_Told] = sorted(gpu.told, key=lambda told: -told.status)
    named = [told for told in ranked if told.kind.code != RECOVERY_ACTION]
    for told in named:
        if told.kind.failure_class is not None and told.status is not Status.PASS:
            return told.kind.failure_class
    if gpu.wanted is not None or not named:
        return FailureClass.GPU_DRIVER
    return gpu.worst.kind.failure_class


def _too_many(more: int, node: Entity) -> Finding:
    return Finding(
        check="gpu_xid",
        entity=node,
        status=Status.WARN,
        value=more,
        unit="lines",
        message=f"{more} more Xid and SXid lines about more devices and codes than are kept apart",
    )


CHECK = Check(
    name="gpu_xid",
    about="what the driver said about each GPU (Xid) since boot, reset or repair",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
