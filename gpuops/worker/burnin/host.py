"""The host: its processors, its memory as they see it, and its local disks.

``python -m gpuops.worker.burnin.host --device cpu:0-63 --seconds 60``
"""

import argparse
import errno
import hashlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gpuops.burnin.measurement import Measurement
from gpuops.burnin.results import NotMeasured, WrongResult
from gpuops.model import Entity, EntityKind, UnknownReason
from gpuops.worker.burnin.memory import free_bytes
from gpuops.worker.burnin.program import DeviceUnderTest, Emit, arguments, rates, run_program

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
    for count in counts:
        os.sched_setaffinity(0, device.cpus[:count])
        torch.set_num_threads(count)
        share_s = seconds / len(counts) / 3
        cores = "one" if count == 1 else "all"
        _measure_copy(device, share_s, size, cores, emit)
        _measure_floats(device, share_s, cores, emit)
        _measure_integers(device, share_s, count, cores, emit)


def _measure_copy(
    device: DeviceUnderTest, seconds: float, size: int, cores: str, emit: Emit
) -> None:
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    values = rates(lambda: target.copy_(source), device, seconds, 2 * size / 1e9)
    emit(_measured(device, {"work": "copy", "cores": cores}, values, "GB/s"))


def _measure_floats(device: DeviceUnderTest, seconds: float, cores: str, emit: Emit) -> None:
    count = 1 if cores == "one" else len(device.cpus)
    a = torch.full((count, _FLOAT_SIZE, _FLOAT_SIZE), 0.5, dtype=torch.float64)
    out = torch.empty_like(a)
    operations = 2 * count * _FLOAT_SIZE**3
    values = rates(lambda: torch.bmm(a, a, out=out), device, seconds, operations / 1e9)
    emit(_measured(device, {"work": "float", "cores": cores}, values, "GFLOP/s"))
    # Sums of 256 quarters: exact in fp64, in any order.
    wrong = int((out != _FLOAT_SIZE / 4).sum())
    if wrong:
        text = f"{wrong} of {out.numel()} sums of {_FLOAT_SIZE} times 0.25 are not exact"
        emit(WrongResult(test=HOST, part=device.part, parameters="work=float", message=text))


def _measure_integers(
    device: DeviceUnderTest, seconds: float, count: int, cores: str, emit: Emit
) -> None:
    data = bytes(range(256)) * (_HASHED_BYTES // 256)
    expected, wrong = hashlib.sha256(data).digest(), list[bytes]()

    def hash_once() -> None:
        # It holds no lock of Python meanwhile (hashlib: buffers above 2047 bytes).
        found = list(pool.map(lambda _: hashlib.sha256(data).digest(), range(count)))
        wrong.extend(digest for digest in found if digest != expected)

    with ThreadPoolExecutor(count) as pool:
        values = rates(hash_once, device, seconds, count * len(data) / 1e9)
    emit(_measured(device, {"work": "integer", "cores": cores}, values, "GB/s"))
    if wrong:
        text = f"{len(wrong)} digests of the same buffer differ from the first"
        emit(WrongResult(test=HOST, part=device.part, parameters="work=integer", message=text))


def _measured(
    device: DeviceUnderTest, parameters: dict[str, str], values: tuple[float, ...], unit: str
) -> Measurement:
    return Measurement(test=HOST, part=device.part, parameters=parameters, values=values, unit=unit)


def measure_disk(folder: Path, seconds: float, emit: Emit) -> None:
    """Write a file in *folder*, sync it, read it back and compare; in MB/s (1e6).

    With O_DIRECT, past the page cache, in blocks of 4 MiB, for half of *seconds*, at most 4 GiB
    and a tenth of what is free. The file has no name, so that none stays behind.
    """
    part = Entity(EntityKind.MOUNT, str(folder))
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        emit(_no_disk(part, exc))
        return
    try:
        free = os.fstatvfs(fd)
        room = free.f_bavail * free.f_frsize // _FREE_SHARE
        blocks = min(room, _DISK_BYTES_MAX) // _BLOCK_BYTES
        _write_and_read(fd, part, (seconds, blocks), emit)
    except OSError as exc:
        emit(_no_disk(part, exc))
    finally:
        os.close(fd)


def _no_disk(part: Entity, exc: OSError) -> NotMeasured:
    unsupported = exc.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR}
    reason = UnknownReason.NOT_SUPPORTED if unsupported else UnknownReason.CRASH
    if exc.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        reason = UnknownReason.NO_PERMISSION
    text = f"cannot write with direct I/O: {exc.strerror}"
    return NotMeasured(test=DISK, part=part, reason=reason, message=text)


def _write_and_read(fd: int, part: Entity, limits: tuple[float, int], emit: Emit) -> None:
    seconds, blocks = limits
    written, rates_mb = 0, list[float]()
    ends_s = time.monotonic() + seconds / 2
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
        while written < blocks and (written == 0 or time.monotonic() < ends_s):
            buffer[:] = _block(written)
            rates_mb.append(_timed(lambda: os.pwrite(fd, buffer, written * _BLOCK_BYTES)))  # noqa: B023 called at once
            written += 1
        started_s = time.perf_counter()
        os.fsync(fd)
        sync_s = time.perf_counter() - started_s
        for name, values in (("write", rates_mb), ("read", [])):
            for number in range(written if name == "read" else 0):
                buffer[:] = bytes(_BLOCK_BYTES)
                values.append(_timed(lambda: os.preadv(fd, [buffer], number * _BLOCK_BYTES)))  # noqa: B023 called at once
                if buffer[:] != _block(number):
                    text = f"block {number} of {written} is not what was written before fsync"
                    about = {"test": DISK, "part": part, "parameters": "work=read"}
                    emit(WrongResult(message=text, **about))  # type: ignore[arg-type]  # of the names above
                    break
            emit(
                Measurement(
                    test=DISK,
                    part=part,
                    parameters={"work": name},
                    values=tuple(values),
                    unit="MB/s",
                )
            )
    emit(
        Measurement(
            test=DISK,
            part=part,
            parameters={"work": "fsync"},
            values=(max(sync_s, 1e-9) * 1e3,),
            unit="ms",
            higher_is_better=False,
        )
    )


def _timed(call: Callable[[], int]) -> float:
    started_s = time.perf_counter()
    done = call()
    return done / 1e6 / max(time.perf_counter() - started_s, 1e-9)


def _block(number: int) -> bytes:
    """Return the content of block *number*: no two blocks are alike, and none compresses away."""
    seed = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return hashlib.shake_128(seed).digest(2**16) * (_BLOCK_BYTES // 2**16)


def _measure(device: DeviceUnderTest, found: argparse.Namespace, emit: Emit) -> None:
    if found.mode == HOST:
        measure_processors(device, found.seconds, emit)
        return
    folders: Sequence[Path] = found.folder
    for folder in folders:
        measure_disk(folder, found.seconds / len(folders), emit)


def main(argv: list[str]) -> int:
    """Run the program; return its exit code."""
    parser = arguments("host")
    parser.add_argument("--mode", choices=(HOST, DISK), default=HOST)
    parser.add_argument("--folder", type=Path, action="append", default=[])
    return run_program(parser, argv, _measure, "host")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
