"""What data-parallel ranks of one node, which hold all of their state alike, take to save it.

Bytes in memory and on disk for 1, 2, 4 and 8 ranks, by real runs; and for two ranks the stall of a
save beside two processes that each copy one half and hash the other, right before and after it.

    python tests/benchmarks/bench_replicas.py --size 2GB --rounds 7 --out replicas.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpuops.config.resolve import environ
from gpuops.units import parse_bytes
from gpuops.worker.bench.figures import count_quiet, quiet_rounds, summarize
from gpuops.worker.bench.limits import Limits, Surroundings

JOB = Path(__file__).parent / "jobs" / "replicas.py"
WORLDS = (1, 2, 4, 8)
SMALL_BYTES = 64 * 10**6
SLOTS = 2  # as `Checkpointer` has, unless configured
MB = 10**6
STALL_MAX = 1.15


def run_job(world, nbytes, n_rounds, folder):
    """Run the job; return what each rank wrote, and the bytes of its newest state on disk."""
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "gpuops", "run", f"--nproc-per-node={world}"]
    command += ["--health-gate=off", f"--run-dir={out}/run", str(JOB)]
    env = {**environ(), "GPUOPS_STORE": f"sqlite:///{out}/store.db"}
    done = subprocess.run(
        [*command, str(nbytes), str(n_rounds), str(out)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{world} ranks: exit {done.returncode}\n{done.stderr[-2000:]}")
    newest = max((out / "ck").glob("step-*"))
    disk_bytes = sum(entry.stat().st_size for entry in os.scandir(newest))
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
    shutil.rmtree(out)
    return ranks, disk_bytes


def bytes_row(world, folder):
    """Return the bytes of a state in memory and on disk, and whether the goal is met."""
    ranks, disk_bytes = run_job(world, SMALL_BYTES, 1, folder)
    state_bytes = ranks[0]["state_bytes"]
    memory_bytes = ranks[0]["reserved_bytes"] // SLOTS
    return {
        "ranks": world,
        "state_bytes": state_bytes,
        "memory_bytes": memory_bytes,
        "disk_bytes": disk_bytes,
        "met": max(memory_bytes, disk_bytes) <= state_bytes + world * MB,
    }


def stall_row(nbytes, n_rounds, folder):
    """Return the stall of a save of two ranks: its seconds, and its ratio to the limit."""
    ranks, _ = run_job(2, nbytes, n_rounds, folder)
    # A save holds training up until the slowest rank goes on; so does the limit.
    rounds = [
        [max(seconds) for seconds in zip(*rows, strict=True)]
        for rows in zip(*(rank["rows"] for rank in ranks), strict=True)
    ]
    around = {
        at: Surroundings(Limits(before_s), Limits(after_s))
        for at, (before_s, _, after_s) in enumerate(rounds)
    }
    ratio = summarize(rounds[at][1] / around[at].mean.memcpy_s for at in quiet_rounds(around))
    return {
        "nbytes": ranks[0]["state_bytes"],
        "limit_s": summarize(each.mean.memcpy_s for each in around.values()),
        "stall_s": summarize(stall_s for _, stall_s, _ in rounds),
        "stall over halves": ratio,
        "quiet_rounds": count_quiet(around),
        "goal": STALL_MAX,
        "met": ratio["median"] <= STALL_MAX,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuops-bench-", dir=args.dir.absolute()) as folder:
        rows = [bytes_row(world, folder) for world in WORLDS]
        for row in rows:
            more = max(row["memory_bytes"], row["disk_bytes"]) / row["state_bytes"]
            print(f"{row['ranks']} ranks: {more:.4f} x the state, met: {row['met']}")
        stall = stall_row(parse_bytes(args.size), args.rounds, folder)
        ratio = stall["stall over halves"]
        print(
            f"two ranks, {args.size}: a save takes {ratio['median']:.2f} x two processes that each "
            f"copy one half and hash the other ({ratio['min']:.2f}-{ratio['max']:.2f}, goal "
            f"{STALL_MAX}), {stall['quiet_rounds']['quiet']} of {stall['quiet_rounds']['of']} "
            "rounds quiet"
        )
    if args.out:
        args.out.write_text(json.dumps({"bytes": rows, "stall": stall}, indent=1) + "\n")


if __name__ == "__main__":
    main()
