"""The steps that ``gpuops run --record-steps`` writes down, read again. Pure.

Lines of JSON. The first of a file has the `SCHEMA`, the ``generation``, ``node`` and ``ranks``. A
step has ``rank``, ``step``, ``time_us`` (its end, since the epoch), where known ``data_us``,
``optimizer_us`` and ``tokens`` (`Beat`), and ``own_us`` if somebody has added the rank's own time:
gpuops does not. What a monitor publishes for the leader has ``monitor``, ``published`` and
``time_us``; that of the straggler monitor has the own times by which a run judges.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuops.detect.step_summary import StepSummary, own_by_step, unpack_summary
from gpuops.detect.step_table import OwnTimes, TableWorker
from gpuops.model import Json

SCHEMA = "gpuops.step-trace/1"
_NO_ROLE = -1  # of ranks whose own times are in ``own_us``


class TraceRank(TableWorker):
    """A rank of a trace; its ``stage`` is the role: ranks of one do the same work."""

    __slots__ = ()

    @property
    def place(self) -> int:
        """Return its rank."""
        return self.dp_rank

    def to_json(self) -> Json:
        """Return what names it."""
        return {"rank": self.dp_rank}

    def __str__(self) -> str:
        return f"rank {self.dp_rank}"


@dataclass(slots=True)
class StepTrace:
    """One generation of a run: its ranks, and what they published at which time."""

    ranks: set[int] = field(default_factory=set)
    published: list[tuple[int, dict[int, StepSummary]]] = field(default_factory=list)
    own: dict[int, dict[TableWorker, float]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in a line of a file that is not its first.

        Raises:
            KeyError, TypeError, ValueError: It is no line of a trace.
        """
        if line.get("monitor") == "straggler":
            ranks = dict(line["published"]["ranks"]).items()
            summaries = {int(rank): unpack_summary(text) for rank, text in ranks if text}
            self.published.append((int(line["time_us"]), summaries))
        elif "own_us" in line:
            rank = TraceRank(_NO_ROLE, int(line["rank"]))
            self.own[int(line["step"])][rank] = float(line["own_us"]) / 1e6

    def own_times(self) -> OwnTimes:
        """Return the own times by step, where all ranks of a role have published them."""
        newest: dict[int, StepSummary] = {}
        last: dict[int, int] = {}  # the last step of each role
        members = {(s.role, rank) for _, found in self.published for rank, s in found.items()}
        for _, summaries in sorted(self.published, key=lambda each: each[0]):
            newest |= summaries
            for role in sorted({summary.role for summary in newest.values()}):
                peers = {rank: s for rank, s in newest.items() if s.role == role}
                awaited = {r for of, r in members if of == role and (r in peers or r not in newest)}
                for step, own_s in sorted(own_by_step(peers).items()):
                    if step > last.get(role, -1) and own_s.keys() == awaited:
                        last[role] = step
                        self.own[step] |= {TraceRank(role, rank): s for rank, s in own_s.items()}
        return dict(sorted(self.own.items()))


def read_trace(lines: Iterable[str], traces: dict[int, StepTrace]) -> None:
    """Add the *lines* of one file to *traces*, which are by generation.

    Raises:
        ValueError: They are none of a trace of this version, or too many.
    """
    trace = StepTrace()
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if number == 1 or "schema" in line:
                if line["schema"] != SCHEMA:
                    raise ValueError(f"not {SCHEMA}")  # noqa: TRY301 gets its line
                trace = traces.setdefault(int(line["generation"]), StepTrace())
                trace.ranks.update(map(int, line["ranks"]))
            else:
                trace.take(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise ValueError(f"line {number} is none of a trace of steps: {exc!r}") from exc
