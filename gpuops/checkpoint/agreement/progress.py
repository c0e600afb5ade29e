"""How far the keeper of one node is with its states; for the keeper and the agent alike."""

from dataclasses import dataclass

from gpuops.checkpoint.agreement.replica_check import GroupDigest
from gpuops.checkpoint.types import StateId

COMPLETE_MAX = 4
REFUSED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperProgress:
    """States are newest first, and few.

    ``whole``: all of this node's shards are in its memory, verified. ``replicated``: and every
    holder that lives has them. ``refused``: skipped or given up here; these are the newest of them
    only, so to know whether any state was: one that is neither whole nor ``in_flight`` and is not
    after ``decided`` (of its epoch) was. ``newest`` committed one. ``persisted``: lies whole in the
    directory. ``parts``: of these this node's shards lie there. ``is_due``: by the policy of the
    job the newest is to be persisted. ``group_digests``: of a committed state, for others to
    compare. ``last``: a rank asked for it as the last one.
    """

    whole: tuple[StateId, ...] = ()
    replicated: tuple[StateId, ...] = ()
    refused: tuple[StateId, ...] = ()
    newest: StateId | None = None
    persisted: StateId | None = None
    parts: tuple[StateId, ...] = ()
    in_flight: StateId | None = None
    decided: StateId | None = None
    last: StateId | None = None
    is_due: bool = False
    group_digests: tuple[GroupDigest, ...] = ()
