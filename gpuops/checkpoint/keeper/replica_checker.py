"""Digest the tensors that must be equal on several ranks, and compare them on this node.

What the ranks of a node share (`gpuops.checkpoint.sharing`) is compared at each save, before its
state is complete: of each tensor there is one copy, and the digests that the other ranks wrote.
Where several nodes persist, so is what each rank copies for itself: they write once what is equal.

Elsewhere the digests of the latter are computed after the commit, by one thread of the lowest
priority that reads the slots in place. Nothing waits for it: a slot that is reused meanwhile
invalidates the digests. Only a sample of the committed states is checked
(`gpuops.checkpoint.keeper.state_sampler`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gpuops.checkpoint.agreement.replica_check import (
    NAMED_MAX,
    REPORTS_MAX,
    ComparisonHistory,
    GroupDigest,
    ReplicaDifference,
    ReplicaOutcome,
    ReplicaReport,
    adjust_for_breadth,
    compare_ranks,
    format_ranks,
    format_tensors,
)
from gpuops.checkpoint.agreement.replicated import format_spans
from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.replica_digests import (
    DigestResult,
    GroupComparison,
    ShardDigests,
    ShardView,
    TensorGroup,
    compare_shards,
    digest_shard,
    must_equal_others,
    shared_groups,
)
from gpuops.checkpoint.keeper.state_sampler import StateSampler
from gpuops.checkpoint.memory.node_memory import MemoryShard, NodeMemory, WrittenSlot
from gpuops.checkpoint.memory.state_record import StateRecord
from gpuops.checkpoint.storage.persist import StateOrigin
from gpuops.checkpoint.storage.persister import Persister
from gpuops.checkpoint.types import Shard, StateId

_MISSED_IN_ROW_MAX = 4
_LAYOUTS_MAX = 64
_TENSORS_ALL_MIN = 2  # one tensor that differs is no sign that ranks count steps differently
_PIN_OWNER = "vote"


@dataclass(slots=True)
class _GroupHistory:
    """The history of a set of ranks that are all on this node.

    ``unequal``: tensors that differed in their first comparison, or that the program does not
    replicate: only tensors that were equal once are checked. ``n_reported``: how often they
    differed; ``is_open``: a reported difference that has not ended.
    """

    history: ComparisonHistory = field(default_factory=ComparisonHistory)
    unequal: set[int] = field(default_factory=set)
    n_reported: int = 0
    is_open: bool = False


class ReplicaChecker:
    """Compares the ranks of one node, and prepares comparisons between nodes."""

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        events: EventQueue,
        clock_s: Callable[[], float],
        persister: Persister,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._group_digests: dict[bool, list[GroupDigest]] = {}  # by whether they are shared
        self.notice: str | None = None
        self._memory = memory
        self._jobs = jobs
        self._events = events
        self._clock_s = clock_s
        self._persister = persister
        self._cpu_s = cpu_s
        self._sampler = StateSampler()
        self._groups: dict[str, tuple[TensorGroup, ...]] = {}
        self._saved: StateRecord | None = None  # the state that ``_digests`` are of
        self._digests: dict[Shard, ShardDigests] = {}
        self._histories: dict[str, _GroupHistory] = {}
        self._n_compared = self._n_missed = self._n_missed_in_row = 0
        self._took_s = 0.0
        self._is_busy = False
        self._local_ranks: frozenset[int] = frozenset()
        self._origin = StateOrigin("", -1)

    @property
    def group_digests(self) -> tuple[GroupDigest, ...]:
        """Return the newest digests of ranks of which some are on other nodes."""
        return (*self._group_digests.get(True, ()), *self._group_digests.get(False, ()))

    @property
    def _compares_all(self) -> bool:
        """Return whether other nodes persist the same states: then all is compared at each save."""
        policy, is_alone = self._persister.policy, self._memory.buffer_table.is_single_node
        return not is_alone and policy is not None and policy.directory is not None

    async def vote(self, written: WrittenSlot) -> str:
        """Digest what is in a slot; return "", or after the last one of a state why it is void.

        Where the state was given up meanwhile, nothing was compared.

        Raises:
            CorruptError: The header of the image is invalid.
        """
        state = written.state
        record = self._memory.buffer_table.find(state)
        done = await self._digest(written)
        if record is None or self._memory.buffer_table.find(state) is not record:
            return ""  # the slot may have been written since
        if self._saved is not record:
            self._saved, self._digests = record, {}
        self._digests[written.shard] = done
        shards = list(self._digests.values())
        is_last = self._memory.is_last_to_verify(written)
        if not is_last or not any(each.digests for each in shards):
            return ""
        compared = await JobResult(self._jobs, JobKind.HASH, partial(compare_shards, shards))
        if self._memory.buffer_table.find(state) is not record:
            return ""
        self._local_ranks = frozenset(each.shard.rank for each in shards)
        self._record(state, compared)
        return compared.disagreement or _why_void(compared.comparisons)

    async def _digest(self, written: WrittenSlot) -> ShardDigests:
        view, is_all = self._view(written.shard, written.layout, written.view), self._compares_all
        if not must_equal_others(view, is_all=is_all):
            return ShardDigests(view.shard, view.layout, view.groups or (), {}, 0.0)
        work = partial(digest_shard, view, _is_any if is_all else _is_shared, self._cpu_s)
        done = await JobResult(self._jobs, JobKind.HASH, work)
        self._remember({done.layout: done.groups})
        return done

    def on_committed(self, state: StateId) -> None:
        """Have *state* compared, if it is in the sample and there is anything to compare."""
        if self._compares_all:
            return
        shards = self._memory.complete_shards(state)
        groups = [self._groups.get(item.copy.layout) for item in shards.values()]
        if not any(known is None or len(shared_groups(known)) < len(known) for known in groups):
            return
        if not self._sampler.is_sampled(state, self._clock_s()) or self._is_busy:
            return
        if self._n_missed_in_row >= _MISSED_IN_ROW_MAX:
            self._memory.buffer_table.pin(state, _PIN_OWNER)
        self._is_busy = True
        self._local_ranks = frozenset(shard.rank for shard in shards)
        run_task(self._check(state, shards))

    async def _check(self, state: StateId, shards: Mapping[Shard, MemoryShard]) -> None:
        views = [self._view(s, it.copy.layout, it.memory.view) for s, it in shards.items()]
        done, why = None, ""
        try:
            work = partial(_compare_unshared, views, self._cpu_s)
            done = await JobResult(self._jobs, JobKind.CHECK_REPLICAS, work)
        except Exception as exc:  # noqa: BLE001 boundary: saving must not depend on it
            why = str(exc)
        self._is_busy = False
        if not self._is_unchanged(state, shards):
            self._n_missed += 1
            self._n_missed_in_row += 1
        elif done is None:
            self._groups |= {view.layout: () for view in views}  # once is enough
            self._events.add("vote_failed", state=state, why=why)
        else:
            self._n_missed_in_row = 0
            self._remember(done.layouts)
            self._sampler.record_cost(done.took_s)
            self._record(state, done)
        self._memory.buffer_table.unpin(_PIN_OWNER)

    def begin(self, origin: StateOrigin, *, has_agent: bool) -> None:
        """Start anew with new workers; in another run differences are reported again.

        Without an agent generations are not counted: an equal one is a restart of the job.
        """
        before, self._origin = self._origin, origin
        is_same = before.job == origin.job if has_agent else before.generation != origin.generation
        if not is_same:
            for group_history in self._histories.values():
                group_history.history.first_different = None
                group_history.is_open, group_history.n_reported = False, 0

    def on_report(self, report: ReplicaReport) -> None:
        """Record that ranks of several nodes differ, or are equal again, as the leader reports it.

        Where they have moved since they were equal, no node is to blame.
        """
        found = report.difference
        if found.verdict.outcome is ReplicaOutcome.ALIKE:
            self._report_equal(found.state, found.ranks)
            return
        groups = (group for item in self._groups.values() for group in item)
        names = next((group.names for group in groups if group.key == report.key), ())
        number = report.number
        named = (names[number],) if number is not None and number < len(names) else ()
        if found.verdict.outcome is ReplicaOutcome.APART:
            self._report_independent(found.state, found.ranks, named)
        else:
            n_tensors = len(named) if number is None else 1
            is_current = (
                found.last_equal is not None and found.last_equal.epoch == found.state.epoch
            )
            found = replace(found, tensors=named, n_tensors=n_tensors)
            self._report_different(found, report.nodes, is_current=is_current)

    def counts(self) -> dict[str, object]:
        """Return the number of comparisons and their cost."""
        return {
            "votes": self._n_compared,
            "votes_missed": self._n_missed,
            "vote_s": self._took_s,
            "notice": self.notice,
        }

    def pop_notice(self) -> str | None:
        """Remove and return the notice for the training's log."""
        notice, self.notice = self.notice, None
        return notice

    def _view(self, shard: Shard, layout: str, view: memoryview) -> ShardView:
        return ShardView(shard, layout, view, self._groups.get(layout))

    def _is_unchanged(self, state: StateId, shards: Mapping[Shard, MemoryShard]) -> bool:
        """Return whether the slots cannot have been written since *shards* was read."""
        now = self._memory.complete_shards(state)
        return bool(shards) and {s: h.slot for s, h in now.items()} == {
            s: h.slot for s, h in shards.items()
        }

    def _remember(self, layouts: Mapping[str, tuple[TensorGroup, ...]]) -> None:
        self._groups |= layouts
        while len(self._groups) > _LAYOUTS_MAX:
            del self._groups[next(iter(self._groups))]

    def _record(self, state: StateId, counted: DigestResult) -> None:
        if not counted.comparisons:
            return
        self._n_compared += 1
        self._took_s = counted.took_s
        found: dict[bool, list[GroupDigest]] = {}
        for item in counted.comparisons:
            group_digests = found.setdefault(_is_shared(item.group), [])
            if not item.rank_digests:
                self._compare(state, item.group, item.differ)
                continue
            group_digests.append(
                GroupDigest(
                    state=state,
                    key=item.group.key,
                    n_ranks=len(item.group.ranks),
                    n_tensors=len(item.group.names),
                    rank_digests=item.rank_digests,
                )
            )
        self._group_digests |= found

    def _compare(
        self,
        state: StateId,
        group: TensorGroup,
        digests_by_tensor: Mapping[int, Mapping[int, bytes]],
    ) -> None:
        group_history = self._histories.setdefault(group.key, _GroupHistory())
        different = [number for number in digests_by_tensor if number not in group_history.unequal]
        history = group_history.history
        if history.last_equal is None and different:
            group_history.unequal.update(different)
            names = [group.names[i] for i in different]
            is_all = len(different) == len(group.names) >= _TENSORS_ALL_MIN
            self._report_independent(state, group.ranks, names, is_all=is_all)
            if len(group_history.unequal) < len(group.names):
                history.record(state, is_different=False)
            return
        alike = history.last_equal
        if not history.record(state, is_different=bool(different)):
            if group_history.is_open and history.first_different is None:
                group_history.is_open = False
                self._report_equal(state, group.ranks)
            return
        verdict = compare_ranks(
            {rank: tuple(digests_by_tensor[i][rank] for i in different) for rank in group.ranks}
        )
        verdict = adjust_for_breadth(verdict, len(different), len(group.names))
        names = [group.names[i] for i in different]
        if verdict.outcome is ReplicaOutcome.APART:
            group_history.unequal.update(different)
            group_history.history = ComparisonHistory(last_equal=alike)
            self._report_independent(state, group.ranks, names)
            return
        group_history.n_reported += 1
        if group_history.n_reported > REPORTS_MAX:
            return
        group_history.is_open = True
        self._report_different(
            ReplicaDifference(
                state=state,
                ranks=group.ranks,
                verdict=verdict,
                tensors=tuple(names[:NAMED_MAX]),
                n_tensors=len(names),
                last_equal=alike,
            )
        )

    def _report_different(
        self, found: ReplicaDifference, nodes: Sequence[str] = (), *, is_current: bool = True
    ) -> None:
        suspects = found.verdict.suspects
        self.notice = f"replicas of the training state differ: {found.summary}"
        self._events.add(
            "replicas_differ",
            state=found.state,
            ranks=format_spans(found.ranks),
            suspects=list(suspects) if len(suspects) <= NAMED_MAX else [],
            is_here=is_current and self._local_ranks >= set(suspects),
            nodes=list(nodes),
            outcome=found.verdict.outcome.value,
            tensors=list(found.tensors),
            n_tensors=found.n_tensors,
            alike=found.last_equal,
            why=found.summary,
        )

    def _report_independent(
        self, state: StateId, ranks: Sequence[int], names: Sequence[str], *, is_all: bool = False
    ) -> None:
        if is_all:
            why = (
                f"{format_ranks(ranks)} have different values in all {len(names)} tensors that "
                f"they should hold alike, at step {state.step}, where they are first compared: do "
                "all ranks call Checkpointer.step() with the same number after the same optimizer "
                "step? If not, this state mixes steps. They are no longer compared"
            )
        else:
            what = format_tensors(names, len(names))
            why = (
                f"{format_ranks(ranks)} have different values in {what} at step {state.step} in "
                "every comparison: the program does not replicate them, and they are no longer "
                "compared. The usual reason is a parameter that forward writes, from each rank's "
                "own data, as nn.Embedding(max_norm=...) does"
            )
        self.notice = why
        self._events.add("replicas_apart", state=state, why=why)

    def _report_equal(self, state: StateId, ranks: Sequence[int]) -> None:
        why = f"{format_ranks(ranks)} are equal again at step {state.step}"
        self._events.add("replicas_alike", state=state, ranks=format_spans(ranks), why=why)


def _why_void(comparisons: Sequence[GroupComparison]) -> str:
    """Return which tensors differ of which there is one copy on the node, "" where none do."""
    shared = [item for item in comparisons if _is_shared(item.group)]
    differing = [item.group.names[number] for item in shared for number in item.differ]
    if not differing:
        return ""
    here = {rank for it in shared for by_rank in it.differ.values() for rank in by_rank}
    what = format_tensors(differing, len(differing))
    return f"{format_ranks(here)} differ in {what}, which they should hold alike"


def _is_shared(group: TensorGroup) -> bool:
    return bool(group.owners)


def _is_any(_group: TensorGroup) -> bool:
    return True


def _compare_unshared(views: Sequence[ShardView], cpu_s: Callable[[], float]) -> DigestResult:
    return compare_shards([digest_shard(it, lambda g: not g.owners, cpu_s) for it in views])
