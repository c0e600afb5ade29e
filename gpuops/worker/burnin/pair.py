"""``python -m gpuops.worker.burnin.pair``: all_reduce between the devices of two nodes, measured.

It prints one JSON object: ``busbw_gbs`` (the median, by rank 0), or ``wrong``, ``failed`` or
``timeout`` with what happened. It exits with 0 then: the link was tested. Any other end says
nothing of the link.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from gpuops.burnin.bandwidth import busbw_gbs
from gpuops.host.process.sidecar import die_with_parent_thread

_WARM_UP = 2
_REPEATS_MIN, _REPEATS_MAX = 5, 2000
# Sums of these are exact in float32 for up to 2**24 / (period * ranks) ranks.
_PERIOD = 251


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank of the test; return 0 if it said what came of it."""
    options = _options(argv)
    die_with_parent_thread()
    try:
        said = _measure(options)
    except RuntimeError as exc:  # torch's DistError among them; gloo raises no class of its own
        said = {_kind(exc): f"rank {options.rank}: {_first_line(exc)}"}
    print(json.dumps(said), flush=True)  # noqa: T201 our output
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpuops.worker.burnin.pair", description=__doc__
    )
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--host", required=True, help="address of rank 0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, help="the port's socket, for rank 0")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--size-bytes", type=int, required=True, help="buffer of each rank")
    parser.add_argument("--seconds", type=float, required=True, help="for how long to measure")
    parser.add_argument("--timeout", type=float, required=True, help="of one collective")
    return parser.parse_args(argv)


def _measure(options: argparse.Namespace) -> dict[str, object]:
    timeout = timedelta(seconds=options.timeout)
    device = torch.device(options.device)
    store = TCPStore(
        options.host,
        options.port,
        world_size=None,
        is_master=options.listen_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=options.listen_fd,
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=options.rank,
        world_size=options.world,
        timeout=timeout,
    )
    try:
        return _reduce(options, device)
    finally:
        dist.destroy_process_group()


def _reduce(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    n_items = max(options.size_bytes // 4, 1)
    size_bytes = 4 * n_items
    pattern = (torch.arange(n_items, device=device) % _PERIOD).float()
    expected = pattern * (options.world * (options.world + 1) // 2)
    times: list[float] = []
    buffer = torch.empty_like(pattern)
    n_repeats = _WARM_UP + _REPEATS_MIN
    done = 0
    while done < n_repeats:
        torch.mul(pattern, options.rank + 1, out=buffer)
        times.append(_timed(buffer, device))
        done += 1
        if not torch.equal(buffer, expected):
            index = int((buffer != expected).nonzero()[0])
            text = f"element {index} is {float(buffer[index]):g}, not {float(expected[index]):g}"
            return {"wrong": f"rank {options.rank}: all_reduce of {size_bytes} bytes: {text}"}
        if done == _WARM_UP:
            n_repeats = _agreed_repeats(times[-1], options.seconds, device)
    slowest = torch.tensor(times[_WARM_UP:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if options.rank:
        return {"repeats": len(slowest)}
    rates = [busbw_gbs("all_reduce", options.world, size_bytes, float(s)) for s in slowest]
    return {"busbw_gbs": statistics.median(rates), "repeats": len(rates)}


def _timed(buffer: torch.Tensor, device: torch.device) -> float:
    dist.barrier()
    _wait(device)
    began_s = time.perf_counter()
    dist.all_reduce(buffer)
    _wait(device)
    return time.perf_counter() - began_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed_repeats(one_s: float, seconds: float, device: torch.device) -> int:
    """Return how many repeats fill *seconds*, by the slowest rank: all must do as many."""
    slowest = torch.tensor([one_s], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    wanted = round(seconds / max(float(slowest[0]), 1e-6))
    return _WARM_UP + min(max(wanted, _REPEATS_MIN), _REPEATS_MAX)


def _kind(exc: Exception) -> str:
    text = str(exc).lower()
    return "timeout" if "timed out" in text or "timeout" in text else "failed"


def _first_line(exc: Exception) -> str:
    return next((line for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


if __name__ == "__main__":
    sys.exit(main())
