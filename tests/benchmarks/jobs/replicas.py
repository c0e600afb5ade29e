"""A data-parallel job that measures each save beside what two halves of its state take.

``replicas.py BYTES ROUNDS OUT``: rank r writes its seconds to ``OUT/r.json``. Right before and
after each save all ranks, at the same time, copy their share of the state into memory of their own,
and hash the rest: what a rank does of a state that it holds alike with the others.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import gpuops
from gpuops.checkpoint.digest import compute_digest
from gpuops.worker.bench.savers import bytes_of, warm_copies

N_TENSORS = 100  # of parameters, and as many of momenta
COMMIT_S = 120

torch.set_num_threads(1)
dist.init_process_group("gloo")
nbytes, n_rounds, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body = torch.nn.ParameterList(torch.ones(nbytes // (2 * N_TENSORS) // 4) for _ in range(N_TENSORS))


class Model(torch.nn.Module):
    """Uses a little of each parameter: all of them have a gradient."""

    def __init__(self):
        super().__init__()
        self.body = body

    def forward(self, x):
        return sum((parameter[:8] * x).sum() for parameter in self.body)


model = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)


def train():
    model(torch.randn(8)).backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(function, *args):
    dist.barrier()
    begun_s = time.perf_counter()
    function(*args)
    return time.perf_counter() - begun_s


def await_commit(ck, step):
    end_s = time.monotonic() + COMMIT_S
    while (ck.stats["keeper"]["persisted"] or [0, 0])[1] < step:
        if time.monotonic() > end_s:
            raise TimeoutError(f"step {step} is not on disk: {ck.stats}")
        time.sleep(0.05)
    dist.barrier()


with gpuops.Checkpointer(
    model=model, optimizer=optimizer, every=1, directory=out / "ck", persist_every=0.0
) as ck:
    ck.restore()
    train()
    tensors = [p.detach() for p in body]
    tensors += [optimizer.state[p]["momentum_buffer"] for p in body]
    own = tensors[rank::world]
    others = [tensor for at, tensor in enumerate(tensors) if at % world != rank]
    _, targets = warm_copies(own)

    def copy_and_hash():
        torch._foreach_copy_(targets, own)
        for tensor in others:
            compute_digest(bytes_of(tensor))

    copy_and_hash()
    rows = []
    for step in range(1, n_rounds + 2):
        before_s = timed(copy_and_hash)
        stall_s = timed(ck.step, step)
        await_commit(ck, step)
        rows.append([before_s, stall_s, timed(copy_and_hash)])
        train()
    reserved_bytes = ck.stats["keeper"]["reserved_bytes"]
found = {
    "rows": rows,
    "state_bytes": sum(tensor.nbytes for tensor in tensors),
    "reserved_bytes": reserved_bytes,
}
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
