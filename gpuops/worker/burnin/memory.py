"""The memory of a GPU or of the host: how fast it is, and whether it keeps what is written."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuops.burnin.bandwidth import size_text
from gpuops.host.procfs import read_memory
from gpuops.model import UnknownReason
from gpuops.worker.burnin.program import (
    DeviceUnderTest,
    Emit,
    Reporter,
    rates,
)

BANDWIDTH, PATTERNS = "hbm", "patterns"
GIB = 2**30
# Larger than any cache: an EPYC 9684X has 1.1 GB for 96 cores, so 96 MB for each group of eight.
_BUFFER_BYTES = 128 * 2**20
_GPU_BUFFER_BYTES = 2 * GIB
_LEAVE_BYTES = GIB
_WORD = 8
# Small, as reading a part takes two temporary ones, which must fit into what is left free.
_PART_WORDS = 8 * 2**20
# What one group of processors surely reads and writes in a second, to end in time.
_CPU_BYTES_PER_S = 2e9
# The words of a part whose first word has this number.
Content = Callable[[int, torch.Tensor], torch.Tensor]


def free_bytes(device: DeviceUnderTest) -> int:
    """Return the free bytes of *device*; of processors an eighth of what the node has available.

    A node divides its processors into at most eight groups, and half of its memory stays free.
    """
    if device.is_gpu:
        return int(torch.cuda.mem_get_info(device.torch_device)[0])
    return read_memory(Path("/")).available_bytes // 16


def measure_bandwidth(device: DeviceUnderTest, seconds: float, size: int, emit: Emit) -> None:
    """Measure a copy and a triad (a = b + s c) of *size* bytes an operand, in GB/s (1e9).

    Bytes are counted as STREAM does: two operands a copy, three a triad, and no write-allocate
    (McCalpin, STREAM).
    """
    a, b, c = (
        torch.full((size // 4,), value, dtype=torch.float32, device=device.torch_device)
        for value in (0.0, 1.0, 2.0)
    )
    kernels: Sequence[tuple[str, Callable[[], object], int]] = (
        ("copy", lambda: a.copy_(b), 2),
        ("triad", lambda: torch.add(b, c, alpha=3.0, out=a), 3),
    )
    report = Reporter(BANDWIDTH, device.part, emit)
    for name, once, operands in kernels:
        values = rates(once, device, seconds / len(kernels), operands * size / 1e9)
        report.measured({"kernel": name, "size": size_text(size)}, values, "GB/s")
    wrong = int((a != 7.0).sum())
    if wrong:
        text = f"{wrong} of {len(a)} elements are not 1 + 3 x 2 after the last triad"
        report.wrong({"kernel": "triad"}, text)


@dataclass(slots=True)
class MemoryPieces:
    """The memory under test, in pieces of 64-bit words that are numbered through."""

    pieces: list[torch.Tensor]
    words: int

    @classmethod
    def allocate(cls, device: DeviceUnderTest, size: int) -> "MemoryPieces":
        """Take *size* bytes in pieces of up to 1 GiB; fewer if the device gives no more."""
        pieces, words = list[torch.Tensor](), 0
        while (left := size // _WORD - words) > 0:
            try:
                piece = torch.empty(
                    min(left, GIB // _WORD), dtype=torch.int64, device=device.torch_device
                )
            except (torch.OutOfMemoryError, RuntimeError):
                break
            pieces.append(piece)
            words += len(piece)
        return cls(pieces, words)

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the pieces in parts of at most `_PART_WORDS`, with the number of the first word."""
        first = 0
        for piece in self.pieces:
            for part in piece.split(_PART_WORDS):
                yield first, part
                first += len(part)


def measure_patterns(
    device: DeviceUnderTest, seconds: float, memory: MemoryPieces, emit: Emit
) -> None:
    """Write patterns over *memory* and read them back, again and again for *seconds*.

    Each word holds its own address (a wrong address line shows), its complement, then moving
    inversions: a byte pattern is read and its inverse written in one walk, and read in the next
    (memtest86). What was begun is finished: each test at least once.
    """
    report = Reporter(PATTERNS, device.part, emit)
    if not memory.words:
        report.not_measured(UnknownReason.CRASH, "the device gave no memory")
        return
    parameters, faults = {"pattern": "all"}, list[str]()
    ends_s, started_s, rounds = time.monotonic() + seconds, time.monotonic(), 0
    while not faults and (rounds == 0 or time.monotonic() < ends_s):
        faults = _walk_all(memory)
        rounds += 1
    took_s = time.monotonic() - started_s
    for text in faults:
        report.wrong(parameters, text)
    moved = rounds * _PASSES * memory.words * _WORD / 1e9
    report.measured(parameters, [moved / took_s], "GB/s")
    report.note(f"{memory.words * _WORD / GIB:.1f} GiB tested, {rounds} times all patterns")


def _addresses(first: int, part: torch.Tensor) -> torch.Tensor:
    return torch.arange(first, first + len(part), dtype=torch.int64, device=part.device)


def _repeated(byte: int) -> Content:
    word = int.from_bytes(bytes([byte]) * _WORD, "little", signed=True)
    return lambda _first, part: torch.full_like(part, word)


# What the memory holds, one after the other: each walk reads one and writes the next.
_CONTENTS: tuple[tuple[str, Content], ...] = (
    ("address", _addresses),
    ("complement of the address", lambda first, part: ~_addresses(first, part)),
    *(
        (f"pattern {byte:#04x}", _repeated(byte))
        for pattern in (0x00, 0x55, 0x33, 0x0F)
        for byte in (pattern, pattern ^ 0xFF, pattern)
    ),
)
_PASSES = 2 * len(_CONTENTS)


def _walk_all(memory: MemoryPieces) -> list[str]:
    """Return what was read and never written, at most one text for each walk."""
    faults: list[str] = []
    for first, part in memory.parts():
        part.copy_(_CONTENTS[0][1](first, part))
    for (name, expected), following in zip(_CONTENTS, (*_CONTENTS[1:], None), strict=True):
        fault = None
        for first, part in memory.parts():
            fault = fault or _first_wrong(name, part, expected(first, part), first)
            if following is not None:
                part.copy_(following[1](first, part))
        faults += [fault] if fault else []
    return faults


def _first_wrong(name: str, piece: torch.Tensor, expected: torch.Tensor, first: int) -> str | None:
    wrong = piece != expected
    if not bool(wrong.any()):
        return None
    where = int(wrong.nonzero()[0])
    read, wrote = int(piece[where]) & (2**64 - 1), int(expected[where]) & (2**64 - 1)
    return (
        f"{name}: word {first + where} read {read:#018x} where {wrote:#018x} was written"
        f" ({int(wrong.sum())} wrong words in {len(piece)})"
    )


def bandwidth_bytes(device: DeviceUnderTest) -> int:
    """Return the size of an operand, in whole MiB."""
    size = min(_GPU_BUFFER_BYTES if device.is_gpu else _BUFFER_BYTES, free_bytes(device) // 4)
    return size >> 20 << 20


def patterns_bytes(device: DeviceUnderTest, seconds: float) -> int:
    """Return how much memory of *device* is tested; of processors no more than is done in time."""
    free = free_bytes(device)
    if device.is_gpu:
        return free - _LEAVE_BYTES
    return min(free, int(seconds * _CPU_BYTES_PER_S / _PASSES))
