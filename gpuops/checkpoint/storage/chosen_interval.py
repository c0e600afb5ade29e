"""What ``every="auto"`` had chosen when a state was saved, and by what; it is beside the state."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from gpuops.checkpoint.image import ImageLayout, parse_metadata_blob
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.types import CheckpointError, StateId
from gpuops.plan.failure_rate import FailureRate

AUTO = "auto"  # its name in what is saved beside the parts
SECONDS_MAX = 1e9
STEPS_MAX = 10**9
NODES_MAX = 10**6


@dataclass(frozen=True, slots=True)
class ChosenInterval:
    """Seconds are medians of what was measured; None: not measured by then.

    ``steps`` None: the first saves came before there was anything to choose by.
    """

    steps: int | None
    step_s: float | None
    stall_s: float | None
    restore_s: float | None
    n_nodes: int
    failures: FailureRate

    @property
    def interval_s(self) -> float | None:
        """Return the time between two saves."""
        if self.steps is None or self.step_s is None:
            return None
        return self.steps * self.step_s

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what *values* say.

        Raises:
            KeyError, TypeError, ValueError: Nothing of the kind.
        """
        steps = values["steps"]
        return cls(
            steps=None if steps is None else _bounded_int(steps, STEPS_MAX),
            step_s=_seconds(values["step_s"]),
            stall_s=_seconds(values["stall_s"]),
            restore_s=_seconds(values["restore_s"]),
            n_nodes=_bounded_int(values["n_nodes"], NODES_MAX),
            failures=FailureRate(
                _bounded_int(values["failures"], 10**9), _seconds(values["node_hours"], 1e12) or 0.0
            ),
        )


def read_chosen_interval(
    store: CheckpointStore, state: StateId, layout: ImageLayout
) -> ChosenInterval | None:
    """Return what is said beside the shard with *layout*; None where nothing is, or not to be read.

    It is not verified: the shard is not read for it.
    """
    begin, end = layout.metadata_blob.begin, layout.metadata_blob.end
    try:
        stored = json.loads(parse_metadata_blob(store.read_bytes(state, layout.shard, begin, end)))
        return ChosenInterval.from_json(stored[AUTO])
    except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _seconds(value: object, value_max: float = SECONDS_MAX) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is no number")
    if not (math.isfinite(value) and 0 <= value <= value_max):
        raise ValueError(f"{value!r:.40} is not from 0 to {value_max}")
    return float(value)


def _bounded_int(value: object, value_max: int) -> int:
    if type(value) is not int or not 0 <= value <= value_max:
        raise ValueError(f"{value!r:.40} is no whole number from 0 to {value_max}")
    return value
