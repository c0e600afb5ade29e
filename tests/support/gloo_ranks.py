"""Ranks of one training job as processes, over gloo, with a keeper or without."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import torch

from support.warm_python import warm_popen

JOB = Path(__file__).parents[1] / "fixtures" / "jobs" / "checkpointed_train.py"
LIMIT_S = 150.0


def run_ranks(folder, world, job, *, keeper=None, env=None, script=JOB, nodes=()):
    """Run *world* ranks to their end; return the results they wrote, in order of rank."""
    codes = codes_of_ranks(folder, world, job, keeper=keeper, env=env, script=script, nodes=nodes)
    wanted = -signal.SIGKILL if job.get("die") else 0
    assert codes == [wanted] * world, said(folder, world, job["name"])
    return results_of(folder, world, job)


def codes_of_ranks(folder, world, job, *, keeper=None, env=None, script=JOB, nodes=()):
    """Run *world* ranks to their end; return their exit codes."""
    more = {"JOB_DIR": str(folder), "JOB": json.dumps(job)}
    if keeper is not None:
        more["GPUOPS_KEEPER"] = str(keeper)
    return run_script(folder, world, script, job["name"], env=more | (env or {}), nodes=nodes)


def results_of(folder, world, job):
    """Return what the ranks of *job* wrote, in order of rank."""
    return [
        torch.load(folder / f"result-{rank}-{job['name']}", weights_only=False)
        for rank in range(world)
    ]


def run_script(folder, world, script, name, *, env, nodes=()):
    """Run *script* as *world* ranks of this machine to their end; return their exit codes.

    They find each other through the file that ``GLOO_STORE`` names. *nodes*: of each the socket of
    its keeper and how many ranks it has; none: they are all on one.
    """
    places = [(n, count, keeper) for keeper, count in nodes for n in range(count)]
    store = folder / f"store-{uuid.uuid4().hex}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUOPS_")}
    # A rank that crashes tells where: its log is in the message of the test that fails.
    common = kept | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    common |= {"GLOO_STORE": f"file://{store}"} | env
    processes = []
    for rank in range(world):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
        }
        if places:
            local_rank, count, keeper = places[rank]
            own |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(count)}
            own["GPUOPS_KEEPER"] = str(keeper)
        with (folder / f"log-{rank}-{name}").open("w") as log:
            processes.append(
                warm_popen(
                    [sys.executable, "-W", "error::ResourceWarning", str(script)],
                    env=common | own,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        return [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def said(folder, world, name):
    """Return what the ranks wrote."""
    return "\n".join((folder / f"log-{rank}-{name}").read_text() for rank in range(world))
