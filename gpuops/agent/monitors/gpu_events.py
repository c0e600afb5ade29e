"""What an Xid means for a run, and the GPU errors of a generation.

================================  =====================================================
the catalogue, or the driver      the run
================================  =====================================================
``hardware``                      ends this generation; the node is to blame
  ... the line says Nonfatal      evidence
  ... ``IGNORE``, ``RESTART_APP``  ends this generation; the node may be used again
``recovery`` (154), wants action  ends this generation; the node is to blame
  ... a drain                     evidence; blames the node for a failure that follows
  ... of the NVLink domain        evidence; names the class of a failure that follows
``mixed``, a code not listed      evidence; names the class of a failure that follows
``application``                   evidence; names the class of a failure that follows
``informational``, 154 with None  evidence
a GPU that NVML reports lost      ends this generation; the node is to blame
================================  =====================================================

Only the kernel's line has the severity and the driver's recovery action; NVML's event lacks them,
so that such a code alone does not end a generation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuops.checks.core.xid_catalogue import XidClass, XidKind
from gpuops.host.gpu_names import GpuName
from gpuops.host.xid import NVLINK5, is_of_domain
from gpuops.host.xid_watch import LOST, XidEvent, XidSource
from gpuops.incident.decision import ReportKind
from gpuops.incident.suspicion import Suspicion, SuspicionLevel
from gpuops.log import printable
from gpuops.model import Confidence, Entity, EntityKind, Evidence, FailureClass, Role, Side, Status

_MILD_ACTIONS = frozenset({"IGNORE", "RESTART_APP"})
_NOTHING_WANTED = "None"
EVENTS_MAX = 256
LINE_CHARS_MAX = 300
_SOURCE_NAMES = {XidSource.NVML: "NVML", XidSource.KERNEL: "the kernel's log"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """What one Xid means for a run.

    ``ends``: it ends the generation, whether its workers have noticed it or not. ``suggests``: the
    class of a worker's failure that follows, None where it explains none; ``blames_node`` applies
    to such a failure too.
    """

    text: str
    ends: bool = False
    blames_node: bool = False
    suggests: FailureClass | None = None
    side: Side = Side.AMBIGUOUS


def judge_xid(event: XidEvent, catalogue: Mapping[int, XidKind]) -> GpuFault:
    """Return what *event* means for a run."""
    if event.code == LOST:
        return GpuFault(
            text="the driver reports the GPU lost",
            ends=True,
            blames_node=True,
            suggests=FailureClass.GPU_FELL_OFF_BUS,
            side=Side.INFRA,
        )
    kind = catalogue.get(event.code) or XidKind.unknown(event.code)
    text = f"Xid {kind.code} ({kind.name})"
    match kind.xid_class:
        case XidClass.HARDWARE:
            return _hardware(event, kind, text)
        case XidClass.RECOVERY:
            return _recovery(event, kind, text)
        case XidClass.MIXED:
            return GpuFault(text=text, suggests=kind.failure_class)
        case XidClass.APPLICATION:
            return GpuFault(text=text, suggests=kind.failure_class, side=Side.USER)
        case XidClass.INFORMATIONAL:
            return GpuFault(text=text)


def _hardware(event: XidEvent, kind: XidKind, text: str) -> GpuFault:
    lacks_severity = event.code in NVLINK5 and event.source is XidSource.NVML
    fails = kind.xid_class.verdict(fatal=event.fatal) is Status.FAIL
    if lacks_severity or not fails:
        return GpuFault(text=text, suggests=kind.failure_class, side=Side.INFRA)
    return GpuFault(
        text=text,
        ends=True,
        blames_node=kind.action not in _MILD_ACTIONS,
        suggests=kind.failure_class,
        side=Side.INFRA,
    )


def _recovery(event: XidEvent, kind: XidKind, text: str) -> GpuFault:
    if event.recovery is None or event.recovery == _NOTHING_WANTED:
        return GpuFault(text=text)
    text = f"the driver wants: {event.recovery} ({text})"
    if is_of_domain(event.recovery):
        return GpuFault(text=text, suggests=FailureClass.GPU_FABRIC, side=Side.INFRA)
    return GpuFault(
        text=text,
        # A GPU to drain still works: the driver lets the job finish.
        ends="drain" not in event.recovery.lower(),
        blames_node=True,
        suggests=kind.failure_class or FailureClass.GPU_DRIVER,
        side=Side.INFRA,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEvent:
    """One kind of fault of one GPU in this generation; times are of the host's monotonic clock."""

    gpu: Entity
    code: int
    fault: GpuFault
    sources: frozenset[XidSource]
    first_ns: int
    last_ns: int
    count: int = 1
    index: int | None = None
    address: str | None = None  # on PCI
    line: str = ""

    @property
    def text(self) -> str:
        """Return ``"Xid 79 (GPU has fallen off the bus) on GPU 3 (GPU-…), seen by NVML"``."""
        number = "a GPU" if self.index is None else f"GPU {self.index}"
        times = f", {self.count} times" if self.count > 1 else ""
        by = " and ".join(_SOURCE_NAMES[source] for source in XidSource if source in self.sources)
        return f"{self.fault.text} on {number} ({self.gpu.id}){times}, seen by {by}"

    def to_evidence(self) -> Evidence:
        return Evidence(
            role=Role.ROOT if self.fault.ends else Role.SYMPTOM,
            text=self.text,
            entity=self.gpu,
            lines=(self.line,) if self.line else (),
        )

    def to_suspicion(self, node: str) -> Suspicion | None:
        """Return it as a suspicion of *node*, None where it explains no failure."""
        fault = self.fault
        if fault.suggests is None and not (fault.ends or fault.blames_node):
            return None
        mild = SuspicionLevel.SUSPECT if fault.blames_node else SuspicionLevel.NOTE
        return Suspicion(
            entity=self.gpu,
            failure_class=fault.suggests or FailureClass.GPU_DRIVER,
            confidence=Confidence.CONFIRMED,
            level=SuspicionLevel.END if fault.ends else mild,
            source="gpu",
            why=self.text,
            node=node if fault.blames_node else None,
            side=fault.side,
            kind=ReportKind.GPU_FAULT,
            since_ns=self.first_ns,
            last_ns=self.last_ns,
        )


