"""Collectives between the parts of one node: how fast, and whether every rank gets what it must.

``python -m gpuops.worker.burnin.collectives --device cpu:0 --rank 0 --ranks 2 …``, one process
for each part; NCCL between GPUs, gloo between groups of processors.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gpuops.burnin.bandwidth import busbw_gbs
from gpuops.burnin.measurement import Measurement
from gpuops.burnin.results import NotMeasured, WrongResult
from gpuops.model import Entity, EntityKind, UnknownReason
from gpuops.worker.burnin.program import DeviceUnderTest, Emit, arguments, run_program

TEST = "collectives"
REPEATS = 5
CALLS_MAX = 10_000
_MIB = 2**20
_CPU_SIZES = (8, _MIB, 16 * _MIB)
_GPU_SIZES = (8, _MIB, 64 * _MIB, 1024 * _MIB, 8192 * _MIB)
_FLOAT = 4
# A rank that cannot start, or hangs, must not leave the others waiting for torch's half an hour.
_MEET_S = 150


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """What one rank sends and receives; ``rank`` of ``ranks``, each with ``words`` floats."""

    rank: int
    ranks: int
    sent: torch.Tensor
    received: torch.Tensor

    @property
    def sum_of_ranks(self) -> float:
        return self.ranks * (self.ranks + 1) / 2


Call = Callable[[RankBuffers], object]


def _all_reduce(buffers: RankBuffers) -> None:
    dist.all_reduce(buffers.received)


def _all_gather(buffers: RankBuffers) -> None:
    dist.all_gather_into_tensor(buffers.received, buffers.sent.chunk(buffers.ranks)[0])


def _reduce_scatter(buffers: RankBuffers) -> None:
    dist.reduce_scatter_tensor(buffers.received.chunk(buffers.ranks)[0], buffers.sent)


def _all_to_all(buffers: RankBuffers) -> None:
    dist.all_to_all_single(buffers.received, buffers.sent)


def _broadcast(buffers: RankBuffers) -> None:
    dist.broadcast(buffers.received, src=0)


def _send_recv(buffers: RankBuffers) -> None:
    """Send to the next rank and receive from the one before."""
    after, before = (buffers.rank + 1) % buffers.ranks, (buffers.rank - 1) % buffers.ranks
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, buffers.sent, after),
            dist.P2POp(dist.irecv, buffers.received, before),
        ]
    )
    for work in works:
        work.wait()


CALLS: dict[str, Call] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}


def fill(name: str, buffers: RankBuffers) -> None:
    """Fill the buffers so that `wrong_chunk` knows what every rank must receive."""
    buffers.sent.fill_(buffers.rank + 1)
    buffers.received.fill_(-1)
    if name == "all_reduce":
        buffers.received.fill_(buffers.rank + 1)
    elif name == "broadcast" and buffers.rank == 0:
        buffers.received.fill_(7)
    elif name == "all_to_all":
        for target, chunk in enumerate(buffers.sent.chunk(buffers.ranks)):
            chunk.fill_(buffers.rank * buffers.ranks + target)


def wrong_chunk(name: str, buffers: RankBuffers) -> str | None:
    """Return which part of what was received is wrong, None if all is right.

    All expected numbers are small integers: exact in fp32, in any order of the sums.
    """
    chunks = buffers.received.chunk(buffers.ranks)
    before = (buffers.rank - 1) % buffers.ranks
    expected = {
        "all_reduce": [buffers.sum_of_ranks] * buffers.ranks,
        "all_gather": [rank + 1.0 for rank in range(buffers.ranks)],
        "reduce_scatter": [buffers.sum_of_ranks],
        "all_to_all": [float(rank * buffers.ranks + buffers.rank) for rank in range(buffers.ranks)],
        "broadcast": [7.0] * buffers.ranks,
        "send_recv": [before + 1.0] * buffers.ranks,
    }[name]
    for number, value in enumerate(expected):
        wrong = chunks[number] != value
        if bool(wrong.any()):
            where = int(wrong.nonzero()[0])
            read = float(chunks[number][where])
            count = int(wrong.sum())
            return f"chunk {number}: {count} floats are not {value:g}, the first is {read:g}"
    return None


def measure_collectives(
    device: DeviceUnderTest, node: Entity, seconds: float, sizes: tuple[int, ...], emit: Emit
) -> None:
    """Measure each collective at each of *sizes* (bytes), in this process group.

    Every rank makes the same calls, as many as rank 0 says. Rank 0 emits the bus bandwidth, which
    is of *node*; a wrong result is of the rank's own part.
    """
    ranks = _Ranks(device, node, emit)
    for name, call in CALLS.items():
        for size in sizes:
            ranks.measure(name, call, size, seconds / len(CALLS) / len(sizes))


def _buffers(device: DeviceUnderTest, size: int) -> RankBuffers:
    """Return buffers of *size* bytes, rounded up to a whole float for each rank."""
    ranks = dist.get_world_size()
    words = -(-max(size // _FLOAT, 1) // ranks) * ranks
    sent, received = (torch.zeros(words, device=device.torch_device) for _ in range(2))
    return RankBuffers(dist.get_rank(), ranks, sent, received)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """This rank among the others."""

    device: DeviceUnderTest
    node: Entity
    emit: Emit

    def measure(self, name: str, call: Call, size: int, seconds: float) -> None:
        buffers = _buffers(self.device, size)
        parameters = {"collective": name, "size": str(size), "ranks": str(buffers.ranks)}
        text = " ".join(f"{key}={value}" for key, value in sorted(parameters.items()))
        if not self._is_right(name, call, buffers, text):
            return
        buffers.sent.zero_()
        buffers.received.zero_()
        calls = _agreed_calls(call, buffers, self.device, seconds)
        values = [_timed(call, buffers, self.device, calls) for _ in range(REPEATS)]
        if buffers.rank == 0:
            moved = buffers.sent.numel() * _FLOAT
            rates = tuple(busbw_gbs(name, buffers.ranks, moved, took_s) for took_s in values)
            self.emit(
                Measurement(
                    test=TEST, part=self.node, parameters=parameters, values=rates, unit="GB/s"
                )
            )

    def _is_right(self, name: str, call: Call, buffers: RankBuffers, text: str) -> bool:
        """Return whether the backend has it; emit what this rank received and must not have."""
        part = self.device.part
        fill(name, buffers)
        try:
            call(buffers)
        except NotImplementedError as exc:
            reason = UnknownReason.NOT_SUPPORTED
            self.emit(NotMeasured(test=TEST, part=part, reason=reason, message=f"{text}: {exc}"))
            return False
        self.device.synchronize()
        wrong = wrong_chunk(name, buffers)
        if wrong is not None:
            self.emit(WrongResult(test=TEST, part=part, parameters=text, message=wrong))
        return True


def _agreed_calls(call: Call, buffers: RankBuffers, device: DeviceUnderTest, seconds: float) -> int:
    """Return how many calls a repeat has, as rank 0 found by its second call."""
    took_s = min(_timed(call, buffers, device, 1) for _ in range(2))
    calls = max(1, min(round(seconds / REPEATS / took_s), CALLS_MAX))
    said = torch.tensor([calls], dtype=torch.int64, device=device.torch_device)
    dist.broadcast(said, src=0)
    return int(said[0])


def _timed(call: Call, buffers: RankBuffers, device: DeviceUnderTest, calls: int) -> float:
    """Return the seconds of one of *calls*, from when all ranks are there."""
    dist.barrier()
    device.synchronize()
    started_s = time.perf_counter()
    for _ in range(calls):
        call(buffers)
    device.synchronize()
    return max((time.perf_counter() - started_s) / calls, 1e-9)


def _sizes(device: DeviceUnderTest) -> tuple[int, ...]:
    if not device.is_gpu:
        return _CPU_SIZES
    free = int(torch.cuda.mem_get_info(device.torch_device)[0])
    return tuple(size for size in _GPU_SIZES if 3 * size <= free)


def _measure(device: DeviceUnderTest, found: argparse.Namespace, emit: Emit) -> None:
    if found.ranks < 2:
        why = "there is one part: nothing to exchange"
        reason = UnknownReason.NOT_SUPPORTED
        emit(NotMeasured(test=TEST, part=device.part, reason=reason, message=why))
        return
    dist.init_process_group(
        "nccl" if device.is_gpu else "gloo",
        init_method=f"file://{found.meet}",
        rank=found.rank,
        world_size=found.ranks,
        timeout=timedelta(seconds=_MEET_S),
    )
    try:
        node = Entity(EntityKind.NODE, found.node)
        measure_collectives(device, node, found.seconds, _sizes(device), emit)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Run the program; return its exit code."""
    parser = arguments(TEST)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--meet", required=True, help="A file that does not exist yet.")
    return run_program(parser, argv, _measure, TEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
