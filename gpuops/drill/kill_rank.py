"""Fault injector: end one rank of a running job by a signal, SIGKILL unless another is named.

Also ``python -m gpuops.drill.kill_rank --run-dir D --rank R --at-step K --deadline S``, which waits
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

from gpuops.drill.fault import Fault, strike
from gpuops.drill.published import newest_states
from gpuops.drill.scenario import Scenario, Scene, Wanted, aim, needed_rank, rank_entity
from gpuops.drill.step_aim import Aim, Target, find_target
from gpuops.drill.victims import worker_of
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_USAGE, UsageError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.procfs import Process, process

LOOK_EVERY_S = 0.005
# What ends a process and is seen in the field: crashes, aborts of a watchdog, the OOM killer.
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGTERM")


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: one signal to one rank."""
    rank, name = needed_rank(wanted), wanted.signal or "SIGKILL"
    if name not in SIGNALS:
        raise UsageError(f"--signal {name}: a rank is ended by one of {', '.join(SIGNALS)}")
    state, agent = aim(scene, wanted, rank=rank)
    victim = worker_of(state, rank, agent)
    return Fault(
        scenario="kill-rank",
        breaks=f"{victim} on node {state.node} gets {name}.",
        undone="Nothing undoes it: the run restarts its workers, or ends.",
        entities=rank_entity(rank),
        changes=strike((victim,), name),
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="kill-rank",
    summary="End one rank by a signal (SIGKILL).",
    options=("node", "rank", "signal"),
    plan=plan,
)


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
