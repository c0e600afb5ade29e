"""What has NVIDIA's driver logged about each GPU (Xid) since it was last healthy?

First counts the action that the driver itself requests (the newest Xid 154 of a GPU), then the
catalogue in ``checks/xid``. What applications cause never fails a node. An Xid counts if it came
after the last of these: the boot, the load of the driver, an Xid 154 that withdraws its request, an
acknowledged repair (`gpuops repair`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Subject
from gpuops.checks.core.kernel_rules import PROBE, KernelFacts, repaired_us, since
from gpuops.checks.core.xid_catalogue import XidClass, XidKind
from gpuops.host.gpu_names import GpuName
from gpuops.host.sysfs import sysfs_address
from gpuops.host.xid import RECOVERY_ACTION, is_of_domain
from gpuops.host.xid_log import Burst
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.slurm.env import NUMBERED
from gpuops.units import format_seconds

CLEANED_UP = 45
_NO_ACTION = "None"
_MANY = CheckLimit(warn=10, source="gpuops judgement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``application_minutes``: minutes with an Xid of an application that make a GPU suspect."""

    application_minutes: CheckLimit = _MANY


@dataclass(slots=True)
class _XidGroup:
    """The lines of one code about one GPU that count."""

    kind: XidKind
    bursts: list[Burst] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return sum(burst.count for burst in self.bursts)

    @property
    def status(self) -> Status:
        return max(self.kind.xid_class.verdict(fatal=burst.fatal) for burst in self.bursts)

    def text(self) -> str:
        """Return ``"Xid 79 (GPU has fallen off the bus), 3 min 20 s after boot"``."""
        first = min(burst.first_us for burst in self.bursts)
        last = max(burst.last_us for burst in self.bursts)
        when = f"{format_seconds(first / 1e6)} after boot"
        if self.lines > 1:
            when = f"{self.lines} times, first {when}, last {format_seconds(last / 1e6)}"
        return f"Xid {self.kind.code} ({self.kind.name}), {when}"


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU with its Xids. ``action``: what the driver still requests."""

    entity: Entity
    is_selected: bool
    groups: tuple[_XidGroup, ...]
    action: str | None
    cut_us: int | None

    @property
    def worst(self) -> _XidGroup:
        return max(self.groups, key=lambda group: (group.status, group.bursts[-1].last_us))


def judge(facts: KernelFacts, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding for each GPU with an Xid that counts.

    If all of them warn, one more reports that the log was read and no GPU fails.
    """
    addresses = sorted({burst.address for burst in facts.driver.xids})
    gpus = [_gpu(address, facts, context) for address in addresses]
    findings = [_finding(gpu, parameters, context) for gpu in gpus if gpu.groups]
    if facts.driver.more:
        findings.append(_too_many(facts.driver.more, context.node))
    if all(finding.status is Status.WARN for finding in findings):
        findings.append(_summary(sum(not gpu.groups for gpu in gpus), facts, context))
    return sorted(findings, key=lambda finding: -finding.status)


def _summary(cleared: int, facts: KernelFacts, context: JudgeContext) -> Finding:
    older = f"; {cleared} GPUs have older ones, which no longer count" if cleared else ""
    text = f"no Xid that fails a GPU {since(facts, repaired_us(context))}{older}"
    subject = Subject("gpu_xid", context.node, FailureClass.GPU_DRIVER, "Xids")
    return subject.compared(Status.PASS, 0, "= 0", "checks/xid", text)


def _gpu(address: str, facts: KernelFacts, context: JudgeContext) -> _Gpu:
    known = next((gpu for gpu in facts.gpus if gpu.address == address), None)
    by_address = Entity(EntityKind.GPU, f"PCI:{address}")
    entity = Entity(EntityKind.GPU, known.uuid) if known and known.uuid else by_address
    newest = next((item for item in facts.driver.recovery if item.address == address), None)
    cuts = [repaired_us(context, (entity, by_address)), facts.driver.loaded_us]
    if newest is not None and newest.action == _NO_ACTION:
        cuts.append(newest.since_boot_us)
    cut_us = max((cut for cut in cuts if cut is not None), default=None)

    def counts(when_us: int) -> bool:
        return cut_us is None or when_us > cut_us

    action = newest.action if newest and newest.action != _NO_ACTION else None
    return _Gpu(
        entity=entity,
        is_selected=_is_selected(address, known, context),
        groups=_groups(address, facts, counts),
        action=action if newest and counts(newest.since_boot_us) else None,
        cut_us=cut_us,
    )


