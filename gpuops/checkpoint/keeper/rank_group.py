"""The ranks of one generation, and what their agent says about it."""

from dataclasses import dataclass, field
from typing import Protocol

from gpuops.checkpoint.agreement.local_recovery import (
    SelectedState,
    ShardLocation,
)
from gpuops.checkpoint.keeper.messages import RankInfo
from gpuops.checkpoint.partial_image import ByteRange
from gpuops.checkpoint.peers.fetch import PeerShards
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    Digest,
    KeeperError,
    RestorePoint,
    RestoreUndecidedError,
    Shard,
    StateId,
)

# How long new workers wait for the older ones to disconnect.
FENCE_S = 5.0
RETURN_S = 5.0  # a rank whose connection broke is back by then


class ClientConnection(Protocol):
    """The other end of a connection. ``pid`` 0: in another pid namespace."""

    @property
    def pid(self) -> int: ...

    def close(self) -> None:
        """End the connection; messages that still arrive are ignored."""
        ...


WantedParts = tuple[StateId, Shard, tuple[ByteRange, ...]]


@dataclass(slots=True)
class PartsRead:
    """Parts of an image that are being read for a rank."""

    wanted: WantedParts
    is_done: bool = False
    error: CheckpointError | None = None


@dataclass(frozen=True, slots=True)
class GroupRestore:
    """The state that was decided for all ranks to load."""

    restore_point: RestorePoint | None
    selected: SelectedState | None


@dataclass(slots=True)
class RankGroup:
    """The ranks of one generation.

    ``is_requested``: a rank waits for the state to resume from. ``error``: why there will be none.
    ``is_handed_over``: the keeper ends soon after the last of them. ``is_replaced``: newer ranks
    have taken their place. ``gone_s``: when the last of ``gone`` left. ``copies_all_why``: why they
    share nothing, "" where they do. ``is_damaged``: ``error`` says how the state is that several
    nodes agreed on. ``rejected``: states that turned out to be damaged, and how;
    ``is_searched_again``: one was, or is verified.
    """

    generation: int
    world: int
    n_ranks: int
    connections: dict[int, ClientConnection] = field(default_factory=dict)
    ranks: dict[int, RankInfo] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    gone_s: float = 0.0
    restored: set[int] = field(default_factory=set)
    _pids: dict[int, int] = field(default_factory=dict)
    is_requested: bool = False
    is_searching: bool = False
    result: GroupRestore | None = None
    error: str = ""
    is_undecided: bool = False
    is_damaged: bool = False
    is_handed_over: bool = False
    is_replaced: bool = False
    copies_all_why: str = ""
    is_searched_again: bool = False
    rejected: dict[StateId, str] = field(default_factory=dict)
    _steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    _has_compared_steps: bool = False

    def accepts(
        self, rank_info: RankInfo, connection: ClientConnection, *, is_back: bool = False
    ) -> bool:
        """Return whether the rank belongs to this group; where not, it is of a newer one.

        A process that was connected before and *is_back* does: its connection broke.

        Raises:
            KeeperError: It cannot be a rank of any group.
        """
        if (rank_info.generation, rank_info.shard.world, rank_info.n_ranks) != (
            self.generation,
            self.world,
            self.n_ranks,
        ):
            return False
        connected = self.connections.get(rank_info.local_rank)
        if connected is not None and connection.pid and connected.pid == connection.pid:
            raise KeeperError(
                f"process {connection.pid} is connected as local rank {rank_info.local_rank} "
                "already; close that connection first"
            )
        if connected is not None:
            return False
        if rank_info.local_rank in self.gone:
            is_same = connection.pid != 0 and connection.pid == self._pids.get(rank_info.local_rank)
            return is_back and is_same and self.ranks[rank_info.local_rank] == rank_info
        same_rank = next((p for p in self.ranks.values() if p.shard == rank_info.shard), None)
        if same_rank is not None:
            raise KeeperError(
                f"local ranks {same_rank.local_rank} and {rank_info.local_rank} both are rank "
                f"{rank_info.shard.rank}"
            )
        return True

    def join(self, rank_info: RankInfo, connection: ClientConnection) -> None:
        self.connections[rank_info.local_rank] = connection
        self.ranks[rank_info.local_rank] = rank_info
        self._pids[rank_info.local_rank] = connection.pid
        self.gone.discard(rank_info.local_rank)

    def remove(self, local_rank: int, now_s: float) -> None:
        """Remove a rank; a new process in its place belongs to another group."""
        self.gone_s = now_s
        self.connections.pop(local_rank, None)
        self.gone.add(local_rank)
        self.mark_restored(local_rank)

    def why_over(
        self, step: int, decided: StateId | None, now_s: float, *, is_reserved: bool
    ) -> str:
        """Return why *step*, a rank's last one that was refused, is lost, "" where it may be saved.

        *decided* is the newest one; not *is_reserved*: some rank has no memory reserved.
        """
        if decided is not None and step < decided.step:
            return f"other ranks of this node have gone on to step {decided.step}"
        has_left = not is_reserved and self.gone and now_s - self.gone_s > RETURN_S
        return f"local rank {min(self.gone)} has left" if has_left else ""

    def compare_steps(self, rank: int, step: int, n_steps: int) -> str:
        """Return, once, that *rank* counts steps differently from another rank, "" otherwise.

        *step* is the *n_steps*-th that it gives to `Checkpointer.step`; 0: it did not say.
        """
        if not n_steps or self._has_compared_steps:
            return ""
        self._steps[rank] = (n_steps, step)
        for other, (n_other, other_step) in self._steps.items():
            if (n_steps == n_other) != (step == other_step):
                self._has_compared_steps = True
                first, second = (
                    f"step {self._steps[each][0]} of rank {each} is "
                    f"Checkpointer.step({self._steps[each][1]})"
                    for each in sorted((rank, other))
                )
                return (
                    f"ranks count steps differently: {first}, {second}, so their states are mixed "
                    "or not saved; pass the same number on all ranks"
                )
        return ""

    def mark_restored(self, local_rank: int) -> None:
        """Record that a rank has finished loading; release fetched memory after the last one."""
        self.restored.add(local_rank)
        if len(self.restored) >= self.n_ranks:
            self.release_fetched()

    def shard_location(self, state: StateId, shard: Shard) -> ShardLocation:
        """Return the source of a shard of the state to load; raises KeeperError for others."""
        selected = None if self.result is None else self.result.selected
        if selected is None or selected.state != state or shard not in selected.sources:
            raise KeeperError(f"the shard of rank {shard.rank} of {state} is not being restored")
        return selected.sources[shard]

    def shard_digest(self, shard: Shard) -> Digest | None:
        """Return the digest of a shard in this node's memory, None for other shards."""
        selected = None if self.result is None else self.result.selected
        return None if selected is None else selected.digests.get(shard)

    def refusal(self) -> CheckpointError:
        """Return the error of a rank that asks which state to load."""
        if self.is_damaged:
            return CorruptError(self.error)
        return (RestoreUndecidedError if self.is_undecided else KeeperError)(self.error)

    def reject(
        self,
        rejected: tuple[StateId | None, bool],
        why: str,
        agreed: StateId | None,
        *,
        is_given_up: bool,
    ) -> bool:
        """Do not load a state, which is damaged, as it was offered; return whether to search anew.

        *rejected*: the state, and whether it was verified; None: the one that all nodes have
        *agreed* on, which this node cannot offer. Unless it *is_given_up* by all ranks or was
        verified, it is searched for again.
        """
        point = self.result.restore_point if self.result is not None else None
        offered = (point.state, point.is_verified) if point is not None else (None, True)
        if rejected != offered or (point is None and not self.is_damaged):
            return False  # another rank has reported it
        self.release_fetched()
        self.result = None
        self.error, self.is_damaged = "", False
        self.is_searched_again = True
        state = agreed if point is None else point.state
        if state is not None and (is_given_up or rejected[1]):
            self.rejected[state] = why
        return True

    def close(self) -> None:
        """Disconnect the ranks: newer ones take their place."""
        for member in list(self.connections.values()):
            member.close()
        self.is_replaced = True
        self.release_fetched()

    def release_fetched(self) -> None:
        """Release the memory that was made only for this restore."""
        if self.result is not None and self.result.selected is not None:
            for memory in self.result.selected.fetched:
                memory.close()


