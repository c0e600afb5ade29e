"""Digest the tensors that must be equal on several ranks, and compare them on this node.

What the ranks of a node share (`gpuops.checkpoint.sharing`) is compared at each save, before its
state is complete: of each tensor there is one copy, and the digests that the other ranks wrote.

Of what each rank copies for itself, the digests are computed after the commit, by one thread of the
lowest priority that reads the slots in place. Nothing waits for it: a slot that is reused meanwhile
invalidates the digests. Only a sample of the committed states is checked, so that the thread takes
`CORE_SHARE` of a core; the sample is a function of the step, so that all nodes choose the same
states.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

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
    ShardView,
    TensorGroup,
    digest_shards,
    shared_groups,
    shares,
)
from gpuops.checkpoint.memory.node_memory import MemoryShard, NodeMemory, WrittenSlot
from gpuops.checkpoint.storage.persist import StateOrigin
from gpuops.checkpoint.types import Shard, StateId

CORE_SHARE = 0.01
_HALVINGS_MAX = 20
_SMOOTH = 0.25
_MISSED_IN_ROW_MAX = 4
_LAYOUTS_MAX = 64
_PIN_OWNER = "vote"


class StateSampler:
    """Samples committed states so that comparing them takes *share* of a core.

    One of every 2^j states is chosen, by its number alone: a node with a larger j chooses a subset
    of the states that the others choose.
    """

    def __init__(self, share: float = CORE_SHARE) -> None:
        self._share = share
        self._every_s: float | None = None
        self._last_s: float | None = None
        self._took_s = 0.0

    @property
    def n_halvings(self) -> int:
        if not self._took_s or not self._every_s:
            return 0
        ratio = self._took_s / (self._share * self._every_s)
        return min(max(0, math.ceil(math.log2(ratio))), _HALVINGS_MAX)

    def is_sampled(self, state: StateId, now_s: float) -> bool:
        """Record that *state* was committed; return whether it is to be checked."""
        if self._last_s is not None:
            self._every_s = _smooth(self._every_s, max(now_s - self._last_s, 1e-3))
        self._last_s = now_s
        name_hash: int = xxhash.xxh3_64_intdigest(state.name.encode())
        return name_hash & ((1 << self.n_halvings) - 1) == 0

    def record_cost(self, seconds: float) -> None:
        """Record the cost of one check, in seconds of a core."""
        self._took_s = _smooth(self._took_s or None, seconds)


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
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._group_digests: dict[bool, tuple[GroupDigest, ...]] = {}  # by whether they are shared
        self.notice: str | None = None
        self._memory = memory
        self._jobs = jobs
        self._events = events
        self._clock_s = clock_s
        self._cpu_s = cpu_s
        self._sampler = StateSampler()
        self._groups: dict[str, tuple[TensorGroup, ...]] = {}
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

    async def vote(self, state: StateId, slots: Sequence[WrittenSlot]) -> str:
        """Compare what the ranks of this node share in *slots*; return why *state* is void, or "".

        Where the state was given up meanwhile, nothing was compared.

        Raises:
            CorruptError: The header of an image is invalid.
        """
        views = [ShardView(s.shard, s.layout, s.view, self._groups.get(s.layout)) for s in slots]
        if not any(map(shares, views)):
            return ""
        work = partial(digest_shards, views, self._cpu_s, is_shared=True)
        record = self._memory.buffer_table.find(state)
        done = await JobResult(self._jobs, JobKind.HASH, work)
        if self._memory.buffer_table.find(state) is not record:
            return ""  # the slots may have been written since
        self._local_ranks = frozenset(slot.shard.rank for slot in slots)
        self._remember(done.layouts)
        if done.disagreement:
            return done.disagreement
        self._record(state, done, is_shared=True)
        differing = [
            item.group.names[number] for item in done.comparisons for number in item.differ
        ]
        if not differing:
            return ""
        here = sorted({rank for it in done.comparisons for by in it.differ.values() for rank in by})
        what = format_tensors(differing, len(differing))
        return f"{format_ranks(here)} differ in {what}, which they should hold alike"

    def on_committed(self, state: StateId) -> None:
        """Have *state* compared, if it is in the sample and there is anything to compare."""
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
        shard_views = [
            ShardView(shard, it.copy.layout, it.memory.view, self._groups.get(it.copy.layout))
            for shard, it in shards.items()
        ]
        done, why = None, ""
        try:
            work = partial(digest_shards, shard_views, self._cpu_s, is_shared=False)
            done = await JobResult(self._jobs, JobKind.CHECK_REPLICAS, work)
        except Exception as exc:  # noqa: BLE001 boundary: saving must not depend on it
            why = str(exc)
        self._is_busy = False
        if not self._is_unchanged(state, shards):
            self._n_missed += 1
            self._n_missed_in_row += 1
        elif done is None:
            self._groups |= {view.layout: () for view in shard_views}  # once is enough
            self._events.add("vote_failed", state=state, why=why)
        else:
            self._n_missed_in_row = 0
            self._remember(done.layouts)
            self._sampler.record_cost(done.took_s)
            self._record(state, done, is_shared=False)
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

    def _record(self, state: StateId, counted: DigestResult, *, is_shared: bool) -> None:
        if not counted.comparisons:
            return
        self._n_compared += 1
        self._took_s = counted.took_s
        for item in counted.comparisons:
            if not item.rank_digests:
                self._compare(state, item.group, item.differ)
        self._group_digests[is_shared] = tuple(
            GroupDigest(
                state=state,
                key=item.group.key,
                n_ranks=len(item.group.ranks),
                n_tensors=len(item.group.names),
                rank_digests=item.rank_digests,
            )
            for item in counted.comparisons
            if item.rank_digests
        )

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
            self._report_independent(state, group.ranks, [group.names[i] for i in different])
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
        self, state: StateId, ranks: Sequence[int], names: Sequence[str]
    ) -> None:
        what = format_tensors(names, len(names))
        why = (
            f"{format_ranks(ranks)} have different values in {what} at step {state.step} in every "
            "comparison: the program does not replicate them, and they are no longer compared"
        )
        self.notice = why
        self._events.add("replicas_apart", state=state, why=why)

    def _report_equal(self, state: StateId, ranks: Sequence[int]) -> None:
        why = f"{format_ranks(ranks)} are equal again at step {state.step}"
        self._events.add("replicas_alike", state=state, ranks=format_spans(ranks), why=why)


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SMOOTH) * before + _SMOOTH * now
