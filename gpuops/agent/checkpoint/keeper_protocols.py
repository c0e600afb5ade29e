"""What an agent asks of a keeper that works with those of other nodes.

Types of its own: those of the keeper need what hashes, which not every agent has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gpuops.checkpoint.agreement.replica_check import GroupDigest, ReplicaReport
from gpuops.checkpoint.types import Shard, ShardCopy, StateId


class KeeperPeer(NamedTuple):
    """Where another node's keeper is; *host* is an address."""

    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperProgressReader:
    """What a keeper says of its states, the newest first; see `NodeStatus` for what each means."""

    whole: tuple[StateId, ...] = ()
    replicated: tuple[StateId, ...] = ()
    refused: tuple[StateId, ...] = ()
    parts: tuple[StateId, ...] = ()
    newest: StateId | None = None
    persisted: StateId | None = None
    in_flight: StateId | None = None
    asked: int | None = None
    last: StateId | None = None
    is_due: bool = False
    ballots: tuple[GroupDigest, ...] = ()


class PeerKeeper(Protocol):
    """What an agent asks of a keeper that works with others; KeeperError where it is gone."""

    def serve_peers(self, address: str, *, node: str, token: str, job: str, port: int = 0) -> int:
        """Let other keepers in at *address*, at *port* where that can be; return the port."""
        ...

    def inventory(self) -> Sequence[ShardCopy]:
        """Return what memory holds, also for others."""
        ...

    def replicate(self, holders: Sequence[KeeperPeer], keep: Sequence[Shard]) -> None:
        """Push whole states to *holders*, and take the shards *keep* from others."""
        ...

    def choose(
        self,
        state: StateId | None,
        epoch: int,
        sources: Mapping[Shard, Sequence[KeeperPeer]],
        why: Sequence[str],
        *,
        roots: Mapping[Shard, str],
    ) -> None:
        """Have the ranks go on from *state*."""
        ...

    def take_over(self, epoch: int) -> None:
        """Let ranks that run already save states of *epoch*."""
        ...

    def progress(self) -> KeeperProgressReader:
        """Return how far the states here are."""
        ...

    def aim(self, step: int) -> None:
        """Save nothing before *step*, and the first that is asked for from then on."""
        ...

    def commit(self, state: StateId) -> None:
        """Commit a state that all nodes have."""
        ...

    def persist(self, state: StateId) -> bool:
        """Commit it, and begin to write this node's shards; False: not just now."""
        ...

    def give_up(self, state: StateId) -> None:
        """Let go of a state that not all nodes will have."""
        ...

    def differ(self, told: ReplicaReport) -> None:
        """Tell of ranks of several nodes, some of them here, that differ."""
        ...

    def seal_persisted(self, state: StateId, world: int) -> bool:
        """Write the manifest of a state whose shards are all written; False: not just now."""
        ...