def restore_pin(local_rank: int) -> str:
    """Return the owner of a rank's pin on the restored state."""
    return f"restore-{local_rank}"


@dataclass(slots=True)
class AgentInstructions:
    """The agent's instructions for the current generation.

    ``state`` and ``epoch``: what all nodes resume from, once ``is_decided``; ``why``: why newer
    states were skipped; ``peers``: the copies on other nodes. ``is_taken_over``: the ranks run
    already, and save states of ``epoch``.
    """

    generation: int
    n_nodes: int = 1
    excluded_step: int | None = None
    state: StateId | None = None
    epoch: int = 0
    is_decided: bool = False
    is_taken_over: bool = False
    why: tuple[str, ...] = ()
    peers: PeerShards | None = None

    def check(self, rank_info: RankInfo) -> None:
        """Raise KeeperError where the rank is of another generation, or cannot be of this node."""
        if rank_info.generation != self.generation:
            what = "is over" if rank_info.generation < self.generation else "has not begun"
            raise KeeperError(
                f"generation {rank_info.generation} {what}: the agent runs {self.generation}"
            )
        if self.n_nodes == 1 and rank_info.shard.world != rank_info.n_ranks:
            raise KeeperError(
                f"{rank_info.n_ranks} of {rank_info.shard.world} ranks are on this node, but the "
                "agent reports no other node"
            )

    def close(self) -> None:
        """Stop fetching, and release what was fetched."""
        if self.peers is not None:
            self.peers.close()
