"""What the heartbeat costs per optimizer step.

Two ways: the hooks' own time, called alone; and an optimizer step with and without the hooks, in
blocks that alternate within one process (A/B), because the machine's speed drifts. And what timing
torch's data loader adds to each batch of it, called alone.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gpuops.wire.ring import RING_BYTES, RingHeader, write_header
from gpuops.worker.heartbeat import Heartbeat
from gpuops.worker.optimizer_hook import LoaderTime, _time_loader

BLOCKS = 300
STEPS = 50
GOAL_US = 20.0


def make_ring():
    """Return an empty ring."""
    ring = bytearray(RING_BYTES)
    write_header(ring, RingHeader(rank=0, generation=0, pid=1, start_mono_ns=0))
    return memoryview(ring)


def make_optimizer(name):
    """Return an optimizer whose state exists, and its parameters' gradients."""
    model = torch.nn.Linear(64, 64)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return optimizer


def per_call_us(call, count):
    """Return the mean microseconds of *count* calls."""
    start = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - start) / count / 1000


def measure(name):
    """Return the figures for one optimizer, microseconds per step."""
    optimizer, heart = make_optimizer(name), Heartbeat(make_ring())

    def hooks():
        heart.begin_step(optimizer, (), {})
        heart(optimizer, (), {})

    alone = [per_call_us(hooks, STEPS) for _ in range(BLOCKS)]
    without, with_hook = [], []
    for _ in range(BLOCKS):
        without.append(per_call_us(optimizer.step, STEPS))
        handles = [
            register_optimizer_step_post_hook(heart),
            register_optimizer_step_pre_hook(heart.begin_step),
        ]
        with_hook.append(per_call_us(optimizer.step, STEPS))
        for handle in handles:
            handle.remove()
    pairs = [b - a for a, b in zip(without, with_hook, strict=True)]
    return {
        "hook_alone_median_us": round(statistics.median(alone), 2),
        "hook_alone_p99_us": round(statistics.quantiles(alone, n=100)[98], 2),
        "step_without_median_us": round(statistics.median(without), 2),
        "step_with_median_us": round(statistics.median(with_hook), 2),
        "difference_median_us": round(statistics.median(pairs), 2),
    }


def measure_loader():
    """Return what timing it adds to one batch of the loader, microseconds."""
    module = ModuleType("dataloader")
    module._BaseDataLoaderIter = iterator = type("Iterator", (), {"__next__": lambda _: None})
    plain, batches = iterator.__next__, iterator()
    _time_loader(module, LoaderTime())
    timed = iterator.__next__
    pairs = [
        per_call_us(lambda: timed(batches), STEPS) - per_call_us(lambda: plain(batches), STEPS)
        for _ in range(BLOCKS)
    ]
    return {"loader_median_us": round(statistics.median(pairs), 2)}


def main():
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    rows = {name: measure(name) for name in ("AdamW", "SGD")}
    result = {"what": "heartbeat per optimizer step, microseconds", "goal_us": GOAL_US, **rows}
    result |= measure_loader()
    print(
        f"{'optimizer':<10} {'hook alone':>10} {'p99':>7} {'step':>8} {'with hook':>10} {'diff':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:<10} {row['hook_alone_median_us']:>10} {row['hook_alone_p99_us']:>7} "
            f"{row['step_without_median_us']:>8} {row['step_with_median_us']:>10} "
            f"{row['difference_median_us']:>7}   us"
        )
    print(f"one batch of torch's data loader: {result['loader_median_us']} us more")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
