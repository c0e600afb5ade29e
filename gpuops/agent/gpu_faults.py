"""What an Xid means for a run: the one table, made from the catalogue (``checks/xid``).

================================  =====================================================
the catalogue, or the driver      the run
================================  =====================================================
``hardware``                      ends this generation; the node is to blame
  ... the line says Nonfatal      evidence
  ... ``IGNORE``, ``RESTART_APP``  ends this generation; a restart on the same node may do
``recovery`` (154), wants action  ends this generation; the node is to blame
  ... a drain                     evidence; blames the node for a failure that follows
``mixed``, a code not listed      evidence; names the class of a failure that follows
``application``                   evidence; names the class of a failure that follows
``informational``, 154 with None  evidence
a GPU that NVML calls lost        ends this generation; the node is to blame
================================  =====================================================

What only the kernel's line tells (is it fatal, what does the driver want) cannot be taken from
NVML's event: such a code alone ends nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.checks.xid_catalogue import XidClass, XidKind
from gpuops.host.xid import NVLINK5
from gpuops.host.xid_told import LOST, Source, XidEvent
from gpuops.model import FailureClass, Side, Status

_MILD_ACTIONS = frozenset({"IGNORE", "RESTART_APP"})
_NOTHING_WANTED = "None"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """What one Xid is to a run.

    ``ends``: the generation is over, whether its workers know it yet or not. ``suggests``: the
    class of a failure of its worker that follows, None where it explains none; ``blames_node``
    speaks of such a failure too.
    """

    words: str
    ends: bool = False
    blames_node: bool = False
    suggests: FailureClass | None = None
    side: Side = Side.AMBIGUOUS


def judge_xid(event: XidEvent, catalogue: Mapping[int, XidKind]) -> GpuFault:
    """Return what *event* is to a run."""
    if event.code == LOST:
        return GpuFault(
            words="the driver calls the GPU lost",
            ends=True,
            blames_node=True,
            suggests=FailureClass.GPU_FELL_OFF_BUS,
            side=Side.INFRA,
        )
    kind = catalogue.get(event.code) or XidKind.unknown(event.code)
    words = f"Xid {kind.code} ({kind.name})"
    match kind.xid_class:
        case XidClass.HARDWARE:
            return _hardware(event, kind, words)
        case XidClass.RECOVERY:
            return _recovery(event, kind, words)
        case XidClass.MIXED:
            return GpuFault(words=words, suggests=kind.failure_class)
        case XidClass.APPLICATION:
            return GpuFault(words=words, suggests=kind.failure_class, side=Side.USER)
        case XidClass.INFORMATIONAL:
            return GpuFault(words=words)


def _hardware(event: XidEvent, kind: XidKind, words: str) -> GpuFault:
    untold = event.code in NVLINK5 and event.source is Source.NVML
    fails = kind.xid_class.verdict(fatal=event.fatal) is Status.FAIL
    if untold or not fails:
        return GpuFault(words=words, suggests=kind.failure_class, side=Side.INFRA)
    return GpuFault(
        words=words,
        ends=True,
        blames_node=kind.action not in _MILD_ACTIONS,
        suggests=kind.failure_class,
        side=Side.INFRA,
    )


def _recovery(event: XidEvent, kind: XidKind, words: str) -> GpuFault:
    if event.recovery is None or event.recovery == _NOTHING_WANTED:
        return GpuFault(words=words)
    return GpuFault(
        words=f"the driver wants: {event.recovery} ({words})",
        # What is to be drained first works on: the driver lets the job finish.
        ends="drain" not in event.recovery.lower(),
        blames_node=True,
        suggests=kind.failure_class or FailureClass.GPU_DRIVER,
        side=Side.INFRA,
    )
