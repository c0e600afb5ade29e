"""Collectives between the parts of one node: how fast, and whether every rank gets what it must.

One process for each part; NCCL between GPUs, gloo between groups of processors.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from gpuops.burnin.bandwidth import busbw_gbs, size_text
from gpuops.burnin.measurement import canonical
from gpuops.model import Entity, EntityKind, UnknownReason
from gpuops.worker.burnin.program import DeviceUnderTest, Emit, Reporter

TEST = "collectives"
_WARM_UP = 2
_REPEATS_MIN, _REPEATS_MAX = 5, 2000
_MIB = 2**20
_CPU_SIZES = (8, _MIB, 16 * _MIB)
_GPU_SIZES = (8, _MIB, 64 * _MIB, 1024 * _MIB, 8192 * _MIB)
# Sent, received, expected, their pattern, and what compares them.
_BUFFERS = 5
_FLOAT = 4
# Sums of these are exact in fp32 for up to 364 ranks: 251 x 364 x 365 / 2 < 2**24. No buffer's
# share is a multiple of a prime, so that what arrives in the wrong place differs.
_PERIOD = 251
# A rank that cannot start, or hangs, must not leave the others waiting for torch's half an hour.
_MEET_S = 150


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """What one rank sends and receives in the collective ``name``, and what it must receive.

    Floats are whole numbers that depend on their place and their sender.
    """

    name: str
    rank: int
    ranks: int
    sent: torch.Tensor
    received: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def make(cls, name: str, rank: int, ranks: int, size_bytes: int, device: torch.device) -> Self:
        """Return buffers of *size_bytes*, rounded up to whole floats for each rank."""
        words = -(-max(size_bytes // _FLOAT, 1) // ranks) * ranks
        period = torch.arange(1, _PERIOD + 1, dtype=torch.float32, device=device)
        pattern = period.repeat(-(-words // _PERIOD))[:words]
        sent = pattern * (rank + 1)
        return cls(name, rank, ranks, sent, sent.clone(), _expected(name, pattern, rank, ranks))

    @property
    def size_bytes(self) -> int:
        return self.sent.numel() * _FLOAT

    def reset(self) -> None:
        """Put into ``received`` what is there before the collective."""
        if self.name in {"all_reduce", "broadcast"}:
            self.received.copy_(self.sent)
        else:
            self.received.fill_(-1)

    def wrong(self) -> str | None:
        """Return what of ``received`` is wrong, None if all is right."""
        found = self.received[: len(self.expected)]
        if torch.equal(found, self.expected):
            return None
        wrong = found != self.expected
        where = int(wrong.nonzero()[0])
        return (
            f"{int(wrong.sum())} of {len(found)} floats are wrong: element {where} is"
            f" {float(found[where]):g}, not {float(self.expected[where]):g}"
        )


def _expected(name: str, pattern: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what *rank* receives where each rank sends *pattern* times its number from 1 on."""
    total = ranks * (ranks + 1) // 2
    own, first = pattern.chunk(ranks)[rank], pattern.chunk(ranks)[0]
    match name:
        case "all_reduce":
            return pattern * total
        case "all_gather":
            return torch.cat([first * (sender + 1) for sender in range(ranks)])
        case "reduce_scatter":
            return own * total
        case "all_to_all":
            return torch.cat([own * (sender + 1) for sender in range(ranks)])
        case "broadcast":
            return pattern
        case _:
            return pattern * ((rank - 1) % ranks + 1)


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


CALLS: dict[str, Callable[[RankBuffers], object]] = {
    "all_reduce": lambda b: dist.all_reduce(b.received),
    "all_gather": lambda b: dist.all_gather_into_tensor(b.received, b.sent.chunk(b.ranks)[0]),
    "reduce_scatter": lambda b: dist.reduce_scatter_tensor(b.received.chunk(b.ranks)[0], b.sent),
    "all_to_all": lambda b: dist.all_to_all_single(b.received, b.sent),
    "broadcast": lambda b: dist.broadcast(b.received, src=0),
    "send_recv": _send_recv,
}


