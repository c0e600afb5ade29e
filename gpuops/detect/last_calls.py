"""The last collectives of a rank, few enough to go to other nodes with its report. Pure.

`gpuops.detect.wait_graph.diagnose` says of them what it says of whole dumps. A rank that has more
pending than fits is left out: with a part of it, it would look as if it had not called the rest.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from json import dumps
from typing import Any

from gpuops.detect.recorder_dump import RANKS_MAX, CollectiveCall, RankDump, parse_dump
from gpuops.detect.wait_graph import BATCH, completed_ends
from gpuops.log import printable
from gpuops.model import Json
from gpuops.scrub import scrub

CALLS_MAX = 32
BYTES_MAX = 4096  # as JSON; some 600 with five groups
_PARTS_MAX = 8  # tensors of a call, dimensions of a tensor, runs of the ranks of a group
_MEMBERS_MAX = 8192
_NAME_CHARS_MAX = 64
_PLACE_CHARS_MAX = 160


def last_calls(dump: RankDump) -> RankDump | None:
    """Return what *dump* says of the present: of each group what is pending, or its last call.

    None if that exceeds `CALLS_MAX` or `BYTES_MAX`; the members of groups are there as far as they
    fit.
    """
    needed, more = _split(dump.calls)
    kept: list[CollectiveCall] = []
    left = BYTES_MAX - len(dumps(_body((), {})))
    for call in map(_bounded, (*needed, *more)):
        left -= len(dumps(_row(call))) + 2
        if left < 0 or len(kept) == CALLS_MAX:
            break
        kept.append(call)
    if len(kept) < len(needed):
        return None
    members: dict[str, tuple[int, ...]] = {}
    n_left = _MEMBERS_MAX
    for name in dict.fromkeys(call.group for call in needed):
        ranks, runs = dump.members.get(name, ()), _runs(dump.members.get(name, ()))
        size = len(dumps({_clean(name): runs}))
        if runs and size <= left and len(ranks) <= n_left:
            members[_clean(name)] = ranks
            left, n_left = left - size, n_left - len(ranks)
    return RankDump(rank=dump.rank, calls=tuple(kept), members=members)


def pending_calls(dump: RankDump) -> list[CollectiveCall]:
    """Return the first call of each group that the rank of *dump* has not completed."""
    first: dict[str, CollectiveCall] = {}
    for call in _split(dump.calls)[0]:
        if not call.is_complete:
            first.setdefault(call.group, call)
    return list(first.values())


def _split(calls: Iterable[CollectiveCall]) -> tuple[list[CollectiveCall], list[CollectiveCall]]:
    """Return the calls without which a verdict would be wrong, and those that add to it."""
    calls = sorted(calls, key=lambda call: call.number)
    is_done, by_group = completed_ends(calls), defaultdict(list)
    needed: list[CollectiveCall] = []
    more: list[CollectiveCall] = []
    for call in calls:
        if not call.is_p2p:
            by_group[call.group].append(call)
        elif not (call.is_complete or call.operation == BATCH or is_done(call)):
            needed.append(call)
    for found in by_group.values():
        complete = [call for call in found if call.is_complete][-1:]
        pending = [call for call in found if not complete or call.number > complete[0].number]
        needed += (pending[:1] + pending[1:][-1:]) or complete
        more += (complete + pending[1:-1]) if pending else []
    return needed, more


def to_json(dump: RankDump | None) -> Json | None:
    """Return *dump*, bounded by `last_calls`, as JSON; `from_json` reads it."""
    bounded = None if dump is None else last_calls(dump)
    return None if bounded is None else _body(bounded.calls, bounded.members)


def _body(calls: Iterable[CollectiveCall], members: Mapping[str, Sequence[int]]) -> Json:
    runs = {group: _runs(ranks) for group, ranks in members.items()}
    return {"calls": [_row(call) for call in calls], "members": runs}


def from_json(data: object, rank: int) -> RankDump | None:
    """Return the calls of *rank* in *data*; None if there are none, or of another kind.

    A report is worth as much without them as that of a gpuops that has none.
    """
    try:
        body: Any = data
        if len(body["calls"]) > CALLS_MAX or len(body["members"]) > CALLS_MAX:
            return None
        entries = [_entry(row) for row in body["calls"]]
        runs = {group: [_range(*run) for run in runs] for group, runs in body["members"].items()}
        if sum(len(run) for each in runs.values() for run in each) > _MEMBERS_MAX:
            return None
        config = {group: {"ranks": [*chain(*each)]} for group, each in runs.items()}
        return parse_dump({"entries": entries, "pg_config": config}, rank)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _row(call: CollectiveCall) -> list[object]:
    what: list[object] = [call.group, call.number, call.operation, call.sizes, call.dtypes]
    return [*what, call.is_complete, call.is_p2p, call.peer, call.place]


def _entry(row: Sequence[Any]) -> Json:
    """Return a row as an entry of a dump: one parser knows what such an entry may be."""
    group, number, operation, sizes, dtypes, is_complete, is_p2p, peer, place = row
    file, _, line = place.rpartition(":")
    return {
        "process_group": [group],
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "profiling_name": f":{operation} ->{'' if peer is None else peer}",
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "state": "completed" if is_complete is True else "scheduled",
        "is_p2p": is_p2p,
        "frames": [{"filename": file, "line": int(line)}] if line.isdecimal() else [],
    }


def _bounded(call: CollectiveCall) -> CollectiveCall:
    return replace(
        call,
        group=_clean(call.group),
        operation=_clean(call.operation),
        sizes=tuple(size[:_PARTS_MAX] for size in call.sizes[:_PARTS_MAX]),
        dtypes=tuple(map(_clean, call.dtypes[:_PARTS_MAX])),
        place=scrub(printable(call.place))[-_PLACE_CHARS_MAX:],
        backend="",
        created_ns=0,
        duration_s=None,
    )


def _clean(text: str) -> str:
    return scrub(printable(text))[:_NAME_CHARS_MAX]


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return *ranks*, ascending, as runs of first rank, distance and length; none if they are many.

    A group of tensor, data or pipeline parallelism is one run.
    """
    runs: list[list[int]] = []
    start = 0
    while start < len(ranks):
        distance = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 1
        end = start + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == distance:
            end += 1
        runs.append([ranks[start], distance, end - start])
        start = end
        if len(runs) > _PARTS_MAX:
            return []
    return runs


def _range(first: int, distance: int, length: int) -> range:
    return range(first, first + distance * min(length, RANKS_MAX), distance)
