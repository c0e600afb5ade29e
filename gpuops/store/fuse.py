"""How many nodes may be drained at once: the sizes of the fuse and of the fleet's cap.

Pure and without SQLAlchemy, so that a hook whose store does not answer decides by the same numbers.

A failure has one of three kinds. What the hardware reported of its own node is true whatever else
happens, so that a tripped fuse only limits it to the fleet's cap. What many nodes share, and what a
limit of ours judged, drains no node while the fuse is tripped: there a drain cannot help, or is
probably wrong.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from gpuops.model import Finding

NODES_MIN = 3
FUSE_SHARE = 0.02
CAP_SHARE = 0.10
FUSE_WINDOW_S = 600.0
SEEN_S = 86_400.0
# Without a health check nothing reports that a drained node is back in service.
HELD_S = 7 * 86_400.0


class CauseKind(StrEnum):
    """Who judged a failure, and whether other nodes may share its cause."""

    HARDWARE = "hardware"
    SHARED = "shared"
    LIMIT = "limit"

    @classmethod
    def of(cls, finding: Finding) -> "CauseKind":
        """Return the kind of the failure in *finding*."""
        if finding.shared_cause:
            return cls.SHARED
        return cls.HARDWARE if finding.hardware_reported else cls.LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseSettings:
    """The settings of the fuse; None: by the size of the fleet.

    ``nodes``: more than these failing one check within ``window_s`` trip the fuse.
    ``max_drained``: nodes that may be drained while it is tripped.
    """

    nodes: int | None = None
    max_drained: int | None = None
    window_s: float = FUSE_WINDOW_S

    def limit(self, nodes_seen: int) -> int:
        """Return how many nodes of a fleet may fail one check before the fuse trips."""
        return max(NODES_MIN, int(FUSE_SHARE * nodes_seen)) if self.nodes is None else self.nodes

    def cap(self, nodes_seen: int) -> int:
        """Return how many nodes of a fleet may be drained while the fuse is tripped."""
        by_size = max(NODES_MIN, int(CAP_SHARE * nodes_seen))
        return by_size if self.max_drained is None else self.max_drained


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseCounts:
    """Counts of nodes: seen in a day; failing the check; drained by gpuops for any check.

    The node that asks is one of those that fail, and none of the drained ones.
    """

    seen: int
    failing: int
    drained: int


def is_tripped(counts: FuseCounts, settings: FuseSettings) -> bool:
    """Return whether so many nodes fail one check that the check or a shared cause is suspect."""
    return counts.failing > settings.limit(counts.seen)


def may_drain(
    kind: CauseKind,
    counts: FuseCounts,
    settings: FuseSettings,
    refused: Collection[CauseKind] = (),
) -> bool:
    """Return whether one more node may be drained for a failure of *kind*.

    *refused*: other failures of the node for which it may not be drained. They may have the same
    cause: what many nodes share fails several checks, and so does a bad driver.
    """
    has_room = counts.drained < settings.cap(counts.seen)
    if refused and (not has_room or (kind is CauseKind.SHARED and kind in refused)):
        return False
    return not is_tripped(counts, settings) or (kind is CauseKind.HARDWARE and has_room)
