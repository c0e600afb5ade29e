"""``python -m gpuops.worker.burnin.pair``: all_reduce between the devices of two nodes, measured.

It prints one JSON object: ``busbw_gbs`` (the median, by rank 0), or ``wrong``, ``failed`` or
``timeout`` with what happened. It exits with 0 then: the link was tested. Any other end says
nothing of the link.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from gpuops.host.process.sidecar import die_with_parent_thread
from gpuops.worker.burnin.collectives import RankBuffers, measure_repeats
from gpuops.worker.burnin.program import open_device


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank of the test; return 0 if it said what came of it."""
    options = _options(argv)
    die_with_parent_thread()
    try:
        said = _measure(options)
    except RuntimeError as exc:  # torch's DistError among them; gloo raises no class of its own
        if _is_no_memory(exc):
            raise
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
    device = open_device(options.device)
    store = TCPStore(
        options.host,
        options.port,
        world_size=None,
        is_master=options.listen_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=options.listen_fd,
    )
    dist.init_process_group(
        "nccl" if device.is_gpu else "gloo",
        store=store,
        rank=options.rank,
        world_size=options.world,
        timeout=timeout,
    )
    try:
        buffers = RankBuffers.make(
            "all_reduce", options.rank, options.world, options.size_bytes, device.torch_device
        )
        rates, wrong = measure_repeats(buffers, device, options.seconds)
    finally:
        dist.destroy_process_group()
    if wrong is not None:
        text = f"all_reduce of {buffers.size_bytes} bytes: {wrong}"
        return {"wrong": f"rank {options.rank}: {text}"}
    measured = {} if options.rank else {"busbw_gbs": statistics.median(rates)}
    return {**measured, "repeats": len(rates)}


def _is_no_memory(exc: Exception) -> bool:
    """Return whether the buffers did not fit. The allocator of CPUs has no class for it."""
    return isinstance(exc, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(exc)


def _kind(exc: Exception) -> str:
    text = str(exc).lower()
    return "timeout" if "timed out" in text or "timeout" in text else "failed"


def _first_line(exc: Exception) -> str:
    return next((line for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


if __name__ == "__main__":
    sys.exit(main())
