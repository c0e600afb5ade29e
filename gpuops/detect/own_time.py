"""How long each rank worked in each step without waiting for others. Pure.

In synchronous training the time from step to step is the same on all ranks: those that are ready
wait for the slow one. A rank's *own time* is its step without this waiting.

On a CPU backend (gloo) it follows from when each rank called its collectives. From the last call of
a collective on, nobody waits for it any more; a rank that blocks in it goes on from there. Which
calls block is seen in the dump: a rank that calls the next one before the last peer has come did
not block, and behind a call that blocks the time to the next one grows by as much as the rank came
early. Measured with torch 2.13, one of three ranks 25 % slower: own times 39, 48 and 39 ms with DDP
where all steps took 48 ms; 64, 72 and 64 ms with FSDP2 where they took 72 ms.

With NCCL the times of calls say nothing of the device, but where calls are timed, the seconds in
collectives do: the slow rank waits least (`Measure.IN_COLLECTIVES`).
"""

import statistics
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

from gpuops.detect.recorder_dump import CollectiveCall, RankDump
from gpuops.wire.ring import STEP_UNKNOWN, Beat, WorkerPhase

# Of how many calls before its own a rank may have waited for: those between are prefetched.
_CALLS_BACK = 3
# By the slope of the time to the next call over how early a rank was: 0 does not block, 1 does.
_BLOCKS_SLOPE = 0.5
# Where its standard error leaves that open: those overlap with computing, others do not.
_OVERLAPPING = ("all_reduce", "reduce_scatter")
NO_TIMING = (
    "the collectives of NCCL are not timed (TORCH_NCCL_ENABLE_TIMING), so that slow ranks cannot"
    " be told from those that wait for them"
)
OVER_NODES = (
    "ranks wait for others in groups over several nodes, and no common clock tells who came last"
)


class Measure(IntEnum):
    """What a number of seconds is: time without waiting, or within collectives with waiting."""

    OWN = 0
    IN_COLLECTIVES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """A step of one rank by its heartbeats, from the end of the one before; 0: not known."""

    start_ns: int
    step: int = 0
    end_ns: int = 0
    data_s: float = 0.0
    optimizer_s: float = 0.0
    tokens: int = 0

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What is known of a rank: its dump, its steps, and wall clock less monotonic clock."""

    dump: RankDump
    spans: Sequence[StepSpan]
    wall_offset_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The seconds of a rank by step; ranks of one ``role`` do the same and may be compared."""

    role: int
    measure: Measure
    seconds: Mapping[int, float]
    step_s: float
    data_share: float = 0.0
    optimizer_share: float = 0.0
    tokens: int = 0


def step_spans(beats: Iterable[Beat]) -> list[StepSpan]:
    """Return the steps between *beats* that follow one another without another phase.

    A step ends with its last call of an optimizer: a script may have several, and report as well.
    """
    found: list[StepSpan] = []
    last: Beat | None = None  # the end of a step; None after another phase
    calls, data_us, optimizer_us, tokens = -1, 0, 0, 0
    for beat in beats:
        data_us, optimizer_us = data_us + beat.data_us, optimizer_us + beat.optimizer_us
        tokens += beat.tokens
        is_step = beat.phase is WorkerPhase.STEPPING
        is_report = is_step and beat.optimizer_calls == calls > 0
        calls = beat.optimizer_calls
        if is_report:
            continue
        if last is not None and is_step and _number(beat) - _number(last) in (0, 1):
            is_same = bool(found) and found[-1].step == _number(beat)
            before = found.pop() if is_same else StepSpan(start_ns=last.mono_ns)
            if is_same or _number(beat) > _number(last):
                found.append(
                    StepSpan(
                        step=_number(beat),
                        start_ns=before.start_ns,
                        end_ns=beat.mono_ns,
                        data_s=before.data_s + data_us / 1e6,
                        optimizer_s=before.optimizer_s + optimizer_us / 1e6,
                        tokens=before.tokens + tokens,
                    )
                )
        data_us = optimizer_us = tokens = 0
        last = beat if is_step else None
    return found


def _number(beat: Beat) -> int:
    if beat.step != STEP_UNKNOWN:
        return beat.step
    return beat.optimizer_calls if beat.counted is None else beat.counted


@dataclass(slots=True)
class _Step:
    """The events of a step of one rank: its start, its calls, its end, in seconds.

    ``last_s``: when the last member of its group made each call; None where some are elsewhere.
    """

    times_s: list[float]
    last_s: list[float | None]
    durations_s: list[float | None]


@dataclass(slots=True)
class _Rank:
    steps: dict[int, _Step] = field(default_factory=dict)
    calls: list[CollectiveCall] = field(default_factory=list)  # of one step
    role: int = 0


