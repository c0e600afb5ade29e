"""The memory of a GPU or of the host: how fast it is, and whether it keeps what is written.

``python -m gpuops.worker.burnin.memory --device cuda:0 --seconds 60 --mode patterns``
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuops.burnin.measurement import Measurement
from gpuops.burnin.results import NotMeasured, ProgramNote, WrongResult
from gpuops.host.procfs import read_memory
from gpuops.model import UnknownReason
from gpuops.worker.burnin.program import DeviceUnderTest, Emit, arguments, rates, run_program

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
_PASSES = 44
_BYTE_PATTERNS = (0x00, 0xFF, 0x55, 0xAA, 0x33, 0xCC, 0x0F, 0xF0)


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
    for name, once, operands in kernels:
        values = rates(once, device, seconds / len(kernels), operands * size / 1e9)
        emit(
            Measurement(
                test=BANDWIDTH,
                part=device.part,
                parameters={"kernel": name, "size": f"{size >> 20}MiB"},
                values=values,
                unit="GB/s",
            )
        )
    wrong = int((a != 7.0).sum())
    if wrong:
        text = f"{wrong} of {len(a)} elements are not 1 + 3 x 2 after the last triad"
        emit(WrongResult(test=BANDWIDTH, part=device.part, parameters="kernel=triad", message=text))


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
    if not memory.words:
        why = "the device gave no memory"
        reason = UnknownReason.CRASH
        emit(NotMeasured(test=PATTERNS, part=device.part, reason=reason, message=why))
        return
    walks, faults = _Walks(memory, device), list[str]()
    ends_s, started_s, rounds = time.monotonic() + seconds, time.monotonic(), 0
    while not faults and (rounds == 0 or time.monotonic() < ends_s):
        faults = walks.round()
        rounds += 1
    took_s = time.monotonic() - started_s
    parameters = {"pattern": "all"}
    for text in faults:
        emit(WrongResult(test=PATTERNS, part=device.part, parameters="pattern=all", message=text))
    moved = walks.passes * memory.words * _WORD / 1e9
    emit(
        Measurement(
            test=PATTERNS,
            part=device.part,
            parameters=parameters,
            values=(moved / took_s,),
            unit="GB/s",
        )
    )
    text = f"{memory.words * _WORD / GIB:.1f} GiB tested, {rounds} times all patterns"
    emit(ProgramNote(test=PATTERNS, part=device.part, message=text))


class _Walks:
    """The walks over all pieces; ``passes`` counts how often all of them were written or read."""

    def __init__(self, memory: MemoryPieces, device: DeviceUnderTest) -> None:
        self._memory, self._device = memory, device
        self.passes = 0

    def round(self) -> list[str]:
        """Return what was read and never written, at most one text for each walk."""
        faults = []
        for name, invert in (("address", False), ("complement of the address", True)):
            self._write_addresses(invert=invert)
            faults.append(self._wrong_addresses(name, invert=invert))
        for pattern in _BYTE_PATTERNS:
            word = _word(pattern)
            for _, part in self._memory.parts():
                part.fill_(word)
            self.passes += 1
            faults.append(self._inversion(word))
            faults.append(self._inversion(~word))
        return [text for text in faults if text is not None]

    def _numbers(self, first: int, count: int, *, invert: bool) -> torch.Tensor:
        on = self._device.torch_device
        numbers = torch.arange(first, first + count, dtype=torch.int64, device=on)
        return numbers.bitwise_not_() if invert else numbers

    def _write_addresses(self, *, invert: bool) -> None:
        for first, part in self._memory.parts():
            part.copy_(self._numbers(first, len(part), invert=invert))
        self.passes += 1

    def _wrong_addresses(self, name: str, *, invert: bool) -> str | None:
        found = None
        for first, part in self._memory.parts():
            expected = self._numbers(first, len(part), invert=invert)
            found = found or _first_wrong(name, part, expected, first)
        self.passes += 1
        return found

    def _inversion(self, word: int) -> str | None:
        """Read *word* everywhere and write its inverse, part by part."""
        name, found = f"pattern {word & 0xFF:#04x}", None
        for first, part in self._memory.parts():
            found = found or _first_wrong(name, part, torch.full_like(part, word), first)
            part.fill_(~word)
        self.passes += 2
        return found


def _word(byte: int) -> int:
    """Return the signed 64-bit word of eight times *byte*."""
    return int.from_bytes(bytes([byte]) * _WORD, "little", signed=True)


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


def _measure(device: DeviceUnderTest, found: argparse.Namespace, emit: Emit) -> None:
    free = free_bytes(device)
    if found.mode == BANDWIDTH:
        size = min(_GPU_BUFFER_BYTES if device.is_gpu else _BUFFER_BYTES, free // 4)
        measure_bandwidth(device, found.seconds, size >> 20 << 20, emit)
        return
    in_time = int(found.seconds * _CPU_BYTES_PER_S / _PASSES)
    size = found.bytes or (free - _LEAVE_BYTES if device.is_gpu else min(free, in_time))
    measure_patterns(device, found.seconds, MemoryPieces.allocate(device, size), emit)


def main(argv: list[str]) -> int:
    """Run the program; return its exit code."""
    parser = arguments("memory")
    parser.add_argument("--mode", choices=(BANDWIDTH, PATTERNS), default=BANDWIDTH)
    parser.add_argument("--bytes", type=int, default=0)
    return run_program(parser, argv, _measure, "memory")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
