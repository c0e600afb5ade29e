"""The keeper's part in comparing replicas: it digests what ranks must hold alike, and compares.

The digests are made after the commit, by one thread of the lowest priority that reads the slots
where they lie. Nothing waits for it: a slot that is granted meanwhile makes the digests void.
Only so many committed states are looked at that the thread takes `SHARE` of a core; which ones
follows from their steps, so that all nodes look at the same.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from gpuops.checkpoint.image import ImageLayout, read_layout
from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.messages import state_to_json
from gpuops.checkpoint.node_memory import Held, NodeMemory
from gpuops.checkpoint.persist import Origin
from gpuops.checkpoint.replicated import KEY, replicated_in, words_of
from gpuops.checkpoint.states import Shard, StateId
from gpuops.checkpoint.vote import (
    NAMED_MAX,
    TOLD_MAX,
    Ballot,
    Course,
    Difference,
    Outcome,
    Sketch,
    judge,
    named,
    ranks_of,
    stripes_of,
    sums_of,
    weighed,
)
from gpuops.checkpoint.vote_words import Told

SHARE = 0.01
_DOUBLINGS_MAX = 20
_SMOOTH = 0.25
_MISSED_MAX = 4
_LAYOUTS_MAX = 64
_PIN = "vote"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of one image that are to be compared; equal ``key``: with those of other images."""

    key: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Sheet:
    """One shard to be digested; ``groups`` None: its header is still to be read."""

    shard: Shard
    layout: str
    view: memoryview
    groups: tuple[_Group, ...] | None


@dataclass(frozen=True, slots=True)
class _Set:
    """What this node's ranks of one group have.

    ``differ``: the digests by rank of each tensor that is not the same on all of them. ``sketches``
    are for other nodes, where some ranks are there.
    """

    group: _Group
    differ: Mapping[int, Mapping[int, bytes]]
    sketches: Mapping[int, Sketch]


@dataclass(frozen=True, slots=True)
class _Counted:
    layouts: Mapping[str, tuple[_Group, ...]]
    sets: tuple[_Set, ...]
    took_s: float


