"""Workers under the shim serve torch's flight recorder, also while they hang."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.runs import wait_until

import gpuops.worker.shim
from gpuops.agent.monitors.evidence import EvidenceTarget
from gpuops.agent.monitors.recorder.reader import (
    RecorderError,
    read_body,
    read_recorders,
    recorder_env,
    recorder_paths,
)

SHIM = gpuops.worker.shim.__file__
# A child that was forked ends as Python does; the group is destroyed and made again; then rank 1
# keeps the interpreter's lock for ever (a mutex locked twice) and rank 0 waits for it. Rank 1 has a
# buffer of two entries.
JOB = """
import ctypes, os, sys
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
def meet(name):
    dist.init_process_group(
        "gloo", init_method=f"file://{os.getcwd()}/{name}", rank=rank, world_size=2
    )

if (child := os.fork()) == 0:
    sys.exit(0)
os.waitpid(child, 0)
meet("first")
for _ in range(5):
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
meet("second")
own = [dist.new_group([n]) for n in (0, 1)][rank]
dist.all_reduce(torch.ones(2), group=own)
for _ in range(3):
    dist.all_reduce(torch.ones(4, 4))
open(f"ready{rank}", "w").close()
if rank == 1:
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
dist.all_reduce(torch.ones(4, 4))
"""


@pytest.fixture(scope="module")
def folder():
    """A folder with a short path: the system allows 107 bytes for that of a socket."""
    path = Path(tempfile.mkdtemp(prefix="fr-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def targets(folder):
    """Two ranks that hang, rank 0 in gloo and rank 1 with the interpreter's lock."""
    (folder / "job.py").write_text(JOB)
    with contextlib.ExitStack() as stack:
        targets = []
        for rank in (0, 1):
            ring = folder / f"ring{rank}"
            log = stack.enter_context((folder / f"log{rank}").open("w"))
            env = {"PATH": "/usr/bin:/bin", "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            env |= {"TORCH_FR_BUFFER_SIZE": "2"} if rank == 1 else {}
            process = subprocess.Popen(
                [sys.executable, SHIM, "job.py"],
                cwd=folder,
                env=env | recorder_env(ring, rank),
                stderr=log,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            path, groups = recorder_paths(ring, rank)
            targets.append(
                EvidenceTarget(
                    rank=rank, local_rank=rank, pid=process.pid, recorder=path, groups=groups
                )
            )
        wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)), 60)
        wait_until(lambda: len(read_recorders(targets, 10.0)[0].calls) == 5, 60)
        yield targets


def calls_of(dump):
    return [(call.group, call.number, call.sizes, call.is_complete) for call in dump.calls]


@pytest.mark.torch
def test_ranks_that_hang_give_their_collectives(folder, targets):
    dumps = read_recorders(targets, 30.0)

    whole = [("0", number, ((4, 4),), True) for number in (1, 2, 3)]
    own = dumps[0].calls[0].group
    # Those of the group that was destroyed are not among them.
    assert calls_of(dumps[0]) == [(own, 1, ((2,),), True), *whole, ("0", 4, ((4, 4),), False)]
    # A buffer of two entries holds the newest.
    assert calls_of(dumps[1]) == whole[1:]
    assert dumps[0].members == {"0": (0, 1), own: (0,)}
    assert sorted(dumps[1].members.values()) == [(0, 1), (1,)]
    assert [(folder / f"log{rank}").read_text() for rank in (0, 1)] == ["", ""]


@pytest.mark.torch
def test_a_worker_that_is_stopped_does_not_answer(targets):
    path, groups = targets[1].recorder, targets[1].groups
    os.kill(targets[1].pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    with pytest.raises(RecorderError, match="timed out"):
        read_body(path, groups, pid=targets[1].pid, deadline_s=0.5)
    waited_s = time.monotonic() - begun_s
    os.kill(targets[1].pid, signal.SIGCONT)

    assert waited_s >= 0.5
    assert read_body(path, groups, pid=targets[1].pid, deadline_s=30.0)["entries"]