class GpuEvents:
    """The GPU events of one generation, in bounded memory."""

    def __init__(self) -> None:
        self._events: dict[tuple[Entity, int, str], GpuEvent] = {}

    def add(self, event: XidEvent, fault: GpuFault, gpu: GpuName | None) -> GpuEvent:
        """Add *event*; return the new, or updated, entry."""
        entity = entity_of(event, gpu)
        key = entity, event.code, event.recovery or ""
        known = self._events.get(key)
        if known is None:
            known = GpuEvent(
                gpu=entity,
                code=event.code,
                fault=fault,
                sources=frozenset({event.source}),
                first_ns=event.mono_ns,
                last_ns=event.mono_ns,
                count=event.count,
                index=event.index if gpu is None else gpu.index,
                address=event.address if gpu is None else gpu.address,
                line=printable(event.line)[:LINE_CHARS_MAX],
            )
        else:
            known = _merged(known, event, fault)
        if key in self._events or len(self._events) < EVENTS_MAX:
            self._events[key] = known
        return known

    def all(self) -> tuple[GpuEvent, ...]:
        """Return the events, the most severe first, equal ones in the order of time."""
        return tuple(sorted(self._events.values(), key=_order))


def entity_of(event: XidEvent, gpu: GpuName | None) -> Entity:
    """Return the GPU of *event*, by UUID where that is known."""
    uuid = event.uuid or (gpu and gpu.uuid)
    return Entity(EntityKind.GPU, uuid or f"PCI:{event.address or 'unknown'}")


def _merged(known: GpuEvent, event: XidEvent, fault: GpuFault) -> GpuEvent:
    """Return *known* with *event* merged; NVML and the log report the same errors."""
    same_source = event.source in known.sources
    return replace(
        known,
        fault=max(known.fault, fault, key=_weight),
        sources=known.sources | {event.source},
        last_ns=max(known.last_ns, event.mono_ns),
        count=known.count + event.count if same_source else max(known.count, event.count),
        line=known.line or printable(event.line)[:LINE_CHARS_MAX],
    )


def _weight(fault: GpuFault) -> tuple[bool, bool, bool, bool]:
    return fault.ends, fault.blames_node, fault.side is Side.INFRA, fault.suggests is not None


def _order(event: GpuEvent) -> tuple[bool, bool, int]:
    return not event.fault.ends, not event.fault.blames_node, event.first_ns
