"""The keeper's state and decisions, without sockets; one thread calls it, jobs run in others."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from gpuops.checkpoint.agreement.progress import COMPLETE_MAX, KeeperProgress
from gpuops.checkpoint.agreement.write_once import WriteOnce
from gpuops.checkpoint.keeper.jobs import EventQueue, Jobs
from gpuops.checkpoint.keeper.messages import (
    CheckpointPolicy,
    Epoch,
    Generation,
    Name,
    RankInfo,
    Skipped,
    Step,
    World,
)
from gpuops.checkpoint.keeper.populator import SlotPopulator
from gpuops.checkpoint.keeper.rank_group import (
    AgentInstructions,
    ClientConnection,
    RankGroup,
    restore_pin,
)
from gpuops.checkpoint.keeper.replica_checker import ReplicaChecker
from gpuops.checkpoint.keeper.restore import RestoreFinder
from gpuops.checkpoint.keeper.slot_verifier import SlotVerifier
from gpuops.checkpoint.memory.buffer_table import ALREADY_SAVED, SkipReason, SlotLease
from gpuops.checkpoint.memory.node_memory import BufferPool, NodeMemory
from gpuops.checkpoint.peers.service import PeerService
from gpuops.checkpoint.storage.address import open_store as open_any_store
from gpuops.checkpoint.storage.persist import StateOrigin
from gpuops.checkpoint.storage.persist_task import OpenStore
from gpuops.checkpoint.storage.persister import Persister
from gpuops.checkpoint.types import (
    CheckpointError,
    KeeperError,
    Shard,
    ShardHolders,
    StateId,
)
from gpuops.wire.messages import plain


class KeeperCore:
    """The keeper of one node."""

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        open_store: OpenStore = open_any_store,
        events: EventQueue | None = None,
    ) -> None:
        self.memory = memory
        self.jobs = jobs
        self.clock_s = clock_s
        self.wall_s = wall_s
        self.events = EventQueue() if events is None else events  # an empty one is false
        self.agent: ClientConnection | None = None
        self.group: RankGroup | None = None
        self.instructions: AgentInstructions | None = None
        self.is_ending = False
        self.persister = Persister(
            memory, jobs, self.events, clock_s, open_store, lambda: self.is_ending, self._rank_pids
        )
        self.peers = PeerService(memory, jobs, self.events, clock_s, self._own_shards)
        self.replica_checker = ReplicaChecker(memory, jobs, self.events, clock_s, self.persister)
        self.restore_finder = RestoreFinder(
            memory, jobs, self.events, open_store, self._on_resumed, self.peers
        )
        self.verifier = SlotVerifier(
            memory, jobs, self.events, clock_s, self.replica_checker, self._on_verified
        )
        self._populator = SlotPopulator(memory, jobs, self.events, lambda: self.is_ending)

    @property
    def is_in_use(self) -> bool:
        """Return whether an agent or a rank is connected; thread-safe."""
        group = self.group
        return self.agent is not None or (group is not None and bool(group.connections))

    def begin_generation(
        self, generation: Generation, n_nodes: World, excluded_step: Step | None, job: Name
    ) -> None:
        """Refuse all requests of older generations from now on.

        Another *job* restarts the count of generations: its agent has replaced, on this node, the
        agent of another run of the same program.

        Raises:
            KeeperError: A newer generation of this job has begun.
        """
        is_same = job in ("", self.persister.origin.job)
        if is_same and self.instructions is not None and generation < self.instructions.generation:
            raise KeeperError(
                f"generation {generation} is over: {self.instructions.generation} has begun"
            )
        if self.instructions is not None:
            self.instructions.close()
        self.instructions = AgentInstructions(generation, n_nodes, excluded_step)
        self.peers.begin_generation()
        self.persister.origin = StateOrigin(job or self.persister.origin.job, generation)
        self._disconnect_ranks()
        self.memory.buffer_table.begin_epoch(0, is_alone=n_nodes == 1)

    def join(
        self,
        connection: ClientConnection,
        rank_info: RankInfo,
        *,
        may_wait: bool,
        is_reconnect: bool = False,
    ) -> bool:
        """Admit a rank; return False where it has to wait until older workers are gone.

        Not *may_wait*: the wait is over, and the older workers are disconnected. *is_reconnect*:
        its connection broke; it is not a new worker.

        Raises:
            KeeperError: It is of an older generation, or cannot be a rank of this node.
        """
        instructions, group = self.instructions, self.group
        if instructions is not None:
            instructions.check(rank_info)
        if group is None or not group.accepts(rank_info, connection, is_back=is_reconnect):
            if group is not None and rank_info.generation < group.generation:
                raise KeeperError(
                    f"generation {rank_info.generation} is over: {group.generation} has begun"
                )
            if group is not None and group.connections and may_wait:
                return False
            self._disconnect_ranks()
            group = self.group = RankGroup(
                rank_info.generation, rank_info.shard.world, rank_info.n_ranks
            )
            is_alone = rank_info.shard.world == rank_info.n_ranks
            if instructions is not None:
                is_alone = instructions.n_nodes == 1
            self.memory.buffer_table.begin_epoch(rank_info.n_ranks, is_alone=is_alone)
            self.persister.origin = StateOrigin(self.persister.origin.job, rank_info.generation)
            self.replica_checker.begin(self.persister.origin, has_agent=instructions is not None)
        group.join(rank_info, connection)
        return True

    def disconnected(self, connection: ClientConnection) -> None:
        if self.agent is connection:
            self.agent = None
        self.verifier.verify_stamped()
        group = self.group
        if group is None:
            return
        for local_rank, member in list(group.connections.items()):
            if member is connection:
                given_up = self.memory.buffer_table.n_given_up
                self.memory.buffer_table.remove_rank(local_rank)
                self.memory.buffer_table.unpin(restore_pin(local_rank))
                group.remove(local_rank, self.clock_s())
                if self.memory.buffer_table.n_given_up > given_up:
                    self.events.add("given_up", why=f"local rank {local_rank} disconnected")

    def _rank_pids(self) -> list[int]:
        return [each.pid for each in self.group.connections.values()] if self.group else []

    def _own_shards(self) -> set[Shard]:
        return {rank_info.shard for rank_info in self.group.ranks.values()} if self.group else set()

    def _disconnect_ranks(self) -> None:
        self.verifier.verify_stamped()
        group, self.group = self.group, None
        if group is None:
            return
        for local_rank in group.ranks:
            self.memory.buffer_table.unpin(restore_pin(local_rank))
        group.close()

    def set_policy(self, policy: CheckpointPolicy) -> None:
        self.persister.set_policy(policy)
        self.memory.buffer_table.every_s = policy.every_s

    def reserve(self, rank_info: RankInfo, layout: str, nbytes: int, n_slots: int) -> BufferPool:
        """Return the rank's slots, and begin to populate their memory."""
        requested = (rank_info.local_rank, rank_info.shard, layout, nbytes, n_slots)
        try:
            try:
                pool = self.memory.reserve(*requested)
            except CheckpointError:
                # The state fetched for the restore is one more copy; the next states come first.
                if not self.peers.release_adopted():
                    raise
                pool = self.memory.reserve(*requested)
        except CheckpointError as exc:
            self.events.add("refused", rank=rank_info.shard.rank, why=str(exc))
            raise
        self._populator.start()
        return pool

    def acquire(
        self, rank_info: RankInfo, step: int, *, n_steps: int = 0, is_last: bool = False
    ) -> SlotLease | Skipped:
        """Decide whether the rank copies its state now.

        *n_steps*: see `RankGroup.compare_steps`.
        """
        assert self.group is not None
        if why := self.group.compare_steps(rank_info.shard.rank, step, n_steps):
            self.replica_checker.notice = why
            self.events.add("steps_differ", why=why)
        table = self.memory.buffer_table
        self.done_reading(rank_info)
        if table.epoch is None:
            self.request_restore(self.group)
        if is_last and self.verifier.n_running and table.in_flight is None:
            # Its digest must not be mistaken for that of the same step, saved again.
            return Skipped("a state that was given up is still being verified")
        skipped, now_s = sum(table.skipped.values()), self.clock_s()
        table_s = now_s if table.is_single_node else self.wall_s()
        answer = table.acquire(rank_info.local_rank, step, table_s, is_last=is_last)
        if isinstance(answer, SlotLease):
            saved = table.find(answer.state)
            if saved is not None and saved.leased_s is None:
                saved.leased_s = now_s
            return answer
        if sum(table.skipped.values()) > skipped and answer.reason is not SkipReason.NOT_DUE:
            self.events.add("skipped", step=step, reason=answer.reason.value, why=answer.why)
        if self.group.copies_all_why and answer.reason is SkipReason.NOT_RESERVED:
            return Skipped(self.group.copies_all_why, copies_all=True)
        why_over = ""
        if is_last and answer is not ALREADY_SAVED:
            is_reserved = answer.reason is not SkipReason.NOT_RESERVED
            why_over = self.group.why_over(step, table.decided, now_s, is_reserved=is_reserved)
        if why_over:
            return Skipped(why_over, is_over=True)
        is_due = answer.reason is not SkipReason.NOT_DUE
        return Skipped(answer.why, is_due=is_due, awaits_nodes=answer.awaits_nodes)

    def mark_written(self, rank_info: RankInfo, state: StateId) -> None:
        """Have the image hashed."""
        written = self.memory.mark_written(rank_info.local_rank, state)
        if written is not None:
            self.verifier.verify(written)

    def _copy_all(self, state: StateId, why: str) -> None:
        """Give up *state*, whose shared tensors differ; each rank copies all of its own next."""
        table, group = self.memory.buffer_table, self.group
        if table.in_flight != state:
            return
        table.give_up(state)
        self.events.add("given_up", state=state, why=why)
        if group is None or table.epoch is None:
            return  # its ranks are gone, and new ones share anew
        group.copies_all_why = f"{why}: {state} is not kept, and each rank copies all its tensors"
        for local_rank in group.ranks:
            table.unregister(local_rank)

    def abandon(self, rank_info: RankInfo, state: StateId) -> None:
        self.memory.buffer_table.abandon(rank_info.local_rank, state)
        why = f"rank {rank_info.shard.rank} could not copy it"
        self.events.add("given_up", state=state, why=why)

    def _on_verified(self, state: StateId, why_void: str) -> None:
        if why_void:
            self._copy_all(state, why_void)
        elif self.memory.buffer_table.last_committed == state:
            self._on_committed(state)
        else:
            self.events.add("whole", state=state, bytes=self._size_bytes(state))
            self.peers.tick()

    def _on_committed(self, state: StateId) -> None:
        """Act on a commit: report it, free what it supersedes, persist it when that is due."""
        now_s, saved = self.clock_s(), self.memory.buffer_table.find(state)
        leased_s = None if saved is None else saved.leased_s
        seconds = 0.0 if leased_s is None else now_s - leased_s
        self.events.add("committed", state=state, seconds=seconds, bytes=self._size_bytes(state))
        self.peers.on_committed(state)
        self.memory.release()
        self.persister.persist_if_due()
        self.replica_checker.on_committed(state)

    def notice_for(self, rank_info: RankInfo) -> str | None:
        """Return the notice that the first rank logs; none where there is an agent."""
        if self.agent is not None or rank_info.local_rank != 0:
            return None
        return self.replica_checker.pop_notice() or self.persister.pop_warning()

    def _size_bytes(self, state: StateId) -> int:
        return sum(
            shard.copy.digest.nbytes for shard in self.memory.complete_shards(state).values()
        )

    def request_restore(self, group: RankGroup) -> None:
        """Start the search for the state to resume from."""
        group.is_requested = True
        self.tick()

    def restore_from(
        self,
        state: StateId | None,
        epoch: int,
        holders: Mapping[Shard, ShardHolders] | None = None,
        why: tuple[str, ...] = (),
        loading_world: int | None = None,
    ) -> None:
        """Resume from *state* (None: from scratch), as all nodes do; new states are of *epoch*.

        *holders*: its copies on other nodes; missing shards are fetched from now on, unless
        *loading_world* is another number of ranks than saved them. *why*: why newer states were
        skipped.

        Raises:
            KeeperError: No generation has begun, its ranks were given another state already, or
                there are holders and this keeper serves no peers.
        """
        given, group = self.instructions, self.group
        if given is not None and self._is_decided and (given.state, given.epoch) == (state, epoch):
            return
        instructions = self._undecided_instructions()
        self.peers.on_restore_decided(state, epoch)
        peers = None
        if state is not None and holders:
            allocate = self.restore_finder.allocate
            peers = self.peers.fetch_state(state, holders, allocate, loading_world)
        instructions.close()
        if group is not None:
            group.error, group.is_damaged = "", False
        instructions.state, instructions.epoch, instructions.is_decided = state, epoch, True
        instructions.why, instructions.peers = why, peers
        self.tick()

    def take_over(self, epoch: Epoch) -> None:
        """Let ranks that already run save states of *epoch*: the keeper before this one is gone.

        Raises:
            KeeperError: No generation has begun, or its ranks were given a state already.
        """
        instructions = self._undecided_instructions()
        self.peers.on_restore_decided(None, epoch)
        instructions.close()
        instructions.state, instructions.epoch = None, epoch
        instructions.is_decided = instructions.is_taken_over = True
        self.tick()

    @property
    def _is_decided(self) -> bool:
        group = self.group
        return group is not None and (group.is_searching or group.result is not None)

    def _undecided_instructions(self) -> AgentInstructions:
        if self.instructions is None:
            raise KeeperError("no generation has begun")
        if self._is_decided:
            raise KeeperError("the state to resume from was already decided for this generation")
        return self.instructions

    def commit(self, state: StateId, *, persist: bool, once: WriteOnce | None = None) -> bool:
        """Commit a state that all nodes have; return whether memory holds it and it was newer.

        Raises:
            KeeperError: It is to be persisted, which is not possible now.
        """
        is_new = self.memory.buffer_table.commit(state)
        if is_new:
            self._on_committed(state)
        if persist:
            self.persister.persist(state, once)
        return is_new

    def set_next_step(self, step: Step) -> None:
        """Grant nothing before *step*."""
        self.memory.buffer_table.not_before = step

    def give_up(self, state: StateId) -> None:
        """Give *state* up: it will not be complete on all nodes."""
        self.memory.buffer_table.give_up(state)
        self.peers.tick()

    def progress(self) -> KeeperProgress:
        table, persister, pusher = self.memory.buffer_table, self.persister, self.peers.pusher
        complete = tuple(self.memory.complete_states()[:COMPLETE_MAX])
        return KeeperProgress(
            whole=complete,
            replicated=tuple(state for state in complete if pusher.is_replicated(state)),
            refused=tuple(sorted(set(table.rejected) - set(complete), reverse=True)),
            newest=table.last_committed,
            persisted=persister.last_persisted,
            parts=tuple(persister.written_states),
            in_flight=table.in_flight,
            decided=table.decided,
            final_state=table.final,
            is_due=persister.is_due,
            group_digests=self.replica_checker.group_digests,
        )

    def _on_resumed(self, state: StateId | None) -> None:
        self.persister.rewind(state)
        self.peers.tick()

    def done_reading(self, rank_info: RankInfo) -> None:
        """Release the rank's pin on the restored state."""
        self.memory.buffer_table.unpin(restore_pin(rank_info.local_rank))
        if self.group is not None and self.group.result is not None:
            self.group.mark_restored(rank_info.local_rank)

    def on_restored(
        self, rank_info: RankInfo, state: StateId, *, tier: str, seconds: float, nbytes: int
    ) -> None:
        self.done_reading(rank_info)
        self.events.add(
            "restored",
            state=state,
            tier=tier,
            rank=rank_info.shard.rank,
            world=rank_info.shard.world,
            seconds=seconds,
            bytes=nbytes,
        )

    def counts(self) -> dict[str, Any]:
        found = {
            **self.memory.counts(),
            **self.peers.counts(),
            **self.replica_checker.counts(),
            **self.persister.stats(),
            "hash_s": self.verifier.hash_s,
            "ranks": len(self.group.connections) if self.group else 0,
            "generation": self.group.generation if self.group else None,
            "agent": self.agent.pid if self.agent else None,
        }
        return {name: plain(value) for name, value in found.items()}

    def tick(self) -> None:
        self.verifier.verify_stamped()
        if self.group is not None:
            policy = self.persister.policy
            self.restore_finder.search_if_ready(
                self.group, self.instructions, policy.directory if policy else None
            )
        self.persister.tick()
        self.peers.tick()
