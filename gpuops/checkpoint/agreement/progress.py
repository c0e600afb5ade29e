"""How far the keeper of one node is with its states; for the keeper and the agent alike."""

from dataclasses import dataclass
from typing import Annotated

from gpuops.checkpoint.agreement.replica_check import (
    GroupDigest,
    group_digests_from_json,
    group_digests_to_json,
)
from gpuops.checkpoint.types import StateId
from gpuops.wire.messages import Limit, Message, Using

COMPLETE_MAX = 4
REFUSED_MAX = 8
_States = Annotated[tuple[StateId, ...], Limit(COMPLETE_MAX, is_cut=True)]
GroupDigests = Annotated[
    tuple[GroupDigest, ...], Using(group_digests_to_json, group_digests_from_json)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperProgress(Message):
    """States are newest first, and few.

    ``whole``: all of this node's shards are in its memory, verified. ``replicated``: and every
    holder that lives has them. ``refused``: skipped or given up here; these are the newest of them
    only, so to know whether any state was: one that is neither whole nor ``in_flight`` and is not
    after ``decided`` (of its epoch) was. ``newest`` committed one. ``persisted``: lies whole in the
    directory. ``parts``: of these this node's shards lie there. ``is_due``: by the policy of the
    job the newest is to be persisted. ``group_digests``: of a committed state, for others to
    compare. ``final_state``: a rank asked for it as the last one.
    """

    whole: _States = ()
    replicated: _States = ()
    refused: Annotated[tuple[StateId, ...], Limit(REFUSED_MAX, is_cut=True)] = ()
    newest: StateId | None = None
    persisted: StateId | None = None
    parts: _States = ()
    in_flight: StateId | None = None
    decided: StateId | None = None
    final_state: StateId | None = None
    is_due: bool = False
    group_digests: GroupDigests = ()
