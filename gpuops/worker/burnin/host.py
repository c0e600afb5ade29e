"""The host: its processors, its memory as they see it, and its local disks."""

import errno
import hashlib
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from gpuops.model import Entity, EntityKind, UnknownReason
from gpuops.worker.burnin.memory import free_bytes
from gpuops.worker.burnin.program import (
    DeviceUnderTest,
    Emit,
    Reporter,
    rates,
)

HOST, DISK = "host", "disk"
_BLOCK_BYTES = 4 * 2**20
_DISK_BYTES_MAX = 4 * 2**30
_FREE_SHARE = 10
_HASHED_BYTES = 2**20
_FLOAT_SIZE = 256
_BUFFER_BYTES = 128 * 2**20


def measure_processors(device: DeviceUnderTest, seconds: float, emit: Emit) -> None:
    """Measure memory copies, integers and floating point, on one core and on all of *device*.

    Integers are SHA-256, one buffer a core, whose digest must always be the same; floating point
    are fp64 products that stay in the cache.
    """
    counts = sorted({1, len(device.cpus)})
    size = min(_BUFFER_BYTES, free_bytes(device) // 4)
    report = Reporter(HOST, device.part, emit)
    for count in counts:
        os.sched_setaffinity(0, device.cpus[:count])
        torch.set_num_threads(count)
        share_s = seconds / len(counts) / 3
        cores = "one" if count == 1 else "all"
        _measure_copy(device, share_s, size, cores, report)
        _measure_floats(device, share_s, count, cores, report)
        _measure_integers(device, share_s, count, cores, report)


def _measure_copy(
    device: DeviceUnderTest, seconds: float, size: int, cores: str, report: Reporter
) -> None:
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    values = rates(lambda: target.copy_(source), device, seconds, 2 * size / 1e9)
    report.measured({"work": "copy", "cores": cores}, values, "GB/s")


def _measure_floats(
    device: DeviceUnderTest, seconds: float, count: int, cores: str, report: Reporter
) -> None:
    a = torch.full((count, _FLOAT_SIZE, _FLOAT_SIZE), 0.5, dtype=torch.float64)
    out = torch.empty_like(a)
    operations = 2 * count * _FLOAT_SIZE**3
    values = rates(lambda: torch.bmm(a, a, out=out), device, seconds, operations / 1e12)
    report.measured({"work": "float", "cores": cores}, values, "TFLOP/s")
    # Sums of 256 quarters: exact in fp64, in any order.
    wrong = int((out != _FLOAT_SIZE / 4).sum())
    if wrong:
        text = f"{wrong} of {out.numel()} sums of {_FLOAT_SIZE} times 0.25 are not exact"
        report.wrong({"work": "float"}, text)


def _measure_integers(
    device: DeviceUnderTest, seconds: float, count: int, cores: str, report: Reporter
) -> None:
    data = bytes(range(256)) * (_HASHED_BYTES // 256)
    expected, wrong = hashlib.sha256(data).digest(), list[bytes]()

    def hash_once() -> None:
        # It holds no lock of Python meanwhile (hashlib: buffers above 2047 bytes).
        found = list(pool.map(lambda _: hashlib.sha256(data).digest(), range(count)))
        wrong.extend(digest for digest in found if digest != expected)

    with ThreadPoolExecutor(count) as pool:
        values = rates(hash_once, device, seconds, count * len(data) / 1e9)
    report.measured({"work": "integer", "cores": cores}, values, "GB/s")
    if wrong:
        text = f"{len(wrong)} digests of the same buffer differ from the first"
        report.wrong({"work": "integer"}, text)


def measure_disk(folder: Path, seconds: float, emit: Emit) -> None:
    """Write a file in *folder*, sync it, read it back and compare; in GB/s (1e9).

    With O_DIRECT, past the page cache, in blocks of 4 MiB, for half of *seconds*, at most 4 GiB
    and a tenth of what is free. The file has no name, so that none stays behind.
    """
    report = Reporter(DISK, Entity(EntityKind.MOUNT, str(folder)), emit)
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            free = os.fstatvfs(fd)
            room = free.f_bavail * free.f_frsize // _FREE_SHARE
            blocks = min(room, _DISK_BYTES_MAX) // _BLOCK_BYTES
            _write_and_read(fd, (seconds, blocks), report)
        finally:
            os.close(fd)
    except OSError as exc:
        report.not_measured(_reason(exc), f"cannot write with direct I/O: {exc.strerror}")


def _reason(exc: OSError) -> UnknownReason:
    if exc.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return UnknownReason.NO_PERMISSION
    unsupported = exc.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR}
    return UnknownReason.NOT_SUPPORTED if unsupported else UnknownReason.CRASH


def _write_and_read(fd: int, limits: tuple[float, int], report: Reporter) -> None:
    seconds, blocks = limits
    written, reads = list[float](), list[float]()
    ends_s = time.monotonic() + seconds / 2
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
        while len(written) < blocks and (not written or time.monotonic() < ends_s):
            place = len(written) * _BLOCK_BYTES
            buffer[:] = _block(len(written))
            written.append(_timed(partial(os.pwrite, fd, buffer, place)))
        started_s = time.perf_counter()
        os.fsync(fd)
        sync_s = time.perf_counter() - started_s
        for number in range(len(written)):
            buffer[:] = bytes(_BLOCK_BYTES)
            reads.append(_timed(partial(os.preadv, fd, [buffer], number * _BLOCK_BYTES)))
            if buffer[:] != _block(number):
                text = f"block {number} of {len(written)} is not what was written before fsync"
                report.wrong({"work": "read"}, text)
                break
    report.measured({"work": "write"}, written, "GB/s")
    report.measured({"work": "read"}, reads, "GB/s")
    took_us = max(sync_s, 1e-9) * 1e6
    report.measured({"work": "fsync"}, [took_us], "us", higher_is_better=False)


def _timed(call: Callable[[], int]) -> float:
    started_s = time.perf_counter()
    done = call()
    return done / 1e9 / max(time.perf_counter() - started_s, 1e-9)


def _block(number: int) -> bytes:
    """Return the content of block *number*: no two blocks are alike, and none compresses away."""
    seed = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return hashlib.shake_128(seed).digest(2**16) * (_BLOCK_BYTES // 2**16)
