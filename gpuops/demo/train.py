"""A small real training job: a byte-level transformer over the runbooks that ship with gpuops.

It is an ordinary torch script, and runs under plain ``torchrun`` as well. From gpuops it uses the
folder of its text and three lines for checkpointing: the `Checkpointer` is given the objects to
save, `restore` returns how many steps are done, and `step` saves the state after each. The saved
state includes the position in the data stream, so that the losses after a restart are bit for bit
those of a run without a failure.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gpuops
from gpuops.resources import data_dir

VOCABULARY = 256
CONTEXT = 96
WIDTH = 96
HEADS = 4
LAYERS = 3
BATCH = 8


class Block(nn.Module):
    """One pre-norm transformer block; x is (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time_steps, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time_steps, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_steps, WIDTH))
        widened: Tensor = self.mlp(self.norm_mlp(x))
        return x + widened


class Transformer(nn.Module):
    """A causal language model over bytes; tokens (batch, time) to logits (batch, time, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def read_text() -> Tensor:
    """Return the bytes of every shipped runbook as one tensor, uint8, shape (bytes,)."""
    paths = sorted(data_dir("runbooks").glob("*.md"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def batches(text: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, each (BATCH, CONTEXT) of int64, as *generator* draws them."""
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
        yield windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train for ``--steps`` steps and print the loss as it falls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Transformer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    drawing = torch.Generator().manual_seed(args.seed * 1000 + rank)  # each rank its own data
    checkpointer = gpuops.Checkpointer(
        model=model, optimizer=optimizer, extra={"data": drawing}, every=1
    )
    start = checkpointer.restore()
    if start and rank == 0:
        sys.stdout.write(f"rank 0  resumes after step {start}\n")

    started = time.monotonic()
    stream = batches(read_text(), drawing)
    for step in range(start + 1, args.steps + 1):
        inputs, targets = next(stream)
        logits = model(inputs.to(device))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(step)
        if step == 1 or step % 40 == 0:
            elapsed_s = time.monotonic() - started
            sys.stdout.write(
                f"rank {rank}  step {step:3d}  loss {loss.item():.3f}  {elapsed_s:5.1f} s\n"
            )
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
