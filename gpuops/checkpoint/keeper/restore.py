"""The ranks of one generation, and which state they load."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpuops.checkpoint.agreement.local_recovery import (
    SelectedState,
    ShardLocation,
    StateSearchCriteria,
    StateSearchResult,
    find_restorable,
)
from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.messages import WHY_MAX, RankInfo
from gpuops.checkpoint.memory.node_memory import NodeMemory
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.peers.fetch import PeerShards
from gpuops.checkpoint.peers.service import BorrowedReplicas, PeerService
from gpuops.checkpoint.storage.persister import OpenStore
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    CheckpointError,
    KeeperError,
    RestorePoint,
    RestoreUndecidedError,
    Shard,
    StateId,
)

# How long new workers wait for the older ones to disconnect.
FENCE_S = 5.0


class ClientConnection(Protocol):
    """The other end of a connection. ``pid`` 0: in another pid namespace."""

    @property
    def pid(self) -> int: ...

    def close(self) -> None:
        """End the connection; messages that still arrive are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class GroupRestore:
    """The state that was decided for all ranks to load."""

    restore_point: RestorePoint | None
    selected: SelectedState | None


@dataclass(slots=True)
class RankGroup:
    """The ranks of one generation.

    ``is_requested``: a rank waits for the state to resume from. ``error``: why there will be none.
    ``is_handed_over``: the agent has left the keeper to them. ``is_replaced``: newer ranks have
    taken their place. ``copies_all_why``: why they share nothing, "" where they do.
    """

    generation: int
    world: int
    n_ranks: int
    connections: dict[int, ClientConnection] = field(default_factory=dict)
    ranks: dict[int, RankInfo] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    restored: set[int] = field(default_factory=set)
    _pids: dict[int, int] = field(default_factory=dict)
    is_requested: bool = False
    is_searching: bool = False
    result: GroupRestore | None = None
    error: str = ""
    is_undecided: bool = False
    is_handed_over: bool = False
    is_replaced: bool = False
    copies_all_why: str = ""

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

    def remove(self, local_rank: int) -> None:
        """Remove a rank; a new process in its place belongs to another group."""
        self.connections.pop(local_rank, None)
        self.gone.add(local_rank)
        self.mark_restored(local_rank)

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


