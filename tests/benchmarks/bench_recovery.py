"""SIGKILL of a rank to the job's first new step: gpuops run beside torchrun, and the floor.

Each round starts the same script on two ranks three times, in turn: alone (process start, import
torch, init_process_group, first step: the floor that no launcher can beat), under ``gpuops run``
and under ``torchrun --standalone --max-restarts 3``. Under a launcher one rank gets SIGKILL at its
tenth step. A launcher that shows no new step within the limit has not recovered.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "jobs" / "stamped.py"
WORLD = 2
STEPS_BEFORE_KILL = 10
START_LIMIT_S = 60


def environment(folder):
    """Return the environment of a launcher: its own store, one thread a process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUOPS_", "PET_", "SLURM"))}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "GPUOPS_STORE": f"sqlite:///{folder}/gpuops.db",
        "GPUOPS_SPOOL": f"{folder}/spool",
        "GPUOPS_STATE": f"{folder}/state",
        "GPUOPS_RUN_DIR": f"{folder}/runs",
    }


def steps(folder):
    """Return the step times in seconds by (rank, pid)."""
    found = {}
    for path in folder.glob("*.*"):
        lines = path.read_text().split("\n")[:-1]
        if lines:
            rank, pid = map(int, path.name.split("."))
            found[rank, pid] = [int(line) / 1e9 for line in lines]
    return found


def wait_for(condition, limit_s):
    """Return what *condition* returns once it is true, None after *limit_s*."""
    pause = threading.Event()
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if result := condition():
            return result
        pause.wait(0.01)
    return None


def everyone_steps(folder, count, without=frozenset()):
    """Return the steps of *WORLD* processes that all made *count*, None before."""
    found = {k: v for k, v in steps(folder).items() if k not in without and len(v) >= count}
    return found if len({rank for rank, _pid in found}) == WORLD else None


def floor():
    """Return the seconds from starting two bare processes to the first step of both."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        env = environment(folder) | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(WORLD),
        }
        (folder / "steps").mkdir()
        start = time.monotonic()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-u", str(SCRIPT), str(folder / "steps")],
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(WORLD)
        ]
        try:
            found = wait_for(lambda: everyone_steps(folder / "steps", 1), START_LIMIT_S)
            return max(times[0] for times in found.values()) - start
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def recovery(launcher, victim, limit_s):
    """Return the seconds from SIGKILL of rank *victim* to the first new step, None for never."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        job = subprocess.Popen(
            [sys.executable, "-m", *launcher, str(SCRIPT), str(folder / "steps")],
            env=environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            before = wait_for(
                lambda: everyone_steps(folder / "steps", STEPS_BEFORE_KILL), START_LIMIT_S
            )
            pid = next(pid for rank, pid in before if rank == victim)
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            after = wait_for(lambda: everyone_steps(folder / "steps", 1, before.keys()), limit_s)
            return max(times[0] for times in after.values()) - killed if after else None
        finally:
            end(job, folder)


def end(job, folder):
    """End the launcher and whatever workers it may have left."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(10)
    job.kill()
    job.wait()
    for path in (folder / "steps").glob("*.*"):
        pid = int(path.name.partition(".")[2])
        with contextlib.suppress(OSError):
            if str(folder) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)


LAUNCHERS = {
    "gpuops run": ["gpuops", "run", "--standalone", f"--nproc-per-node={WORLD}"],
    "torchrun": [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={WORLD}",
        "--max-restarts=3",
    ],
}


def summary(times):
    """Return the figures of one launcher; seconds."""
    good = [t for t in times if t is not None]
    return {
        "recovered": len(good),
        "of": len(times),
        "median_s": round(statistics.median(good), 3) if good else None,
        "worst_s": round(max(good), 3) if good else None,
        "all_s": [None if t is None else round(t, 3) for t in times],
    }


def main():
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--limit", type=float, default=40.0, help="seconds until it is a failure")
    parser.add_argument("--only", choices=LAUNCHERS, help="one launcher, for a quick look")
    args = parser.parse_args()
    chosen = {k: v for k, v in LAUNCHERS.items() if args.only in {None, k}}
    floors, times = [], {name: [] for name in chosen}
    for number in range(args.kills):
        floors.append(floor())
        for name, launcher in chosen.items():
            times[name].append(recovery(launcher, number % WORLD, args.limit))
        shown = ", ".join(f"{n} {t[-1] and round(t[-1], 2)}" for n, t in times.items())
        print(f"  kill {number + 1}: floor {floors[-1]:.2f}, {shown}", flush=True)
    result = {
        "what": "SIGKILL of one of two ranks to the first new step of the slower rank, seconds",
        "floor_median_s": round(statistics.median(floors), 3),
        "floor_all_s": [round(value, 3) for value in floors],
        "launchers": {name: summary(values) for name, values in times.items()},
    }
    print(f"\nrestart floor (start, import torch, init, first step): {result['floor_median_s']} s")
    print(f"{'launcher':<12} {'recovered':>10} {'median':>8} {'worst':>8} {'over floor':>11}")
    for name, row in result["launchers"].items():
        over = None if row["median_s"] is None else row["median_s"] - result["floor_median_s"]
        print(
            f"{name:<12} {row['recovered']:>7}/{row['of']:<2} {row['median_s']!s:>8} "
            f"{row['worst_s']!s:>8} {'-' if over is None else format(over, '+.2f'):>11}"
        )
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