def _groups(
    address: str, facts: KernelFacts, counts: Callable[[int], bool]
) -> tuple[_XidGroup, ...]:
    kinds = {kind.code: kind for kind in facts.xids}
    groups: dict[int, _XidGroup] = {}
    for burst in facts.driver.xids:
        if burst.address == address and counts(burst.last_us):
            kind = kinds.get(burst.code) or XidKind.unknown(burst.code)
            groups.setdefault(burst.code, _XidGroup(kind)).bursts.append(burst)
    return tuple(groups.values())


def _is_selected(address: str, known: GpuName | None, context: JudgeContext) -> bool:
    """Return whether *context* selects this GPU; one that cannot be identified is selected."""
    if context.gpus is None:
        return True
    names = {
        spelt for name in context.gpus for spelt in (name.strip().lower(), sysfs_address(name))
    }
    if address in names:
        return True
    if known is None:
        return bool(names)
    if known.uuid is None and any(name.startswith("gpu-") for name in names):
        return True
    minor = known.index if known.minor is None else known.minor
    numbers = {f"{NUMBERED}{known.index}", f"{NUMBERED}{minor}"}
    return not names.isdisjoint({str(known.index), (known.uuid or "").lower(), *numbers})


def _finding(gpu: _Gpu, parameters: Parameters, context: JudgeContext) -> Finding:
    worst = gpu.worst
    status, text = _verdict(gpu, parameters)
    others = [group for group in gpu.groups if group is not worst]
    text += f": {worst.bursts[-1].line}"
    if others:
        text += "; also " + ", ".join(group.text() for group in others)
    if status is Status.FAIL and not gpu.is_selected:
        status, text = Status.WARN, f"{text}; not one of the selected GPUs"
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
        threshold="no Xid of hardware, no recovery action",
        source=worst.kind.source,
        message=text,
        failure_class=_failure_class(gpu, status),
        hardware_reported=status is Status.FAIL,
    )


def _verdict(gpu: _Gpu, parameters: Parameters) -> tuple[Status, str]:
    worst = gpu.worst
    if gpu.action is not None:
        text = f"the driver requests: {gpu.action} (Xid 154)"
        if not is_of_domain(gpu.action):
            return Status.FAIL, f"{text}; {worst.text()}"
        text += ", of the NVLink domain and not of this GPU"
        return max(Status.WARN, worst.status), f"{text}; {worst.text()}"
    if worst.kind.xid_class is XidClass.RECOVERY:
        return Status.WARN, f"{worst.text()}, with an action that gpuops does not know"
    if worst.status is not Status.PASS:
        action = f"; NVIDIA: {worst.kind.action}" if worst.kind.action else ""
        return worst.status, f"{worst.text()}{action}"
    return _of_applications(gpu, parameters)


def _of_applications(gpu: _Gpu, parameters: Parameters) -> tuple[Status, str]:
    """Return the verdict on a GPU with no worse Xids than those that applications cause."""
    caused = [group for group in gpu.groups if group.kind.xid_class is XidClass.APPLICATION]
    minutes = {burst.minute for group in caused for burst in group.bursts}
    text = f"{gpu.worst.text()}; not a fault of the node by itself"
    if [group.kind.code for group in gpu.groups] == [CLEANED_UP]:
        text += (
            "; alone it means a killed application, or that the fabric manager must be restarted"
        )
    status = parameters.application_minutes.ceiling(len(minutes)) if caused else Status.PASS
    if status is Status.PASS:
        return status, text
    limit = parameters.application_minutes
    suspect = (
        f"applications failed on it in {len(minutes)} different minutes"
        f" (limit {limit.text('<', 'minutes')}, {limit.source}): the GPU is suspect, try"
        " `dcgmi diag -r 3` on it"
    )
    return min(status, Status.WARN), f"{gpu.worst.text()}; {suspect}"


def _failure_class(gpu: _Gpu, status: Status) -> FailureClass | None:
    """Return the failure class, for the runbook: that of the worst Xid that names a cause.

    Xid 154 names the action, not the cause; the Xid that led to it does.
    """
    if status is Status.PASS:
        return None
    ranked = sorted(gpu.groups, key=lambda group: -group.status)
    named = [group for group in ranked if group.kind.code != RECOVERY_ACTION]
    for group in named:
        if group.kind.failure_class is not None and group.status is not Status.PASS:
            return group.kind.failure_class
    if gpu.action is not None and is_of_domain(gpu.action):
        return FailureClass.GPU_FABRIC
    if gpu.action is not None or not named:
        return FailureClass.GPU_DRIVER
    return gpu.worst.kind.failure_class


def _too_many(more: int, node: Entity) -> Finding:
    return Finding(
        check="gpu_xid",
        entity=node,
        status=Status.WARN,
        value=more,
        unit="lines",
        message=f"{more} more Xid and SXid lines about further devices and codes",
    )


CHECK = Check(
    name="gpu_xid",
    about="what the driver logged about each GPU (Xid) since boot, reset or repair",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
