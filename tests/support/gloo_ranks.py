"""Ranks of one training job as processes, over gloo, with a keeper or without."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import torch

JOB = Path(__file__).parents[1] / "fixtures" / "jobs" / "checkpointed_train.py"
LIMIT_S = 150.0


def run_ranks(folder, world, job, *, keeper=None, env=None):
    """Run *world* ranks to their end; return the results they wrote, in order of rank."""
    store = folder / f"store-{uuid.uuid4().hex}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUOPS_")}
    common = kept | {"JOB_DIR": str(folder), "JOB": json.dumps(job), "OMP_NUM_THREADS": "1"}
    if keeper is not None:
        common["GPUOPS_KEEPER"] = str(keeper)
    processes = []
    for rank in range(world):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
        }
        argv = [sys.executable, "-W", "error::ResourceWarning", str(JOB)]
        log = (folder / f"log-{rank}-{job['name']}").open("w")
        with log:
            processes.append(
                subprocess.Popen(
                    argv,
                    env=common | own | (env or {}) | {"GLOO_STORE": f"file://{store}"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    wanted = -signal.SIGKILL if job.get("die") else 0
    assert codes == [wanted] * world, said(folder, world, job["name"])
    return [
        torch.load(folder / f"result-{rank}-{job['name']}", weights_only=False)
        for rank in range(world)
    ]


def said(folder, world, name):
    """Return what the ranks wrote."""
    return "\n".join((folder / f"log-{rank}-{name}").read_text() for rank in range(world))
