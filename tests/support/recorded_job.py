"""Ranks that call collectives one after another, played until nobody gets on; their dumps."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from gpuops.convert.flight_recorder import read_dump
from gpuops.detect.recorder_dump import RankDump, parse_dump

Call = tuple[str, str]  # the name of a group, and an operation


@dataclass
class RecordedJob:
    """``groups``: their ranks. ``programs``: what each rank calls, in its order.

    A rank in ``stops_before`` does not make that call (by its place in its program); one in
    ``never_completes`` makes it, and its device does not get on.
    """

    groups: Mapping[str, Sequence[int]]
    programs: Mapping[int, Sequence[Call]]
    stops_before: Mapping[int, int] = field(default_factory=dict)
    never_completes: Mapping[int, int] = field(default_factory=dict)
    called: dict[int, list[Call]] = field(default_factory=dict)
    completed: dict[int, int] = field(default_factory=dict)

    def play(self) -> "RecordedJob":
        """Let each rank call and wait until none can go on."""
        self.called = {rank: [] for rank in self.programs}
        self.completed = dict.fromkeys(self.programs, 0)
        while sum(self._advance(rank) for rank in self.programs):
            pass
        return self

    def _advance(self, rank: int) -> bool:
        called, place = self.called[rank], self.completed[rank]
        if len(called) == place:
            if place >= len(self.programs[rank]) or self.stops_before.get(rank) == place:
                return False
            called.append(self.programs[rank][place])
            return True
        group, _ = called[place]
        number = self._number(rank, place)
        others = self.groups[group]
        if self.never_completes.get(rank) == place or any(
            sum(name == group for name, _ in self.called[other]) < number for other in others
        ):
            return False
        self.completed[rank] += 1
        return True

    def _number(self, rank: int, place: int) -> int:
        """Return which call of its group the call at *place* is, from 1 on."""
        calls = self.programs[rank][: place + 1]
        return sum(name == calls[place][0] for name, _ in calls)

    def dump(self, rank: int) -> bytes:
        """Return what torch would write of *rank*."""
        names = random.Random(rank).sample(sorted(self.groups), len(self.groups))
        entries = [
            entry(
                group,
                self._number(rank, place),
                f"nccl:{operation}",
                is_complete=place < self.completed[rank],
                pg_id=names.index(group),
            )
            for place, (group, operation) in enumerate(self.called[rank])
        ]
        config = {
            name: {"name": name, "desc": "", "ranks": json.dumps(list(ranks))}
            for name, ranks in self.groups.items()
            if rank in ranks
        }
        return json.dumps({"version": "2.10", "pg_config": config, "entries": entries}).encode()

    def awaited(self) -> set[int]:
        """Return the stopped ranks that came to their stop, and that somebody waits for."""
        stopped = {r for r, place in self.stops_before.items() if self.completed[r] == place}
        stopped |= {r for r, place in self.never_completes.items() if self.completed[r] == place}
        return stopped if any(self.waits(rank) for rank in self.programs) else set()

    def waits(self, rank: int) -> bool:
        return len(self.called[rank]) > self.completed[rank]


def entry(
    group: str,
    number: int,
    name: str,
    *,
    is_complete: bool = False,
    sizes: Iterable[Sequence[int]] = ((1024,),),
    dtype: str = "Float",
    **more: object,
) -> dict[str, object]:
    """Return an entry of the flight recorder (torch 2.13)."""
    return {
        "process_group": [group, "a group"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": [dtype],
        "state": "completed" if is_complete and name.startswith("nccl") else "scheduled",
        "retired": is_complete,
        "is_p2p": False,
        **more,
    }


def four_by_four(steps: int = 3) -> tuple[dict[str, list[int]], dict[int, list[Call]]]:
    """Return groups and programs of 16 ranks: 4 of tensor parallel, 4 of data parallel."""
    groups = {"0": list(range(16))}
    groups |= {f"tp{i}": list(range(4 * i, 4 * i + 4)) for i in range(4)}
    groups |= {f"dp{i}": list(range(i, 16, 4)) for i in range(4)}
    step = lambda rank: [  # noqa: E731 a table of one step
        (f"tp{rank // 4}", "all_gather"),
        (f"tp{rank // 4}", "reduce_scatter"),
        (f"dp{rank % 4}", "all_reduce"),
        ("0", "all_reduce"),
    ]
    return groups, {rank: step(rank) * steps for rank in range(16)}


def played(**faults: Mapping[int, int]) -> RecordedJob:
    """Return the job of 16 ranks, played with these faults."""
    return RecordedJob(*four_by_four(), **faults).play()


def dumps_of(job: RecordedJob) -> list[RankDump]:
    return [parse_dump(read_dump(job.dump(rank)), rank) for rank in job.programs]


@st.composite
def broken_jobs(draw: st.DrawFn) -> RecordedJob:
    """Draw a job of which up to three ranks stop, or whose devices do."""
    ranks = draw(st.lists(st.integers(0, 15), min_size=1, max_size=3, unique=True))
    places = {rank: draw(st.integers(0, 11)) for rank in ranks}
    fault = draw(st.sampled_from(["stops_before", "never_completes"]))
    return played(**{fault: places})