def measure_repeats(
    buffers: RankBuffers, device: DeviceUnderTest, seconds: float
) -> tuple[tuple[float, ...], str | None]:
    """Return the bus bandwidth of each repeat in GB/s, and the first wrong result of this rank.

    A repeat is one call, as slow as its slowest rank; what was received is compared after each.
    All ranks make as many calls as the slowest one makes in about *seconds*.
    """
    times, repeats = list[float](), _WARM_UP + _REPEATS_MIN
    wrong: str | None = None
    while len(times) < repeats:
        began_s = time.perf_counter()
        buffers.reset()
        times.append(_timed(buffers, device))
        wrong = wrong or buffers.wrong()
        if len(times) == _WARM_UP:
            took_s = float(_slowest([time.perf_counter() - began_s], device)[0])
            wanted = round(seconds / max(took_s, 1e-6))
            repeats = _WARM_UP + min(max(wanted, _REPEATS_MIN), _REPEATS_MAX)
    size = buffers.size_bytes
    rates = tuple(
        busbw_gbs(buffers.name, buffers.ranks, size, max(float(took_s), 1e-9))
        for took_s in _slowest(times[_WARM_UP:], device)
    )
    return rates, wrong


def _timed(buffers: RankBuffers, device: DeviceUnderTest) -> float:
    """Return the seconds of one call, from when all ranks are there."""
    dist.barrier()
    device.synchronize()
    started_s = time.perf_counter()
    CALLS[buffers.name](buffers)
    device.synchronize()
    return time.perf_counter() - started_s


def _slowest(times: list[float], device: DeviceUnderTest) -> torch.Tensor:
    """Return for each of *times* that of the rank with the most."""
    found = torch.tensor(times, dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.cpu()


def measure_collectives(
    device: DeviceUnderTest, node: Entity, seconds: float, sizes: tuple[int, ...], emit: Emit
) -> None:
    """Measure each collective at each of *sizes* (bytes), in this process group.

    Rank 0 emits the bus bandwidth, which is of *node*; a wrong result is of the rank's own part.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = Reporter(TEST, device.part, emit)
    for name in CALLS:
        for size in sizes:
            parameters = {"collective": name, "size": size_text(size), "ranks": str(ranks)}
            buffers = RankBuffers.make(name, rank, ranks, size, device.torch_device)
            try:
                share_s = seconds / len(CALLS) / len(sizes)
                rates, wrong = measure_repeats(buffers, device, share_s)
            except NotImplementedError as exc:  # the backend does not have it, on any rank
                text = f"{canonical(parameters)}: {exc}"
                own.not_measured(UnknownReason.NOT_SUPPORTED, text)
                continue
            if wrong is not None:
                own.wrong(parameters, wrong)
            if rank == 0:
                Reporter(TEST, node, emit).measured(parameters, rates, "GB/s")


def _sizes(device: DeviceUnderTest) -> tuple[int, ...]:
    if not device.is_gpu:
        return _CPU_SIZES
    free = int(torch.cuda.mem_get_info(device.torch_device)[0])
    return tuple(size for size in _GPU_SIZES if _BUFFERS * size <= free)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfNode:
    """This process among those that measure *node*; they meet at a file that is not there yet."""

    rank: int
    ranks: int
    node: str
    meet: str


def measure_as_rank(device: DeviceUnderTest, of: RankOfNode, seconds: float, emit: Emit) -> None:
    """Measure the collectives as one of several ranks."""
    if of.ranks < 2:
        why = "there is one part: nothing to exchange"
        Reporter(TEST, device.part, emit).not_measured(UnknownReason.NOT_SUPPORTED, why)
        return
    dist.init_process_group(
        "nccl" if device.is_gpu else "gloo",
        init_method=f"file://{of.meet}",
        rank=of.rank,
        world_size=of.ranks,
        timeout=timedelta(seconds=_MEET_S),
    )
    try:
        node = Entity(EntityKind.NODE, of.node)
        measure_collectives(device, node, seconds, _sizes(device), emit)
        dist.barrier()
    finally:
        dist.destroy_process_group()
