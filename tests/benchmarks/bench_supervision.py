"""What supervision costs a healthy run: hook time per step, CPU of the agent, requests it sends.

A real ``gpuops run`` on two nodes (agents on loopback, the board over TCP), workers without torch
that step ten times a second. Once all step, the CPU time of each agent's process, and of the
board's server, is read from /proc at both ends of a quiet time.
Run as a script:

    python tests/benchmarks/bench_supervision.py --seconds 30 --out supervision.json
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_heartbeat import make_optimizer, make_ring, per_call_us
from support.cluster_run import ClusterRun
from support.hosts import Loopbacks

from gpuops.worker.heartbeat import Heartbeat

NODES = 2
STEP_S = 0.1
GOAL_PERCENT = 0.1  # of a step, for the hook
GOAL_CORE_PERCENT = 1.0
CALLS, BLOCKS = 100, 200
NS = 10**9


def hook_us():
    """Return the median time of one call of the hook, in microseconds."""
    optimizer, heart = make_optimizer("AdamW"), Heartbeat(make_ring())
    took = [per_call_us(lambda: heart(optimizer, (), {}), CALLS) for _ in range(BLOCKS)]
    return statistics.median(took)


def run_ns(pid):
    """Return the nanoseconds that each thread of *pid* has run."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        found[path.parent.name] = int(path.read_text().split()[0])
    return found


def cores(before, after, seconds):
    """Return the CPU seconds per second of a process between two readings."""
    return sum(ns - before.get(thread, 0) for thread, ns in after.items()) / NS / seconds


def server_pid(endpoint):
    """Return the process that serves the board at *endpoint*."""
    port = endpoint.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "gpuops.control.tcp.serve" in words and port in words:
            return process.pid
    raise RuntimeError("no board's server was found")


def measure(folder, nproc, seconds):
    """Return the cores that one agent and the server take, workers stepping."""
    env = {"JOB_STEPS": "1000000", "JOB_PAUSE_S": str(STEP_S), "OMP_NUM_THREADS": "1"}
    with (
        Loopbacks(NODES, folder) as hosts,
        ClusterRun(
            hosts, folder, "--health-gate=off", script="fake_steps.py", nproc=nproc, env=env
        ) as run,
    ):
        run.start()
        run.wait(lambda: len(run.worker_pids()) == NODES * nproc, "all workers", 300)
        # What follows a start (the first flush to the store) is not the rule.
        threading.Event().wait(20)
        agents = [run.state(host)["agent_pid"] for host in hosts]
        pids = [*agents, server_pid(run.endpoint)]
        before, began_s = [run_ns(pid) for pid in pids], time.monotonic()
        threading.Event().wait(seconds)
        after, took_s = [run_ns(pid) for pid in pids], time.monotonic() - began_s
        used = [cores(*pair, took_s) for pair in zip(before, after, strict=True)]
        run.enough()
        run.finish(limit_s=120)
    return {
        "agent_core_percent": round(100 * statistics.mean(used[:NODES]), 3),
        "server_core_percent": round(100 * used[NODES], 3),
    }


def main():
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    hook = hook_us()
    rows = {}
    for nproc in (1, 8):
        with tempfile.TemporaryDirectory(prefix="gpuops-bench-") as folder:
            rows[f"workers_{nproc}"] = measure(Path(folder), nproc, args.seconds)
    percent = 100 * hook / (STEP_S * 1e6)
    print(f"hook: {hook:.2f} us, {percent:.4f} % of a step of {1000 * STEP_S:g} ms")
    for name, row in rows.items():
        print(
            f"{name}: an agent takes {row['agent_core_percent']} % of a core, "
            f"the board's server {row['server_core_percent']} %"
        )
    result = {
        "what": "supervision of a healthy run: hook per step, agents' CPU",
        "goal_percent_of_a_step": GOAL_PERCENT,
        "goal_core_percent": GOAL_CORE_PERCENT,
        "step_ms": 1000 * STEP_S,
        "hook_us": round(hook, 2),
        "hook_percent_of_a_step": round(percent, 4),
        "seconds": args.seconds,
        **rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
