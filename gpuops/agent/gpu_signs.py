"""What was seen of the job's GPUs in a generation: which fault of which GPU, how often, by whom."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpuops.agent.gpu_faults import GpuFault
from gpuops.host.gpu_names import GpuName
from gpuops.host.xid_told import Source, XidEvent
from gpuops.log import printable
from gpuops.model import Entity, EntityKind, Evidence, FailureClass, Role, Side

SIGNS_MAX = 256
RECENT_S = 60.0
LINE_CHARS_MAX = 300
_SAID_BY = {Source.NVML: "NVML", Source.KERNEL: "the kernel's log"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSign:
    """One kind of fault of one GPU in this generation; times are of the host's monotonic clock.

    ``local_rank``: of the worker on that GPU, where it can be told.
    """

    gpu: Entity
    code: int
    fault: GpuFault
    sources: frozenset[Source]
    first_ns: int
    last_ns: int
    first_us: int
    count: int = 1
    index: int | None = None
    address: str | None = None  # on PCI
    local_rank: int | None = None
    line: str = ""

    @property
    def failure_class(self) -> FailureClass | None:
        """Return the class of a failure of this GPU's worker that follows."""
        return self.fault.suggests

    @property
    def side(self) -> Side:
        return self.fault.side

    @property
    def blames_node(self) -> bool:
        return self.fault.blames_node

    @property
    def words(self) -> str:
        """Return ``"Xid 79 (GPU has fallen off the bus) on GPU 3 (GPU-…), seen by NVML"``."""
        number = "a GPU" if self.index is None else f"GPU {self.index}"
        times = f", {self.count} times" if self.count > 1 else ""
        by = " and ".join(_SAID_BY[source] for source in Source if source in self.sources)
        return f"{self.fault.words} on {number} ({self.gpu.id}){times}, seen by {by}"

    def to_evidence(self) -> Evidence:
        return Evidence(
            role=Role.ROOT if self.fault.ends else Role.SYMPTOM,
            text=self.words,
            entity=self.gpu,
            lines=(self.line,) if self.line else (),
        )


class Signs:
    """The signs of one generation, in bounded memory."""

    def __init__(self) -> None:
        self._signs: dict[tuple[Entity, int, str], GpuSign] = {}

    def add(
        self, event: XidEvent, fault: GpuFault, gpu: GpuName | None, local_rank: int | None
    ) -> GpuSign:
        """Return the sign that *event* is, or is one more of."""
        entity = entity_of(event, gpu)
        key = entity, event.code, event.recovery or ""
        known = self._signs.get(key)
        if known is None:
            known = GpuSign(
                gpu=entity,
                code=event.code,
                fault=fault,
                sources=frozenset({event.source}),
                first_ns=event.mono_ns,
                last_ns=event.mono_ns,
                first_us=event.now_us,
                count=event.count,
                index=event.index if gpu is None else gpu.index,
                address=event.address if gpu is None else gpu.address,
                local_rank=local_rank,
                line=printable(event.line)[:LINE_CHARS_MAX],
            )
        else:
            known = _joined(known, event, fault, local_rank)
        if key in self._signs or len(self._signs) < SIGNS_MAX:
            self._signs[key] = known
        return known

    def all(self) -> tuple[GpuSign, ...]:
        """Return the signs, the gravest first, of equals the first seen."""
        return tuple(sorted(self._signs.values(), key=_gravity))

    def since(self, from_ns: int) -> tuple[GpuSign, ...]:
        """Return those that were last seen since *from_ns*."""
        return tuple(sign for sign in self.all() if sign.last_ns >= from_ns)


def entity_of(event: XidEvent, gpu: GpuName | None) -> Entity:
    """Return the GPU that *event* is about, by UUID where that is known."""
    uuid = event.uuid or (gpu and gpu.uuid)
    return Entity(EntityKind.GPU, uuid or f"PCI:{event.address or 'unknown'}")


def evidence_of(signs: Iterable[GpuSign]) -> tuple[Evidence, ...]:
    """Return *signs* as evidence."""
    return tuple(sign.to_evidence() for sign in signs)


def ranks_by_gpu(rank_gpus: Mapping[int, str]) -> dict[str, int]:
    """Return the local rank on each GPU that has only one."""
    uuids = list(rank_gpus.values())
    return {uuid: rank for rank, uuid in rank_gpus.items() if uuids.count(uuid) == 1}


def _joined(known: GpuSign, event: XidEvent, fault: GpuFault, local_rank: int | None) -> GpuSign:
    """Return *known* with *event* in it; NVML and the log each tell of the same lines."""
    same_source = event.source in known.sources
    graver = fault if _weight(fault) > _weight(known.fault) else known.fault
    return replace(
        known,
        fault=graver,
        sources=known.sources | {event.source},
        last_ns=max(known.last_ns, event.mono_ns),
        count=known.count + event.count if same_source else max(known.count, event.count),
        local_rank=local_rank if known.local_rank is None else known.local_rank,
        line=known.line or printable(event.line)[:LINE_CHARS_MAX],
    )


def _weight(fault: GpuFault) -> tuple[bool, bool, bool, bool]:
    return fault.ends, fault.blames_node, fault.side is Side.INFRA, fault.suggests is not None


def _gravity(sign: GpuSign) -> tuple[bool, bool, int]:
    return not sign.fault.ends, not sign.fault.blames_node, sign.first_ns
