"""Progress of one node's keeper, reported to the agent."""

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
    """States are listed newest first; the lists are short.

    ``whole``: complete here: all shards of this node are in its memory, verified. ``replicated``:
    also on every live holder. ``refused``: the newest states that were skipped or given up here.
    The list is bounded; a state that is neither ``whole`` nor ``in_flight`` and is not after
    ``decided`` (in its epoch) was refused, too. ``newest``: the newest committed state.
    ``persisted``: complete in the directory. ``parts``: this node's shards of these are in the
    directory. ``is_due``: the job's policy requires persisting the newest state now.
    ``group_digests``: of a committed state, for comparison with other nodes. ``final_state``: a
    rank saved it as the last one.
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
