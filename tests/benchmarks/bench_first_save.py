"""The stall of a job's first two saves as a multiple of its later ones, and what `restore` takes.

Each round is a new process with a keeper of its own, for each optimizer in turn: AdamW makes its
state in its first step, the other has none. A save begins once the one before is committed.

    python tests/benchmarks/bench_first_save.py --size 512MB --rounds 7 --out first_save.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from gpuops.units import parse_bytes
from gpuops.worker.bench.savers import connect_only_rank, start_keeper
from gpuops.worker.checkpointer import Checkpointer

GOAL = 1.3
N_TENSORS = 12
N_SAVES = 10
N_COLD = 3  # saves that are not counted as warm
COPIES = {"SGD": 1, "AdamW": 3}  # tensors of the state for each parameter
COMMIT_S = 60


def make_job(name, nbytes):
    n_parameters = N_TENSORS // COPIES[name]
    model = nn.ParameterList(torch.ones(nbytes // N_TENSORS // 4) for _ in range(n_parameters))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-4, foreach=False)
    return model, optimizer


def await_commit(ck, step):
    end_s = time.monotonic() + COMMIT_S
    while (ck.stats["keeper"]["newest"] or [0, 0])[1] < step:
        if time.monotonic() > end_s:
            raise TimeoutError(f"step {step} is not committed: {ck.stats}")
        time.sleep(0.01)


def measure(name, nbytes, keeper):
    """Return the seconds of `restore` on a first start, and the stall of each save."""
    torch.set_num_threads(1)
    model, optimizer = make_job(name, nbytes)
    with Checkpointer(
        model=model, optimizer=optimizer, every=1, keeper=connect_only_rank(keeper)
    ) as ck:
        begun_s = time.perf_counter()
        ck.restore()
        restore_s = time.perf_counter() - begun_s
        stalls_s = []
        for step in range(1, N_SAVES + 1):
            for parameter in model:
                parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            begun_s = time.perf_counter()
            ck.step(step)
            stalls_s.append(time.perf_counter() - begun_s)
            await_commit(ck, step)
        reserved_bytes = ck.stats["keeper"]["reserved_bytes"]
    return {"restore_s": restore_s, "stalls_s": stalls_s, "reserved_bytes": reserved_bytes}


def run_one(name, size):
    """Do `measure` in a new process."""
    command = [sys.executable, __file__, "--size", size, "--one", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def figures(samples):
    warm = [statistics.median(each["stalls_s"][N_COLD:]) for each in samples]
    found = {
        "warm_s": warm,
        "first_over_warm": [e["stalls_s"][0] / w for e, w in zip(samples, warm, strict=True)],
        "second_over_warm": [e["stalls_s"][1] / w for e, w in zip(samples, warm, strict=True)],
        "restore_s": [each["restore_s"] for each in samples],
        "restore_s_per_reserved_gb": [
            1e9 * each["restore_s"] / each["reserved_bytes"] for each in samples
        ],
    }
    return {
        key: {
            "median": round(statistics.median(values), 4),
            "min": round(min(values), 4),
            "max": round(max(values), 4),
        }
        for key, values in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="512MB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    nbytes = parse_bytes(args.size)
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            keeper, end_keeper = start_keeper(Path(folder) / "keeper")
            try:
                print(json.dumps(measure(args.one, nbytes, keeper)))
            finally:
                end_keeper()
        return
    samples = {name: [] for name in COPIES}
    for number in range(args.rounds):
        for name, those in samples.items():
            print(f"round {number}: {name}", file=sys.stderr)
            those.append(run_one(name, args.size))
    rows = {name: figures(those) for name, those in samples.items()}
    for name, row in rows.items():
        print(f"{name}: first save {row['first_over_warm']['median']} x a warm one (goal {GOAL})")
    if args.out:
        found = {"size": args.size, "rounds": args.rounds, "goal": GOAL, "optimizers": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