@dataclass(slots=True)
class RestoreFinder:
    """Searches *memory* and a directory for the state; *on_found* is called with the result."""

    memory: NodeMemory
    jobs: Jobs
    events: EventQueue
    open_store: OpenStore
    on_found: Callable[[StateId | None], None]
    peers: PeerService
    epoch_max: int = -1
    _n_searches: int = 0

    def search_if_ready(
        self, group: RankGroup, instructions: AgentInstructions | None, directory: str | None
    ) -> None:
        """Start the search where a rank waits for it and the inputs are known."""
        table = self.memory.buffer_table
        if not group.is_requested or group.is_searching or group.error or group.result is not None:
            return
        if instructions is not None and instructions.is_taken_over:
            self._take_over(group, instructions.epoch)
            return
        if table.is_verifying or not _is_decidable(group, instructions):
            return
        run_task(self._search(group, instructions, directory))

    async def _search(
        self, group: RankGroup, instructions: AgentInstructions | None, directory: str | None
    ) -> None:
        table, criteria = self.memory.buffer_table, _search_criteria(group, instructions)
        group.is_searching = True
        self._n_searches += 1
        pin = f"look-{self._n_searches}"
        by_state = {
            state: self.memory.complete_shards(state) for state in self.memory.complete_states()
        }
        for state in by_state:
            table.pin(state, pin)
        borrowed, peers = self._from_peers(instructions)
        for state, replicas in borrowed.shards.items():
            own = by_state.get(state, {})
            # A state of the same name but of another world is not mixed with ours.
            worlds = {shard.world for shard in own}
            fitting = {s: found for s, found in replicas.items() if not worlds or s.world in worlds}
            by_state[state] = {**fitting, **own}

        def find() -> StateSearchResult:
            store = self.open_store(directory) if directory else None
            return find_restorable(
                by_state,
                store,
                criteria,
                map_function=self.jobs.map,
                allocate=self.allocate,
                peers=peers,
            )

        result, error = None, None
        try:
            result = await JobResult(self.jobs, JobKind.SEARCH, find)
        except Exception as exc:  # noqa: BLE001 boundary: the ranks receive it as an error
            error = exc
        table.unpin(pin)
        group.is_searching = False
        if result is not None and result.selected is not None:
            selected = result.selected
            result.selected = replace(selected, fetched=(*selected.fetched, borrowed))
        else:
            borrowed.close()
        if group.is_replaced:
            _release(result)
        else:
            self._on_searched(group, instructions, result, error)

    def _take_over(self, group: RankGroup, epoch: int) -> None:
        """Let the ranks save: a keeper that is gone decided the state that they resumed from."""
        table = self.memory.buffer_table
        if table.is_single_node:
            # They may have connected before their agent did, and have saved in a newer epoch.
            epoch = max(epoch, self.epoch_max)
        self.epoch_max = max(self.epoch_max, epoch)
        table.resume(table.last_committed, epoch)
        group.result = GroupRestore(None, None)
        self.events.add("took_over", epoch=epoch)
        self.on_found(table.last_committed)

    def _from_peers(
        self, instructions: AgentInstructions | None
    ) -> tuple[BorrowedReplicas, PeerShards | None]:
        """Return the local replicas, and the copies of the chosen state on other nodes."""
        if instructions is None or not instructions.is_decided:
            return self.peers.borrow(None), None
        if instructions.state is None:
            return BorrowedReplicas(), None
        if instructions.peers is not None and instructions.peers.is_closed:
            instructions.peers = instructions.peers.renewed()  # other ranks have connected since
        return self.peers.borrow(instructions.state), instructions.peers

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Return memory for a fetched shard; raises CheckpointError where it does not fit."""
        self.memory.check_fits(nbytes)
        return SharedBuffer.create("gpuops-fetched", nbytes)

    def _on_searched(
        self,
        group: RankGroup,
        instructions: AgentInstructions | None,
        result: StateSearchResult | None,
        error: BaseException | None,
    ) -> None:
        if result is None:
            # Where all nodes have agreed on a state, no node may start from scratch without it.
            is_chosen = instructions is not None and instructions.is_decided
            group.is_undecided = isinstance(error, RestoreUndecidedError) and not is_chosen
            is_ours = isinstance(error, CheckpointError)
            group.error = str(error) if is_ours else f"the search for a state failed: {error!r}"
        else:
            self._report_problems(result)
            try:
                self._resume_from(group, instructions, result)
            except CheckpointError as exc:
                group.error = str(exc)
                _release(result)
        if group.error:
            self.events.add("cannot_offer", why=group.error)

    def _resume_from(
        self, group: RankGroup, instructions: AgentInstructions | None, result: StateSearchResult
    ) -> None:
        table, selected = self.memory.buffer_table, result.selected
        last_epoch = -1 if table.last_committed is None else table.last_committed.epoch
        epoch = 1 + max(self.epoch_max, result.epoch_max, last_epoch)
        if instructions is not None and instructions.is_decided:
            if instructions.state is not None and selected is None:
                reasons = "; ".join(result.why[:4])
                advice = self._missing_shards_advice(instructions, instructions.state, group.world)
                raise KeeperError(f"{instructions.state} cannot be served here: {reasons}{advice}")
            if instructions.epoch < epoch:
                self._check_is_new(instructions.epoch, epoch - 1)
            epoch = instructions.epoch
        if epoch > EPOCH_MAX:
            raise KeeperError(f"this job was started {EPOCH_MAX} times: give it a new directory")
        self.epoch_max = epoch
        state = selected.state if selected else None
        table.resume(state, epoch)
        point = None
        why = (*(instructions.why if instructions else ()), *result.why)[:WHY_MAX]
        if selected is not None:
            point = RestorePoint(selected.state, selected.world, selected.tier, epoch, why)
            for local_rank in set(range(group.n_ranks)) - group.gone:
                if selected.state in table.complete_states():
                    table.pin(selected.state, restore_pin(local_rank))
            for fetched in selected.fetched:
                if isinstance(fetched, PeerShards):
                    self.peers.adopt(fetched)
        group.result = GroupRestore(point, selected)
        self.events.add(
            "offered" if point else "fresh_start",
            state=point.state if point else None,
            tier=point.tier.value if point else None,
            epoch=epoch,
            why=list(why),
        )
        self.on_found(state)

    def _missing_shards_advice(
        self, instructions: AgentInstructions, state: StateId, world: int
    ) -> str:
        """Return advice where *state* was saved by another number of ranks, else ""."""
        saved = next(iter(self.memory.complete_shards(state)), None)
        saved_by = (
            saved.world if saved else instructions.peers.world if instructions.peers else None
        )
        if saved_by in (None, world):
            return ""
        return (
            f". {saved_by} ranks saved it and {world} load it, so each node needs all its shards "
            "in memory or in the directory; a job that is started anew resumes from the newest in "
            "the directory"
        )

    def _check_is_new(self, epoch: int, seen: int) -> None:
        """Report *seen*, a later epoch than the one that all nodes agreed on.

        An epoch that is only in the directory is of another run that saves there, too. That must
        not stop these ranks from loading their state.

        Raises:
            KeeperError: It is of this run.
        """
        here = max([self.epoch_max, *(state.epoch for state in self.memory.complete_states())])
        if epoch <= here:
            raise KeeperError(f"epoch {epoch} is not new: {seen} was seen here")
        why = (
            f"the directory has states of epoch {seen}, which counts as newer than what this run "
            f"saves (epoch {epoch}); does another run save there?"
        )
        self.events.add("epoch_behind", why=why)

    def _report_problems(self, result: StateSearchResult) -> None:
        for problem in result.problems:
            self.events.add(
                "corrupt",
                state=problem.state,
                rank=problem.shard.rank,
                tier=problem.tier.value,
                why=problem.why,
            )


def _is_decidable(group: RankGroup, instructions: AgentInstructions | None) -> bool:
    """Return whether it is known which state is searched for, and which shards of it."""
    if instructions is None or instructions.n_nodes == 1:
        return True
    # The set of shards that this node needs is complete with its last rank.
    return instructions.is_decided and len(group.ranks) == group.n_ranks


def _search_criteria(
    group: RankGroup, instructions: AgentInstructions | None
) -> StateSearchCriteria:
    if instructions is None or not instructions.is_decided:
        return StateSearchCriteria(
            excluded_step=instructions.excluded_step if instructions else None
        )
    if instructions.state is None:
        return StateSearchCriteria(is_none=True)
    is_complete = len(group.ranks) == group.n_ranks
    own_shards = frozenset(post.shard for post in group.ranks.values())
    return StateSearchCriteria(only=instructions.state, shards=own_shards if is_complete else None)


def _release(result: StateSearchResult | None) -> None:
    for memory in result.selected.fetched if result and result.selected else ():
        memory.close()
