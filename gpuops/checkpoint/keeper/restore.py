"""Find the state that the ranks of a generation load, and read parts of it for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gpuops.checkpoint.agreement.local_recovery import (
    CopyProblem,
    StateSearchCriteria,
    StateSearchResult,
    find_restorable,
)
from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.messages import WHY_MAX
from gpuops.checkpoint.keeper.rank_group import (
    AgentInstructions,
    GroupRestore,
    PartsRead,
    RankGroup,
    WantedParts,
    restore_pin,
)
from gpuops.checkpoint.memory.node_memory import MemoryShard, NodeMemory
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import PartialImage
from gpuops.checkpoint.peers.fetch import PeerShards
from gpuops.checkpoint.peers.service import BorrowedReplicas, PeerService
from gpuops.checkpoint.storage.persist_task import OpenStore
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    CheckpointError,
    CorruptError,
    KeeperError,
    RestorePoint,
    RestoreUndecidedError,
    Shard,
    StateId,
)


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
    _doubted: set[StateId] = field(default_factory=set)
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
        criteria = replace(criteria, doubted=frozenset(self._doubted))
        group.is_searching = True
        self._n_searches += 1
        pin = f"look-{self._n_searches}"
        by_state: dict[StateId, Mapping[Shard, MemoryShard]] = {}
        borrowed, peers = BorrowedReplicas(), None
        if criteria.before is None:  # else only what all nodes see
            for state in self.memory.complete_states():
                by_state[state] = self.memory.complete_shards(state)
            borrowed, peers = self._from_peers(instructions)
        for state in by_state:
            table.pin(state, pin)

        def find() -> StateSearchResult:
            needed = criteria.shards
            borrowed.compose(
                lambda state: not needed or not needed <= by_state.get(state, {}).keys(),
                self.allocate,
            )
            for state, replicas in borrowed.shards.items():
                own = by_state.get(state, {})
                # A state of the same name but of another world is not mixed with ours.
                worlds = {shard.world for shard in own}
                by_state[state] = {
                    **{s: it for s, it in replicas.items() if not worlds or s.world in worlds},
                    **own,
                }
            store = self.open_store(directory) if directory else None
            return find_restorable(
                by_state,
                store,
                criteria,
                map_function=self.jobs.map,
                allocate=self.allocate,
                check_fits=self.memory.check_fits,
                peers=peers,
            )

        result, error = None, None
        try:
            result = await JobResult(self.jobs, JobKind.SEARCH, find)
        except Exception as exc:  # noqa: BLE001 boundary: the ranks receive it as an error
            error = exc
        table.unpin(pin)
        group.is_searching = False
        if result is not None and result.selected is None and not result.why:
            elsewhere = f"nor in {directory}" if directory else "and no directory is set"
            result.add_reason(f"no state is in memory, {elsewhere}")
        if result is not None and result.selected is not None:
            selected = result.selected
            result.selected = replace(selected, fetched=(*selected.fetched, borrowed))
        else:
            borrowed.close()
        if group.is_replaced:
            _release(result)
        else:
            self._on_searched(group, instructions, result, error)

    def read_parts(self, group: RankGroup, wanted: WantedParts) -> PartsRead:
        """Start to read parts of an image; the result says when they are there.

        Raises:
            KeeperError: The image is not being restored, or is complete.
        """
        state, shard, ranges = wanted
        image = group.shard_location(state, shard)
        if not isinstance(image, PartialImage):
            raise KeeperError(f"the shard of rank {shard.rank} of {state} is complete")
        assert group.result is not None
        assert group.result.selected is not None
        read, tier = PartsRead(wanted), group.result.selected.tier

        async def run() -> None:
            try:
                await JobResult(self.jobs, JobKind.FETCH, lambda: image.ensure(ranges))
            except CheckpointError as exc:
                read.error = exc
                is_corrupt = isinstance(exc, CorruptError)
                self._report_problem(CopyProblem(state, shard, tier, str(exc), is_corrupt))
            except Exception as exc:  # noqa: BLE001 boundary: the rank receives it as an error
                read.error = KeeperError(f"{image.name} cannot be read: {exc!r}")
            read.is_done = True

        run_task(run())
        return read

    def reject(
        self,
        group: RankGroup,
        instructions: AgentInstructions | None,
        rejected: tuple[StateId | None, bool],
        why: str,
        *,
        is_given_up: bool,
    ) -> None:
        """Search anew, a state is damaged; see `RankGroup.reject`. May be repeated.

        From now on all of its bytes are verified before it is offered.
        """
        if rejected[0] is not None:
            self._doubted.add(rejected[0])
        agreed = instructions.state if instructions is not None else None
        if group.reject(rejected, why, agreed, is_given_up=is_given_up):
            for local_rank in range(group.n_ranks):
                self.memory.buffer_table.unpin(restore_pin(local_rank))

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
                group.error, group.is_damaged = str(exc), isinstance(exc, CorruptError)
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
                is_first = instructions.state not in group.rejected
                error = CorruptError if result.is_damaged and is_first else KeeperError
                raise error(f"{instructions.state} cannot be served here: {reasons}{advice}")
            if instructions.epoch < epoch and not group.is_searched_again:
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
            point = RestorePoint(
                selected.state,
                selected.world,
                selected.tier,
                epoch,
                why,
                selected.is_verified,
                selected.stored_by,
            )
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
            why="; ".join(why),
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
            f". {saved_by} rank{'s' * (saved_by != 1)} saved it and {world} load it, so each of "
            "its shards has to be in the memory of some node or in the directory; a job that is "
            "started anew resumes from the newest in the directory"
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
            self._report_problem(problem)

    def _report_problem(self, problem: CopyProblem) -> None:
        self.events.add(
            "corrupt" if problem.is_corrupt else "unreadable",
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
            excluded_step=instructions.excluded_step if instructions else None,
            loading_world=group.world,
            rejected=dict(group.rejected),
        )
    if instructions.state is None:
        return StateSearchCriteria(is_none=True)
    is_complete = len(group.ranks) == group.n_ranks
    own_shards = frozenset(post.shard for post in group.ranks.values())
    if instructions.state in group.rejected:
        # No plan has the next older one. The directory is the same for all nodes.
        return StateSearchCriteria(
            before=instructions.state,
            excluded_step=instructions.excluded_step,
            shards=own_shards if is_complete else None,
            loading_world=group.world,
            rejected=dict(group.rejected),
        )
    return StateSearchCriteria(
        only=instructions.state,
        shards=own_shards if is_complete else None,
        loading_world=group.world,
    )


def _release(result: StateSearchResult | None) -> None:
    for memory in result.selected.fetched if result and result.selected else ():
        memory.close()
