"""What the heartbeat costs per optimizer step.

Two ways: the hook's own time, called alone; and an optimizer step with and without the hook, in
blocks that alternate within one process (A/B), because the machine's speed drifts.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpuops.wire.ring import RING_BYTES, RingHeader, write_header
from gpuops.worker.heartbeat import Heartbeat

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
    alone = [per_call_us(lambda: heart(optimizer, (), {}), STEPS) for _ in range(BLOCKS)]
    without, with_hook = [], []
    for _ in range(BLOCKS):
        without.append(per_call_us(optimizer.step, STEPS))
        handle = register_optimizer_step_post_hook(heart)
        with_hook.append(per_call_us(optimizer.step, STEPS))
        handle.remove()
    pairs = [b - a for a, b in zip(without, with_hook, strict=True)]
    return {
        "hook_alone_median_us": round(statistics.median(alone), 2),
        "hook_alone_p99_us": round(statistics.quantiles(alone, n=100)[98], 2),
        "step_without_median_us": round(statistics.median(without), 2),
        "step_with_median_us": round(statistics.median(with_hook), 2),
        "difference_median_us": round(statistics.median(pairs), 2),
    }


def main():
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    rows = {name: measure(name) for name in ("AdamW", "SGD")}
    result = {"what": "heartbeat per optimizer step, microseconds", "goal_us": GOAL_US, **rows}
    print(
        f"{'optimizer':<10} {'hook alone':>10} {'p99':>7} {'step':>8} {'with hook':>10} {'diff':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:<10} {row['hook_alone_median_us']:>10} {row['hook_alone_p99_us']:>7} "
            f"{row['step_without_median_us']:>8} {row['step_with_median_us']:>10} "
            f"{row['difference_median_us']:>7}   us"
        )
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
