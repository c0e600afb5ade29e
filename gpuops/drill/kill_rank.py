"""Kill one rank of a running job at a step.

``python -m gpuops.drill.kill_rank --run-dir D --rank R --at-step K --deadline S`` waits
for the rank to have made so many steps. It reads what the agent publishes (``state.json``, the
rank's ring) and nothing else; exits 0 after the kill, 1 if the deadline passed first, 64 for
arguments that make no sense. A process is only killed if it is the one whose ring was read: same
pid, same start time, before and after a pidfd was opened.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

from gpuops.drill.run_state import RankAtStep, StepTrigger, find_rank_at_step, read_raw_states
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_USAGE
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.procfs import Process, process

POLL_S = 0.005


def kill_process(pid: int, seen: Process | None) -> bool:
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


def kill_at_step(
    trigger: StepTrigger,
    directory: Path,
    deadline_s: float,
    clock: Clock,
    wait: Callable[[float], object],
) -> RankAtStep | None:
    """Kill the rank when it is there; return it, None if *deadline_s* passed first."""
    end_ns = clock.mono_ns() + round(deadline_s * 1e9)
    seen: dict[int, Process | None] = {}
    while clock.mono_ns() < end_ns:
        states = read_raw_states(directory)
        for state in states:
            for pid in (state.get("pids") or {}).values():
                seen.setdefault(pid, process(pid))
        target = find_rank_at_step(trigger, states)
        if target is not None and kill_process(target.pid, seen.get(target.pid)):
            return target
        wait(POLL_S)
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
    trigger = StepTrigger(rank=args.rank, at_step=args.at_step, generation=args.generation)
    target = kill_at_step(trigger, args.run_dir, args.deadline, SystemClock(), Event().wait)
    if target is None:
        sys.stderr.write(
            f"kill_rank: rank {trigger.rank} was not at step {trigger.at_step} of generation "
            f"{trigger.generation} below {args.run_dir} within {args.deadline:g} s\n"
        )
        return EXIT_FAIL
    sys.stderr.write(
        f"kill_rank: sent SIGKILL to rank {trigger.rank} (pid {target.pid}) at step {target.step}\n"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
