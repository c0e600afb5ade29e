"""What torch does without gpuops: the same work as burn-in's programs, in a loop and nothing else.

It prints the median rate of all repeats: TFLOP/s of a product, GB/s of a copy and of an all_reduce
(bus bandwidth; of two ranks it is the bandwidth).
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

REPEATS = 20


def repeated(once, amount, seconds):
    """Return *amount* per second of *once*, of each of about `REPEATS` batches of calls."""
    ends_s, calls = time.perf_counter() + seconds / 10, 0
    while time.perf_counter() < ends_s or calls < 2:
        once()
        calls += 1
    return [batch(once, amount, max(1, round(10 * calls / REPEATS))) for _ in range(REPEATS)]


def batch(once, amount, calls):
    """Return *amount* per second of *calls* calls."""
    began_s = time.perf_counter()
    for _ in range(calls):
        once()
    return amount * calls / (time.perf_counter() - began_s)


def gemm(options):
    """Return the rates of a square product in fp32."""
    torch.set_float32_matmul_precision("highest")
    a, b = (torch.rand(options.size, options.size) for _ in range(2))
    out = torch.empty_like(a)
    amount = 2 * options.size**3 / 1e12
    return repeated(lambda: torch.matmul(a, b, out=out), amount, options.seconds)


def copy(options):
    """Return the rates of a copy of *size* bytes, which are read and written."""
    source = torch.ones(options.size // 4)
    target = torch.empty_like(source)
    return repeated(lambda: target.copy_(source), 2 * options.size / 1e9, options.seconds)


def all_reduce(options):
    """Return the bus bandwidth of each call between two ranks."""
    meet = f"file://{options.meet}"
    dist.init_process_group("gloo", init_method=meet, rank=options.rank, world_size=2)
    buffer, amount = torch.zeros(options.size // 4), options.size / 1e9
    for _ in range(2):
        dist.all_reduce(buffer)
    dist.barrier()
    rates = [batch(lambda: dist.all_reduce(buffer), amount, 1) for _ in range(options.calls)]
    dist.destroy_process_group()
    return rates


WORK = {"gemm": gemm, "copy": copy, "all_reduce": all_reduce}


def main():
    """Measure one kind of work, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORK)
    parser.add_argument("--cpus", required=True, help="0,1")
    parser.add_argument("--size", type=int, required=True, help="rows, or bytes of a buffer")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meet", help="a file that does not exist yet")
    options = parser.parse_args()
    cpus = [int(cpu) for cpu in options.cpus.split(",")]
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))
    print(json.dumps(statistics.median(WORK[options.work](options))))


if __name__ == "__main__":
    main()
