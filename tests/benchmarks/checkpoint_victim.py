"""A process that makes workers that save until they are killed.

Each line of input, JSON, makes one worker: a fork of this process, which has imported torch already
and does nothing else. The worker goes on from what there is, makes every number of its state the
number of the step, and saves, again and again. It prints ``committed PID STEP`` once a state of its
own is committed; ``ended`` comes when it is gone.
"""

import json
import os
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from gpuops.worker.bench.savers import BenchJob, connect_only_rank
from gpuops.worker.checkpointer import Checkpointer

_PAUSE_S = 0.001
NOTE = "=qq"  # the last two steps for which the call that saves them has returned


def fill(subject: BenchJob, value: int) -> None:
    """Make every number of the state *value*."""
    for tensor in subject.tensors():
        tensor.fill_(float(value))


def is_filled(subject: BenchJob, value: int) -> bool:
    """Say whether every number of the state is *value*."""
    return all(bool(torch.all(tensor == float(value))) for tensor in subject.tensors())


def main() -> None:
    """Make a worker for each line, one at a time."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                work(json.loads(line))
            except BaseException:  # noqa: BLE001 boundary: a forked worker never returns
                traceback.print_exc()
            os._exit(1)
        os.waitpid(pid, 0)
        print("ended", flush=True)


def work(request: dict[str, Any]) -> None:
    """Save for ever."""
    subject = BenchJob(request["nbytes"], request["n_tensors"])
    keeper = connect_only_rank(Path(request["socket"]))
    checkpointer = Checkpointer(
        model=subject.model,
        optimizer=subject.optimizer,
        every=1,
        directory=request["directory"],
        persist_every=0.0,
        keep_last=2,
        keeper=keeper,
    )
    step = start = checkpointer.restore()
    is_reported = False
    saved, previous = start, start
    note = os.open(request["note"], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        step += 1
        fill(subject, step)
        checkpointer.step(step)
        if checkpointer.stats["last_step"] == step:
            saved, previous = step, saved
            os.pwrite(note, struct.pack(NOTE, saved, previous), 0)
        if not is_reported:
            newest = keeper.stats()["newest"]
            if newest and newest[1] > start:
                print("committed", os.getpid(), newest[1], flush=True)
                is_reported = True
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