def own_times(traces: Mapping[int, RankTrace], n_ranks: int) -> tuple[dict[int, RankSteps], str]:
    """Return by rank its steps, and why ranks are missing ("": none is, or they have no steps).

    *traces* are those of one host, in a job of *n_ranks*. Steps with other calls than most of a
    rank, or with calls that its dump does not hold any more, are left out.
    """
    last_s = _last_calls(traces, n_ranks)
    all_ranks = {rank: _rank(trace, last_s) for rank, trace in traces.items()}
    ranks = {rank: found for rank, found in all_ranks.items() if found.steps}
    peers: dict[tuple[object, ...], dict[int, _Rank]] = defaultdict(dict)
    why = ""
    for rank, found in ranks.items():
        if any(call.backend == "nccl" for call in found.calls) and not _is_timed(found):
            why = NO_TIMING
        elif _is_timed(found) or _waits_are_seen(found, traces[rank].dump, n_ranks):
            peers[found.role, *(call.operation for call in found.calls)][rank] = found
        else:
            why = OVER_NODES
    own = {rank: steps for each in peers.values() for rank, steps in _of_peers(each).items()}
    return {
        rank: _result(traces[rank], ranks[rank], measure, seconds)
        for rank, (measure, seconds) in own.items()
        if seconds
    }, why


def _result(
    trace: RankTrace, rank: _Rank, measure: Measure, seconds: Mapping[int, float]
) -> RankSteps:
    spans = [span for span in trace.spans if span.step in seconds]
    total_s = sum(span.seconds for span in spans) or 1.0
    return RankSteps(
        role=rank.role,
        measure=measure,
        seconds=seconds,
        step_s=statistics.median(span.seconds for span in spans),
        data_share=sum(span.data_s for span in spans) / total_s,
        optimizer_share=sum(span.optimizer_s for span in spans) / total_s,
        tokens=round(statistics.median(span.tokens for span in spans)),
    )


def _last_calls(traces: Mapping[int, RankTrace], n_ranks: int) -> dict[tuple[str, int], float]:
    """Return when the last member of its group made each call, if all members are in *traces*."""
    called: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for rank, trace in traces.items():
        for call in trace.dump.calls:
            if not call.is_p2p:
                at_s = (call.created_ns - trace.wall_offset_ns) / 1e9
                called[call.group, call.number][rank] = at_s
    sizes = {
        group: size
        for trace in traces.values()
        for group in {call.group for call in trace.dump.calls}
        if (size := _size(trace.dump, group, n_ranks))
    }
    return {
        place: max(by_rank.values())
        for place, by_rank in called.items()
        if len(by_rank) == sizes.get(place[0])
    }


def _size(dump: RankDump, group: str, n_ranks: int) -> int:
    """Return how many ranks *group* has, 0 where nobody knows; the first is that of all ranks."""
    return len(dump.members.get(group, ())) or (n_ranks if group == "0" else 0)


def _rank(trace: RankTrace, last_s: Mapping[tuple[str, int], float]) -> _Rank:
    calls = sorted(
        (call for call in trace.dump.calls if not call.is_p2p or call.duration_s is not None),
        key=lambda call: call.created_ns,
    )
    times_ns = [call.created_ns - trace.wall_offset_ns for call in calls]
    by_step = {
        span: calls[bisect_left(times_ns, span.start_ns) : bisect_left(times_ns, span.end_ns)]
        for span in trace.spans
        if times_ns and span.start_ns >= times_ns[0]
    }
    if not by_step:
        return _Rank()
    counts = Counter(map(_sequence, by_step.values()))
    usual = max(counts, key=lambda sequence: (counts[sequence], len(sequence)))
    kept = {span: found for span, found in by_step.items() if _sequence(found) == usual}
    steps = {
        span.step: _Step(
            times_s=[
                span.start_ns / 1e9,
                *((call.created_ns - trace.wall_offset_ns) / 1e9 for call in found),
                span.end_ns / 1e9,
            ],
            last_s=[None, *(last_s.get((call.group, call.number)) for call in found)],
            durations_s=[call.duration_s for call in found],
        )
        for span, found in kept.items()
    }
    return _Rank(steps, next(iter(kept.values())), _role(trace.dump, list(kept.values())))


def _sequence(calls: Iterable[CollectiveCall]) -> tuple[tuple[str, str], ...]:
    return tuple((call.group, call.operation) for call in calls)


def _role(dump: RankDump, steps: Sequence[Sequence[CollectiveCall]]) -> int:
    """Return what a rank does as a number: its calls of a step, whatever their order.

    Sizes that differ from step to step (of uneven sequences) are no part of it.
    """
    parts = Counter(
        (
            len(dump.members.get(calls[0].group, ())),
            calls[0].operation,
            calls[0].sizes if len({call.sizes for call in calls}) == 1 else (),
            calls[0].dtypes,
        )
        for calls in zip(*steps, strict=True)
    )
    return zlib.crc32(repr(sorted(parts.items())).encode()) & 0x7FFFFFFF