class Sampler:
    """Chooses committed states so that comparing them takes *share* of a core.

    Of every 2^j states one is chosen, by its name alone: who chooses more seldom chooses some of
    those that others do.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._every_s: float | None = None
        self._last_s: float | None = None
        self._took_s = 0.0

    @property
    def n_doublings(self) -> int:
        """Return j."""
        if not self._took_s or not self._every_s:
            return 0
        ratio = self._took_s / (self._share * self._every_s)
        return min(max(0, math.ceil(math.log2(ratio))), _DOUBLINGS_MAX)

    def chooses(self, state: StateId, now_s: float) -> bool:
        """Take in that *state* was committed; say whether it is to be looked at."""
        if self._last_s is not None:
            self._every_s = _smooth(self._every_s, max(now_s - self._last_s, 1e-3))
        self._last_s = now_s
        mark: int = xxhash.xxh3_64_intdigest(state.name.encode())
        return mark & ((1 << self.n_doublings) - 1) == 0

    def took(self, seconds: float) -> None:
        """Take in what one look cost, in seconds of a core."""
        self._took_s = _smooth(self._took_s or None, seconds)


@dataclass(slots=True)
class _Known:
    """What is known of a set of ranks that are all on this node.

    ``unequal``: tensors that differed when they were first compared, or that the program trains
    apart. Only what was equal once can become wrong. ``n_told``: how often they did; ``is_open``:
    it was told of and is not over.
    """

    course: Course = field(default_factory=Course)
    unequal: set[int] = field(default_factory=set)
    n_told: int = 0
    is_open: bool = False


class Voting:
    """Compares what the ranks of one node hold, and prepares what nodes compare among them."""

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        events: Events,
        clock_s: Callable[[], float],
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.ballots: tuple[Ballot, ...] = ()
        self.notice: str | None = None
        self._memory = memory
        self._jobs = jobs
        self._events = events
        self._clock_s = clock_s
        self._cpu_s = cpu_s
        self._sampler = Sampler()
        self._groups: dict[str, tuple[_Group, ...]] = {}
        self._known: dict[str, _Known] = {}
        self._n_compared = self._n_missed = self._missed_in_turn = 0
        self._took_s = 0.0
        self._is_busy = False
        self._local: frozenset[int] = frozenset()
        self._origin = Origin("", -1)

    def committed(self, state: StateId) -> None:
        """Have *state* compared, if it is chosen and there is anything to compare."""
        held = self._memory.held(state)
        if not any(self._groups.get(each.copy.layout, True) for each in held.values()):
            return
        if not self._sampler.chooses(state, self._clock_s()) or self._is_busy:
            return
        if self._missed_in_turn >= _MISSED_MAX:
            self._memory.gate.pin(state, _PIN)
        self._is_busy = True
        self._local = frozenset(shard.rank for shard in held)
        sheets = [
            _Sheet(shard, each.copy.layout, each.memory.view, self._groups.get(each.copy.layout))
            for shard, each in held.items()
        ]

        def then(done: _Counted | None, error: BaseException | None) -> None:
            self._is_busy = False
            if not self._is_still(state, held):
                self._n_missed += 1
                self._missed_in_turn += 1
            elif done is None:
                self._groups |= {sheet.layout: () for sheet in sheets}  # once is enough
                self._events.add("vote_failed", state=state_to_json(state), why=str(error))
            else:
                self._missed_in_turn = 0
                self._take_in(state, done)
            self._memory.gate.unpin(_PIN)

        self._jobs.vote(lambda: _count(sheets, self._cpu_s), then)

    def begin(self, origin: Origin, *, has_agent: bool) -> None:
        """Take in that workers begin; another run is told anew of ranks that differ.

        Without an agent nobody counts generations: the same one again is the job started anew.
        """
        before, self._origin = self._origin, origin
        is_same = before.job == origin.job if has_agent else before.generation != origin.generation
        if not is_same:
            for known in self._known.values():
                known.course.differs, known.is_open, known.n_told = None, False, 0

    def told(self, told: Told) -> None:
        """Take in that ranks of several nodes differ, or do so no more, as who compared them says.

        Where they were placed anew since they were equal, no node is to blame for it.
        """
        found = told.difference
        if found.verdict.outcome is Outcome.ALIKE:
            self._tell_well(found.state, found.ranks)
            return
        groups = (group for each in self._groups.values() for group in each)
        names = next((group.names for group in groups if group.key == told.key), ())
        number = told.number
        named = (names[number],) if number is not None and number < len(names) else ()
        if found.verdict.outcome is Outcome.APART:
            self._tell_apart(found.state, found.ranks, named)
        else:
            n_tensors = len(named) if number is None else 1
            is_there = found.alike is not None and found.alike.epoch == found.state.epoch
            found = replace(found, tensors=named, n_tensors=n_tensors)
            self._tell(found, told.nodes, is_there=is_there)

    def counts(self) -> dict[str, object]:
        """Return what was compared so far, and what it cost."""
        return {
            "votes": self._n_compared,
            "votes_missed": self._n_missed,
            "vote_s": self._took_s,
            "notice": self.notice,
        }

    def take_notice(self) -> str | None:
        """Return, and forget, what whoever trains is to be told."""
        notice, self.notice = self.notice, None
        return notice

    def _is_still(self, state: StateId, held: Mapping[Shard, Held]) -> bool:
        """Say whether nobody may have written into these slots since they were *held*."""
        now = self._memory.held(state)
        return bool(held) and {s: h.slot for s, h in now.items()} == {
            s: h.slot for s, h in held.items()
        }

    def _take_in(self, state: StateId, counted: _Counted) -> None:
        self._groups |= counted.layouts
        while len(self._groups) > _LAYOUTS_MAX:
            del self._groups[next(iter(self._groups))]
        if not counted.sets:
            return
        self._n_compared += 1
        self._took_s = counted.took_s
        self._sampler.took(counted.took_s)
        for each in counted.sets:
            if not each.sketches:
                self._compare(state, each.group, each.differ)
        self.ballots = tuple(
            Ballot(
                state=state,
                key=each.group.key,
                n_ranks=len(each.group.ranks),
                n_tensors=len(each.group.names),
                sketches=each.sketches,
            )
            for each in counted.sets
            if each.sketches
        )

    def _compare(
        self, state: StateId, group: _Group, differing: Mapping[int, Mapping[int, bytes]]
    ) -> None:
        known = self._known.setdefault(group.key, _Known())
        differ = [number for number in differing if number not in known.unequal]
        course = known.course
        if course.alike is None and differ:
            known.unequal.update(differ)
            self._tell_apart(state, group.ranks, [group.names[i] for i in differ])
            if len(known.unequal) < len(group.names):
                course.hear(state, differ=False)
            return
        alike = course.alike
        if not course.hear(state, differ=bool(differ)):
            if known.is_open and course.differs is None:
                known.is_open = False
                self._tell_well(state, group.ranks)
            return
        verdict = judge({rank: tuple(differing[i][rank] for i in differ) for rank in group.ranks})
        verdict = weighed(verdict, len(differ), len(group.names))
        names = [group.names[i] for i in differ]
        if verdict.outcome is Outcome.APART:
            known.unequal.update(differ)
            known.course = Course(alike=alike)
            self._tell_apart(state, group.ranks, names)
            return
        known.n_told += 1
        if known.n_told > TOLD_MAX:
            return
        known.is_open = True
        self._tell(
            Difference(
                state=state,
                ranks=group.ranks,
                verdict=verdict,
                tensors=tuple(names[:NAMED_MAX]),
                n_tensors=len(names),
                alike=alike,
            )
        )

    def _tell(self, found: Difference, nodes: Sequence[str] = (), *, is_there: bool = True) -> None:
        suspects = found.verdict.suspects
        self.notice = f"replicas of the training state differ: {found.words}"
        self._events.add(
            "replicas_differ",
            state=state_to_json(found.state),
            ranks=words_of(found.ranks),
            suspects=list(suspects) if len(suspects) <= NAMED_MAX else [],
            is_here=is_there and self._local >= set(suspects),
            nodes=list(nodes),
            outcome=found.verdict.outcome.value,
            tensors=list(found.tensors),
            n_tensors=found.n_tensors,
            alike=None if found.alike is None else state_to_json(found.alike),
            why=found.words,
        )

    def _tell_apart(self, state: StateId, ranks: Sequence[int], names: Sequence[str]) -> None:
        what = named(names, len(names))
        why = (
            f"{ranks_of(ranks)} have values of their own in {what} at step {state.step}, which "
            "replicas have not: the program trains them apart, and they are not compared"
        )
        self.notice = why
        self._events.add("replicas_apart", state=state_to_json(state), why=why)

    def _tell_well(self, state: StateId, ranks: Sequence[int]) -> None:
        why = f"{ranks_of(ranks)} are equal again at step {state.step}"
        self._events.add(
            "replicas_alike", state=state_to_json(state), ranks=words_of(ranks), why=why
        )


def _count(sheets: Sequence[_Sheet], cpu_s: Callable[[], float]) -> _Counted:
    """Return what is to be compared, and what it cost in seconds of a core."""
    layouts = {
        sheet.layout: _groups_of(sheet.view) if sheet.groups is None else sheet.groups
        for sheet in sheets
    }
    begun_s = cpu_s()
    sets: dict[str, tuple[_Group, dict[int, list[bytes]]]] = {}
    for sheet in sheets:
        for group in layouts[sheet.layout]:
            digests = [xxhash.xxh3_128_digest(sheet.view[b:e]) for b, e in group.spans]
            sets.setdefault(group.key, (group, {}))[1][sheet.shard.rank] = digests
    found = tuple(_set_of(group, by_rank) for group, by_rank in sets.values())
    return _Counted(layouts, found, cpu_s() - begun_s)


def _set_of(group: _Group, by_rank: Mapping[int, Sequence[bytes]]) -> _Set:
    if by_rank.keys() != set(group.ranks):
        return _Set(group, {}, {rank: sketch_of(digests) for rank, digests in by_rank.items()})
    columns = enumerate(zip(*by_rank.values(), strict=True))
    differ = {
        number: dict(zip(by_rank, column, strict=True))
        for number, column in columns
        if len(set(column)) > 1
    }
    return _Set(group, differ, {})


def sketch_of(digests: Sequence[bytes]) -> Sketch:
    """Return the sketch of a rank whose tensors have these *digests*, in order."""
    whole = xxhash.xxh3_128_digest(b"".join(digests))
    return Sketch(whole, sums_of(digests), stripes_of(digests))


def _groups_of(view: memoryview) -> tuple[_Group, ...]:
    """Return what the image *view* says is to be compared; raises CorruptError."""
    begin = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    if KEY.encode() not in bytes(view[:begin]):
        return ()  # of 20,000 tensors, reading all takes a tenth of a second
    layout = read_layout(view[:begin], nbytes=len(view))
    told = replicated_in(layout.header, layout.shard, len(layout.tensors))
    return tuple(_group(layout, each.ranks, each.tensors) for each in told)


def _group(layout: ImageLayout, ranks: tuple[int, ...], numbers: Sequence[int]) -> _Group:
    placed = [layout.tensors[number] for number in numbers]
    specs = [(t.spec.name, t.spec.dtype, t.spec.shape, t.spec.offsets) for t in placed]
    return _Group(
        xxhash.xxh3_64_hexdigest(repr((layout.shard.world, ranks, specs)).encode()),
        ranks,
        tuple(tensor.spec.name for tensor in placed),
        tuple((tensor.begin, tensor.end) for tensor in placed),
    )


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SMOOTH) * before + _SMOOTH * now
