"""Fault injector: SIGKILL one rank of a running job once it has made a given number of steps.

``python -m gpuops.drill.kill_rank --run-dir D --rank R --at-step K --deadline S``. Reads what the
agent publishes (``state.json``, the rank's ring) and nothing else; exits 0 after the kill, 1 if
the deadline passed first, 64 for arguments that make no sense. A process is only killed if it is
the one whose ring was read: same pid, same start time, before and after a pidfd was opened.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_USAGE
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.procfs import Process, process
from gpuops.wire import RingError, read_beats, read_header

LOOK_EVERY_S = 0.005
STATE_BYTES_MAX = 2**20
RING_BYTES_MAX = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Which rank to kill, and when: at *at_step* of *generation*.

    The step is the ring's own; where the optimizer keeps none, its number of beats.
    """

    rank: int
    at_step: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """A process that has reached its step."""

    pid: int
    step: int


def newest_states(directory: Path) -> list[dict[str, Any]]:
    """Return the run states in *directory*, a run's own folder or the parent of several.

    Of a parent only the newest run counts: folder names begin with the time.
    """
    runs = [directory] if _state_files(directory) else sorted(_children(directory), reverse=True)
    for run in runs:
        states = [state for path in _state_files(run) if (state := _read_state(path)) is not None]
        if states:
            return states
    return []


def _children(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []


def _state_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("state*.json"))


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            state = json.loads(file.read(STATE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def find_target(aim: Aim, states: Sequence[dict[str, Any]]) -> Target | None:
    """Return the process to kill if one of *states* shows that it got there."""
    for state in states:
        pids = state.get("pids")
        pid = pids.get(str(aim.rank)) if isinstance(pids, dict) else None
        if state.get("generation") != aim.generation or state.get("phase") != "running":
            continue
        if isinstance(pid, int):
            step = _step_of(aim, pid, Path(str(state.get("ring_dir"))) / f"rank{aim.rank}.ring")
            if step is not None and step >= aim.at_step:
                return Target(pid, step)
    return None


def _step_of(aim: Aim, pid: int, ring: Path) -> int | None:
    try:
        with ring.open("rb") as file:
            data = file.read(RING_BYTES_MAX)
        header = read_header(data)
        beats = read_beats(data, max(0, header.head - 2))
    except (OSError, RingError, ValueError):
        return None
    if not beats or (header.rank, header.generation, header.pid) != (
        aim.rank,
        aim.generation,
        pid,
    ):
        return None
    return beats[-1].step if beats[-1].step >= 0 else beats[-1].seq


def kill(pid: int, seen: Process | None) -> bool:
    """SIGKILL *pid* if it is still the process that was *seen*; say whether it was."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        now = process(pid)
        if seen is None or now is None or now.start_ticks != seen.start_ticks:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def run(
    aim: Aim, directory: Path, deadline_s: float, clock: Clock, wait: Callable[[float], object]
) -> Target | None:
    """Kill the rank when it is there; return it, None if *deadline_s* passed first."""
    end_ns = clock.mono_ns() + round(deadline_s * 1e9)
    seen: dict[int, Process | None] = {}
    while clock.mono_ns() < end_ns:
        states = newest_states(directory)
        for state in states:
            for pid in (state.get("pids") or {}).values():
                seen.setdefault(pid, process(pid))
        target = find_target(aim, states)
        if target is not None and kill(target.pid, seen.get(target.pid)):
            return target
        wait(LOOK_EVERY_S)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, wait, kill, and say so."""
    parser = argparse.ArgumentParser(prog="gpuops.drill.kill_rank", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="a run's folder or its parent")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--at-step", type=int, required=True)
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    try:
        args = parser.parse_args(arguments)
    except SystemExit as exc:
        return EXIT_USAGE if exc.code else EXIT_OK
    aim = Aim(rank=args.rank, at_step=args.at_step, generation=args.generation)
    target = run(aim, args.run_dir, args.deadline, SystemClock(), Event().wait)
    if target is None:
        sys.stderr.write(
            f"kill_rank: rank {aim.rank} was not at step {aim.at_step} of generation "
            f"{aim.generation} below {args.run_dir} within {args.deadline:g} s\n"
        )
        return EXIT_FAIL
    sys.stderr.write(
        f"kill_rank: sent SIGKILL to rank {aim.rank} (pid {target.pid}) at step {target.step}\n"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
