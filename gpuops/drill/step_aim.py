"""Whether a rank has come to a step: from its heartbeat ring, which it writes itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.drill.published import Published
from gpuops.wire import RingError, read_beats, read_header

RING_BYTES_MAX = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Which rank, and when: at *at_step* of *generation*, of any where that is None.

    The step is the ring's own; where the optimizer keeps none, its number of beats.
    """

    rank: int
    at_step: int
    generation: int | None = 0


@dataclass(frozen=True, slots=True)
class Target:
    """A process that has reached its step."""

    pid: int
    step: int


def find_target(aim: Aim, states: Sequence[Mapping[str, Any]]) -> Target | None:
    """Return the process that is meant if one of *states* shows that it got there."""
    for state in states:
        pids, generation = state.get("pids"), state.get("generation")
        pid = pids.get(str(aim.rank)) if isinstance(pids, dict) else None
        if aim.generation not in {None, generation} or state.get("phase") != "running":
            continue
        if isinstance(pid, int) and isinstance(generation, int):
            ring = Path(str(state.get("ring_dir"))) / f"rank{aim.rank}.ring"
            step = step_of(aim.rank, generation, pid, ring)
            if step is not None and step >= aim.at_step:
                return Target(pid, step)
    return None


def has_come_to(aim: Aim, states: Sequence[Published]) -> bool:
    """Say whether one of *states* shows the rank of *aim* at its step."""
    for state in states:
        if aim.generation in {None, state.generation} and aim.rank in state.pids:
            ring = state.ring_dir / f"rank{aim.rank}.ring"
            step = step_of(aim.rank, state.generation, state.pids[aim.rank], ring)
            if state.phase == "running" and step is not None and step >= aim.at_step:
                return True
    return False


def step_of(rank: int, generation: int, pid: int, ring: Path) -> int | None:
    """Return the newest step in *ring*, None where it is not this process' ring."""
    try:
        with ring.open("rb") as file:
            data = file.read(RING_BYTES_MAX)
        header = read_header(data)
        beats = read_beats(data, max(0, header.head - 2))
    except (OSError, RingError, ValueError):
        return None
    if not beats or (header.rank, header.generation, header.pid) != (rank, generation, pid):
        return None
    return beats[-1].step if beats[-1].step >= 0 else beats[-1].seq
