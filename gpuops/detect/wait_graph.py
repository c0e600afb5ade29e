"""Which ranks a hung job waits for, by the collectives that each rank called and completed. Pure.

A rank that stands in a collective waits for those members of its group that have not called it yet;
these may wait in another group for others. The ranks at the ends of all such chains are the ones to
look at: they stand outside of any collective. A rank whose peers have completed what it has not is
one as well: all have called it, its own device or process does not get on.

Groups are compared by name and place in their order, as torch's own analysis does
(torch.distributed.flight_recorder); that one compares pairs from the first rank on, this one
follows the chains to their ends, over all groups.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuops.detect.recorder_dump import CollectiveCall, RankDump
from gpuops.hostlist import compress

# Their inputs have the same sizes and types on all ranks, and nobody completes them alone.
_EQUAL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier", "broadcast"})
BATCH = "coalesced"
_RING = "they wait in one group for ranks that wait for them in another"
_NOTHING = "no collective is pending"
_NOT_CALLED = "the others wait in a collective that they have not called"
_STUCK = "the others wait for ranks that wait in what all who take part have called"
_MESSAGES = "they wait for messages of one another: one is lost, or was never sent"
_TEXTS_MAX = 4
_RANKS_CHARS_MAX = 60


class HangKind(StrEnum):
    """What the collectives say of a job."""

    NOTHING = "nothing"  # no collective is pending, or no dump is there
    MISMATCH = "mismatch"  # ranks called different operations at one place
    STALLED = "stalled"  # peers completed what these did not
    ABSENT = "absent"  # others wait in a collective that these have not called
    DEADLOCK = "deadlock"  # each of these waits for another one
    ALL_IN = "all_in"  # all have called what is pending: the network, or the next moment


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveHang:
    """The ranks that the others wait for, and why.

    ``without_dump``: ranks of the job that left no dump; nothing is known of them, so each may be
    one of those. ``pending``: the collective in which most ranks wait; ``waiting`` are these ranks.
    ``how`` says the same for people, with the calls.
    """

    kind: HangKind
    ranks: tuple[int, ...] = ()
    without_dump: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    pending: CollectiveCall | None = None
    why: str
    how: str = ""


def diagnose(dumps: Sequence[RankDump], n_ranks: int | None = None) -> CollectiveHang:
    """Return whom a job of *n_ranks* waits for, by the *dumps* of its ranks.

    *n_ranks*: besides those that the dumps, and the groups that they name, know of. Dumps that are
    taken one after another show a job that is still running as one that hangs; the caller knows
    whether it does.
    """
    job = _Job(dumps, n_ranks)
    kind, ranks, why = _verdict(job)
    waiting = _most_waiting(job)
    return CollectiveHang(
        kind=kind,
        ranks=tuple(sorted(ranks)),
        without_dump=tuple(sorted(job.ranks - job.dumps.keys())),
        waiting=tuple(sorted(waiting.keys() - set(ranks))),
        pending=next(iter(waiting.values()), None),
        why=why,
        how=_how(job, kind, ranks) or why,
    )


def _verdict(job: "_Job") -> tuple[HangKind, Collection[int], str]:
    if not job.pending:
        is_empty = not any(dump.calls for dump in job.dumps.values())
        why = "the dumps have no entries: was the recorder on?" if is_empty else _NOTHING
        return HangKind.NOTHING, (), why
    if odd := _mismatch(job):
        return HangKind.MISMATCH, *odd
    if stalled := job.stalled():
        return HangKind.STALLED, stalled, "their peers completed what they only called"
    if edges := job.edges():
        return _ends_of_chains(job, edges, _most_waiting(job).keys())
    return HangKind.ALL_IN, (), "all ranks have called what is pending"


def _ends_of_chains(
    job: "_Job", edges: Mapping[int, set[int]], most_waiting: Collection[int]
) -> tuple[HangKind, Collection[int], str]:
    """Return the ranks that others wait for and that wait for nobody; else a ring of ranks.

    Nobody where these wait in what all have called: the network between them does not get on.
    Nor of a ring of sends and receives alone: one that is complete on its side may be lost.
    Of another ring those are named that wait elsewhere than most, if more than half of all that
    wait do so in one collective: they left it out, or called another one first.
    """
    awaited = {other for others in edges.values() for other in others}
    if absent := (awaited & job.dumps.keys()) - edges.keys():
        if named := absent - job.stuck():
            return HangKind.ABSENT, named, _NOT_CALLED
        return HangKind.ALL_IN, (), _STUCK
    if ring := _in_cycles({rank: others & edges.keys() for rank, others in edges.items()}):
        if job.waits_for_messages_only(ring):
            return HangKind.ALL_IN, (), _MESSAGES
        elsewhere = ring.difference(most_waiting) if 2 * len(most_waiting) > len(edges) else ring
        return HangKind.DEADLOCK, elsewhere or ring, _RING
    return HangKind.ABSENT, (), "the others wait for ranks that left no dump"


def _how(job: "_Job", kind: HangKind, ranks: Collection[int]) -> str:
    """Return in which calls *ranks*, or those that wait for them, stand; the clearest first."""
    by_place: dict[tuple[str, int], set[int]] = defaultdict(set)
    for (rank, _), call in job.pending.items():
        if not call.is_p2p:
            by_place[call.group, call.number].add(rank)
    texts = [
        (bool(others), -len(waiting), place, text)
        for place, waiting in by_place.items()
        for others, text in _place_text(job, kind, set(ranks), place, waiting)
    ]
    exact = [item for item in texts if not item[0]] or texts
    shown = "; ".join(text for *_, text in sorted(exact)[:_TEXTS_MAX])
    if shown and kind is HangKind.DEADLOCK:
        wait, it = _verb(ranks, "waits", "wait"), _verb(ranks, "it", "them")
        shown += f": {_who(ranks)} {wait} in one group for ranks that wait for {it} in another"
    return shown


def _place_text(
    job: "_Job", kind: HangKind, ranks: set[int], place: tuple[str, int], waiting: set[int]
) -> Iterator[tuple[set[int], str]]:
    """Yield what *ranks* have to do with the call at *place*, and what other ranks have."""
    call, behind, named = job.calls[place][min(waiting)], job.behind(place), waiting & ranks
    completed = max(job.completed[call.group].values(), default=-1) >= call.number
    where = f"{call}, call {call.number} of {job.group_text(call.group)}"
    where += f" at {call.place}" if call.place else ""
    if kind is HangKind.ABSENT and (missing := behind & ranks):
        has, wait = _verb(missing, "has", "have"), _verb(waiting, "waits", "wait")
        text = f"{_who(missing)} {has} not called {where}, in which {_who(waiting)} {wait}"
        yield behind - ranks, text
    elif kind is HangKind.DEADLOCK:
        yield set(), f"{_who(waiting)} {_verb(waiting, 'waits', 'wait')} in {where}"
    elif kind is HangKind.STALLED and named and completed:
        yield set(), f"{_who(named)} called {where}, which a peer completed"
    elif kind is HangKind.ALL_IN and not behind:
        yield set(), f"all ranks called {where}, and none completed it"


def _who(ranks: Collection[int]) -> str:
    text = ranks_text(ranks)
    shown = text if len(text) <= _RANKS_CHARS_MAX else f"{text[:_RANKS_CHARS_MAX]}...: {len(ranks)}"
    return f"{_verb(ranks, 'rank', 'ranks')} {shown}"


def _verb(ranks: Collection[int], one: str, more: str) -> str:
    return one if len(ranks) == 1 else more


def _most_waiting(job: "_Job") -> dict[int, CollectiveCall]:
    """Return the ranks in the collective in which most wait, else in a send or receive."""
    by_place: dict[tuple[bool, str, int], dict[int, CollectiveCall]] = defaultdict(dict)
    for (rank, _), call in job.pending.items():
        by_place[call.is_p2p, call.group, call.number][rank] = call
    most = max(by_place, key=lambda place: (not place[0], len(by_place[place])), default=None)
    return {} if most is None else by_place[most]


class _Job:
    """The calls of all ranks, by rank and group; ``pending``: the first incomplete one of each."""

    def __init__(self, dumps: Iterable[RankDump], n_ranks: int | None) -> None:
        self.dumps = {dump.rank: dump for dump in dumps}
        self.calls: dict[tuple[str, int], dict[int, CollectiveCall]] = defaultdict(dict)
        self.called: dict[str, dict[int, int]] = defaultdict(dict)
        self.completed: dict[str, dict[int, int]] = defaultdict(dict)
        self.open_ends: dict[int, list[CollectiveCall]] = defaultdict(list)
        self._members: dict[str, set[int]] = defaultdict(set)
        self._behind: dict[tuple[str, int], set[int]] = {}
        for rank, dump in self.dumps.items():
            for group, ranks in dump.members.items():
                self._members[group].update(ranks)
            done = completed_ends(dump.calls)
            for call in dump.calls:
                if not call.is_p2p:
                    self._add(rank, call)
                elif not (call.is_complete or call.operation == BATCH or done(call)):
                    self._members[call.group].add(rank)
                    self.open_ends[rank].append(call)
        known = {rank for ranks in self._members.values() for rank in ranks} | self.dumps.keys()
        self.ranks = known | set(range(n_ranks or 0))
        self.pending = self._first_incomplete()

    def _add(self, rank: int, call: CollectiveCall) -> None:
        self._members[call.group].add(rank)
        self.calls[call.group, call.number][rank] = call
        called, completed = self.called[call.group], self.completed[call.group]
        called[rank] = max(called.get(rank, -1), call.number)
        if call.is_complete:
            completed[rank] = max(completed.get(rank, -1), call.number)

    def _first_incomplete(self) -> dict[tuple[int, str], CollectiveCall]:
        found: dict[tuple[int, str], CollectiveCall] = {}
        for (group, number), by_rank in sorted(self.calls.items()):
            for rank, call in by_rank.items():
                if not call.is_complete and number > self.completed[group].get(rank, -1):
                    found.setdefault((rank, group), call)
        for (rank, group), call in found.items():
            self.completed[group][rank] = call.number - 1  # a dump may hold the pending ones only
        for rank, calls in self.open_ends.items():
            for call in calls:
                found.setdefault((rank, f"{call.group} {call.operation} {call.peer}"), call)
        return found

    def members(self, group: str) -> list[int]:
        """Return the ranks of *group*; the first group is that of all ranks."""
        return sorted(self.ranks if group == "0" else self._members[group])

    def edges(self) -> dict[int, set[int]]:
        """Return for each rank that waits the ranks that it waits for."""
        edges: dict[int, set[int]] = defaultdict(set)
        for (rank, _), call in self.pending.items():
            if call.is_p2p:
                edges[rank] |= self._silent_peer(rank, call)
                continue
            edges[rank] |= self.behind((call.group, call.number))
        return {rank: others for rank, others in edges.items() if others}

    def behind(self, place: tuple[str, int]) -> set[int]:
        """Return the ranks of the group that have not made the call at *place*."""
        if place not in self._behind:
            (group, number), called = place, self.called[place[0]]
            late = {rank for rank in self.members(group) if called.get(rank, -1) < number}
            self._behind[place] = late
        return self._behind[place]

    def waits_for_messages_only(self, ranks: Collection[int]) -> bool:
        """Return whether all pending calls of *ranks* are sends and receives."""
        return all(call.is_p2p for (rank, _), call in self.pending.items() if rank in ranks)

    def stuck(self) -> set[int]:
        """Return the ranks with a pending call that all of its group, two or more, have made."""
        return {
            rank
            for (rank, _), call in self.pending.items()
            if (
                call.peer is not None and not self._silent_peer(rank, call)
                if call.is_p2p
                else not self.behind((call.group, call.number))
                and len(self.calls[call.group, call.number]) > 1
            )
        }

    def group_text(self, group: str) -> str:
        """Return the name of *group* with its ranks."""
        members = self.members(group)
        whole = "all ranks" if len(members) == len(self.ranks) else _who(members)
        return f"group {group} ({whole})"

    def _silent_peer(self, rank: int, call: CollectiveCall) -> set[int]:
        """Return the other end of a send or receive unless it has called its side of it."""
        members = self.members(call.group)
        if call.peer is None or call.peer >= len(members):
            return set()
        peer, own = members[call.peer], members.index(rank)
        other = {"send": "recv", "recv": "send"}.get(call.operation)
        ends = self.open_ends[peer]
        is_met = any((x.group, x.operation, x.peer) == (call.group, other, own) for x in ends)
        return set() if is_met else {peer}

    def stalled(self) -> set[int]:
        """Return the ranks that have not completed what all have called and a peer completed."""
        return {
            rank
            for (rank, _), call in self.pending.items()
            if not call.is_p2p
            and max(self.completed[call.group].values(), default=-1) >= call.number
            and not self.behind((call.group, call.number)) & self.dumps.keys()
        }


def completed_ends(calls: Iterable[CollectiveCall]) -> Callable[[CollectiveCall], bool]:
    """Return what tells whether a send or receive that looks pending is complete.

    Of a batch torch completes one entry for all (``coalesced``), never those of its parts; and what
    comes later between the same two ranks is complete only after them.
    """
    batches, last = set(), dict[tuple[str, int | None], int]()
    for call in calls:
        if call.is_p2p and call.is_complete:
            batches.add((call.group, call.number, call.operation))
            last[call.group, call.peer] = max(last.get((call.group, call.peer), -1), call.number)
    return lambda call: (
        (call.group, call.number, BATCH) in batches
        or last.get((call.group, call.peer), -1) > call.number
    )


def _mismatch(job: _Job) -> tuple[set[int], str] | None:
    """Return the ranks that called something else than most at the first place where ranks differ.

    Two signatures that as many ranks called: all of them, as nobody can say which is right.
    """
    places = {(call.group, call.number) for call in job.pending.values() if not call.is_p2p}
    for place in sorted(places):
        by_rank = job.calls[place]
        counts = Counter(_signature(call) for call in by_rank.values())
        if len(counts) < 2:
            continue
        (usual, votes), *others = counts.most_common()
        is_tie = votes == others[0][1]
        odd = {r for r, call in by_rank.items() if is_tie or _signature(call) != usual}
        by_text: dict[str, set[int]] = defaultdict(set)
        for rank, call in by_rank.items():
            by_text[f"{call} at {call.place}" if call.place else str(call)].add(rank)
        fewest = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[0]))[-_TEXTS_MAX:]
        texts = [f"{text} on {_who(ranks)}" for text, ranks in fewest]
        return odd, f"call {place[1]} of {job.group_text(place[0])} is {' and '.join(texts)}"
    return None


def _signature(call: CollectiveCall) -> tuple[object, ...]:
    """Return what must be equal on all ranks of a group: sizes may differ for some operations."""
    is_equal = call.operation.lstrip("_").removesuffix("_base") in _EQUAL
    return (call.operation, call.sizes, call.dtypes) if is_equal else (call.operation,)


def _in_cycles(edges: Mapping[int, Collection[int]]) -> set[int]:
    """Return the ranks of all rings of *edges*, and those on a way from one ring to another."""
    left = set(edges)
    while True:
        awaited = {other for rank in left for other in edges[rank]}
        kept = {rank for rank in left & awaited if not left.isdisjoint(edges[rank])}
        if kept == left:
            return left
        left = kept


def ranks_text(ranks: Iterable[int]) -> str:
    """Return *ranks* as ``0-3,8``."""
    return compress(map(str, ranks)).strip("[]")