def _is_timed(rank: _Rank) -> bool:
    timed = [call.duration_s is not None for call in rank.calls]
    return 2 * sum(timed) > len(timed)


def _waits_are_seen(rank: _Rank, dump: RankDump, n_ranks: int) -> bool:
    """Return whether waiting for other nodes cannot make *rank* look slower than its peers.

    In a group of all ranks everybody waits for the same one. In a smaller one over several nodes
    only its members wait for a slow member, and these would look slow with it.
    """
    steps = rank.steps.values()
    return all(
        _size(dump, call.group, n_ranks) == n_ranks
        or all(step.last_s[place] is not None for step in steps)
        for place, call in enumerate(rank.calls, 1)
    )


def _of_peers(peers: Mapping[int, _Rank]) -> dict[int, tuple[Measure, dict[int, float]]]:
    if all(_is_timed(rank) for rank in peers.values()):
        return {rank: (Measure.IN_COLLECTIVES, _waits_s(found)) for rank, found in peers.items()}
    n_calls = len(next(iter(peers.values())).calls)
    waits_for = {event: _waited_for(peers, event) for event in range(1, n_calls + 2)}
    return {
        rank: (Measure.OWN, {n: _own_s(step, waits_for) for n, step in found.steps.items()})
        for rank, found in peers.items()
    }


def _waits_s(rank: _Rank) -> dict[int, float]:
    """Return the seconds in collectives by step, of steps of which NCCL has timed all calls.

    The newest ones are still under way; of a batch torch times one entry for all, in each step.
    """
    steps = rank.steps.values()
    timed = {
        place
        for place in range(len(rank.calls))
        if 2 * sum(step.durations_s[place] is not None for step in steps) > len(steps)
    }
    return {
        number: sum(filter(None, step.durations_s))
        for number, step in rank.steps.items()
        if all(step.durations_s[place] is not None for place in timed)
    }


def _own_s(step: _Step, waits_for: Mapping[int, int | None]) -> float:
    """Return the time between the events of *step* less what passed in waiting.

    The end of a step whose last call is over several nodes is left out: there it waits.
    """
    own_s = 0.0
    for event, (before_s, at_s) in enumerate(pairwise(step.times_s), 1):
        place = waits_for[event]
        last_s = None if place is None else step.last_s[place]
        if last_s is not None:
            own_s += at_s - max(before_s, last_s)
        elif event < len(step.times_s) - 1 or event == 1 or step.last_s[-1] is not None:
            own_s += at_s - before_s
    return own_s


def _waited_for(peers: Mapping[int, _Rank], event: int) -> int | None:
    """Return the latest call that ranks wait for before *event*, by all their steps."""
    calls = next(iter(peers.values())).calls
    for place in range(event - 1, max(0, event - 1 - _CALLS_BACK), -1):
        known = [
            [(step.times_s, last) for step in rank.steps.values() if (last := step.last_s[place])]
            for rank in peers.values()
        ]
        # A rank that goes on before the last one has come does not wait. An optimizer needs all
        # gradients: the last call before it that can be waited for, is.
        is_early = any(times[event] < last_s for found in known for times, last_s in found)
        is_end = event > len(calls)
        if any(known) and not is_early and (is_end or _blocks(known, event, calls[place - 1])):
            return place
    return None


def _blocks(
    known: Sequence[Sequence[tuple[Sequence[float], float]]], event: int, call: CollectiveCall
) -> bool:
    """Return whether the time to *event* grows by as much as a rank was early, step by step.

    Each rank is compared with itself: between ranks the slow one is never early.
    """
    early: list[float] = []
    gaps: list[float] = []
    for of_rank in filter(None, known):
        early += _centred([max(0.0, last_s - times[event - 1]) for times, last_s in of_rank])
        gaps += _centred([times[event] - times[event - 1] for times, _ in of_rank])
    square = sum(x * x for x in early)
    if square > 0:
        slope = sum(x * y for x, y in zip(early, gaps, strict=True)) / square
        rest = sum((y - slope * x) ** 2 for x, y in zip(early, gaps, strict=True))
        if abs(slope - _BLOCKS_SLOPE) > (rest / len(early) / square) ** 0.5:
            return slope > _BLOCKS_SLOPE
    return not call.operation.lstrip("_").startswith(_OVERLAPPING)


def _centred(values: Sequence[float]) -> list[float]:
    middle = statistics.fmean(values)
    return [value - middle for value in values]
