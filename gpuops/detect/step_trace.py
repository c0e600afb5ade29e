"""The steps that ``gpuops run --record-steps`` writes down, read again. Pure.

Lines of JSON. The first of a file has the `SCHEMA`, the ``generation``, ``node`` and ``ranks``, and
``slow_after_s``, for how long a rank must be slow. A step has ``rank``, ``step``, ``time_us`` (its
end, since the epoch) and, where known, ``data_us``, ``optimizer_us`` and ``tokens`` (`Beat`). What
a monitor publishes for the leader has ``monitor``, ``published`` and ``time_us``; that of the
straggler monitor has the ranks' own times (`step_summary`), by which a run judges.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SCHEMA = "gpuops.step-trace/1"


class Published(NamedTuple):
    """What the straggler monitor of a node published, and when by the node's clock."""

    generation: int
    time_us: int
    node: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class StepTrace:
    """What is known of a run: how many steps all its ranks made, and what was published."""

    ranks: set[int] = field(default_factory=set)
    n_steps: int = 0
    slow_after_s: float = 0.0
    published: list[Published] = field(default_factory=list)

    def read(self, lines: Iterable[str]) -> None:
        """Add the *lines* of one file.

        Raises:
            ValueError: They are none of a trace of this version.
        """
        generation, node = -1, ""
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                if number == 1 or "schema" in line:
                    if line["schema"] != SCHEMA:
                        raise ValueError(f"not {SCHEMA}")  # noqa: TRY301 gets its line
                    generation, node = int(line["generation"]), str(line["node"])
                    self.ranks.update(map(int, line["ranks"]))
                    self.slow_after_s = float(line["slow_after_s"])
                elif line.get("monitor") == "straggler":
                    body = dict(line["published"])
                    self.published.append(Published(generation, int(line["time_us"]), node, body))
                else:
                    self.n_steps += "step" in line
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
                raise ValueError(f"line {number} is none of a trace of steps: {exc!r}") from exc
