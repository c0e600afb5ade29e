"""What has NVIDIA's driver logged about each NVSwitch (SXid) since it was last healthy?

Each line states whether it is fatal; the catalogue in ``checks/xid`` classifies the others. An SXid
is about the fabric of all GPUs of the node, so it counts for every job on it.
"""

from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Subject
from gpuops.checks.core.kernel_rules import PROBE, KernelFacts, repaired_us, since
from gpuops.checks.core.xid_catalogue import SxidClass, SxidKind
from gpuops.host.xid_log import Burst
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import format_seconds

_HOUR_US = 3_600_000_000
_MANY = CheckLimit(warn=100, source="gpuops judgement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``corrected_per_hour``: errors that a switch corrected in the last hour."""

    corrected_per_hour: CheckLimit = _MANY


@dataclass(frozen=True, slots=True)
class _SxidBurst:
    burst: Burst
    kind: SxidKind

    @property
    def status(self) -> Status:
        return self.kind.sxid_class.verdict(fatal=bool(self.burst.fatal))

    def text(self) -> str:
        """Return ``"SXid 20034 (link went down) on link 30, fatal, 3 min 20 s after boot"``."""
        fatal = "fatal" if self.burst.fatal else "not fatal"
        link = "" if self.burst.link is None else f" on link {self.burst.link}"
        when = f"{format_seconds(self.burst.first_us / 1e6)} after boot"
        return f"SXid {self.kind.code} ({self.kind.name}){link}, {fatal}, {when}"


def judge(facts: KernelFacts, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding for each switch with an SXid that counts.

    If all of them warn, one more reports that the log was read and no switch fails.
    """
    findings = []
    for address in sorted({burst.address for burst in facts.driver.sxids}):
        entity = Entity(EntityKind.SWITCH, f"PCI:{address}")
        bursts = _counted_bursts(address, facts, _cut_us(entity, facts, context))
        if bursts:
            findings.append(_finding(entity, bursts, facts, parameters, context.node))
    if all(finding.status is Status.WARN for finding in findings):
        findings.append(_summary(facts, context))
    return sorted(findings, key=lambda finding: -finding.status)


def _summary(facts: KernelFacts, context: JudgeContext) -> Finding:
    text = f"no SXid that fails a switch {since(facts, repaired_us(context))}"
    subject = Subject("nvswitch_sxid", context.node, FailureClass.GPU_NVSWITCH, "SXids")
    return subject.compared(Status.PASS, 0, "= 0", "checks/xid", text)


def _cut_us(entity: Entity, facts: KernelFacts, context: JudgeContext) -> int | None:
    cuts = repaired_us(context, (entity,)), facts.driver.loaded_us
    return max((cut for cut in cuts if cut is not None), default=None)


def _counted_bursts(address: str, facts: KernelFacts, cut_us: int | None) -> list[_SxidBurst]:
    kinds = {kind.code: kind for kind in facts.sxids}
    return [
        _SxidBurst(burst, kinds.get(burst.code) or SxidKind.unknown(burst.code))
        for burst in facts.driver.sxids
        if burst.address == address and (cut_us is None or burst.last_us > cut_us)
    ]


def _finding(
    entity: Entity,
    bursts: list[_SxidBurst],
    facts: KernelFacts,
    parameters: Parameters,
    node: Entity,
) -> Finding:
    worst = max(bursts, key=lambda item: (item.status, item.burst.last_us))
    lines = sum(item.burst.count for item in bursts)
    status, text = worst.status, f"{worst.text()}: {worst.burst.line}"
    corrected = _corrected_per_hour(bursts, facts.now_us)
    limit = parameters.corrected_per_hour
    if status is Status.PASS and corrected:
        status = min(limit.ceiling(corrected), Status.WARN)
        text += f"; {corrected} corrected in the last hour, limit {limit.text('<')}"
    if lines > 1:
        text += f"; {lines} lines about this switch in all"
    if status is Status.FAIL:
        text += (
            f"; counts until a reboot, the driver's reload or `gpuops repair {node.id} --what TEXT`"
        )
    subject = Subject(
        "nvswitch_sxid", entity, FailureClass.GPU_NVSWITCH, "SXid", hardware_reported=True
    )
    kind = worst.kind
    return subject.compared(status, kind.code, "none that is fatal", kind.source, text)


def _corrected_per_hour(bursts: list[_SxidBurst], now_us: int) -> int:
    return sum(
        item.burst.count
        for item in bursts
        if item.kind.sxid_class is SxidClass.CORRECTED and now_us - item.burst.last_us <= _HOUR_US
    )


CHECK = Check(
    name="nvswitch_sxid",
    about="what the driver logged about each NVSwitch (SXid) since boot or repair",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
