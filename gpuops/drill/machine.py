"""Fault injectors: a file system is full, or memory is short, for a while."""

import contextlib
import mmap
import os
import resource
import sys
from pathlib import Path

from gpuops.drill.fault import (
    DrillOptions,
    DrillTarget,
    Fault,
    UndoableStep,
    format_seconds,
    scenario,
)
from gpuops.drill.steps import TakeMemory, TakeSpace, free_bytes
from gpuops.errors import DrillError, UsageError
from gpuops.host.procfs import read_memory

_SPARE_BYTES = 512 * 2**20  # of address space, for Python itself


def main() -> None:
    """Allocate the memory, touch every page of it, print ``full``, wait."""
    size = int(sys.argv[1])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = size + _SPARE_BYTES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = b"\1"
    for offset in range(0, size, mmap.PAGESIZE):
        held[offset : offset + 1] = page
    os.write(1, b"full\n")
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main()


FILL_DISK_FOR_S = 60.0
_MIB = 2**20


@scenario(
    "fill-disk",
    "Fill a file system, then free the space.",
    "directory",
    "size_bytes",
    "leave_bytes",
    "for_s",
)
def fill_disk(target: DrillTarget, options: DrillOptions) -> Fault:  # noqa: ARG001 it needs no run
    """Return the fault: an unlinked file of a size, or one that leaves that much space."""
    if options.directory is None:
        raise UsageError("which directory? name one on the file system to fill: --dir")
    free = free_bytes(Path(options.directory))
    size = size_to_take(free, size_bytes=options.size_bytes, leave_bytes=options.leave_bytes)
    for_s = FILL_DISK_FOR_S if options.for_s is None else options.for_s
    remaining_bytes = free - size
    return Fault(
        breaks=f"{size / _MIB:.0f} MiB of the file system of {options.directory} are used up; "
        f"{remaining_bytes / _MIB:.1f} MiB are left for all its users.",
        undone=f"After {format_seconds(for_s)} the space is freed; by the kernel if this command "
        "is killed.",
        changes=(UndoableStep(TakeSpace(options.directory, size)),),
        for_s=for_s,
    )


def size_to_take(free_bytes: int, *, size_bytes: int | None, leave_bytes: int | None) -> int:
    """Return how many of *free_bytes* to take.

    Raises:
        UsageError: Not exactly one of the two was given, or it is below zero.
        DrillError: That much is not free.
    """
    if (size_bytes is None) == (leave_bytes is None):
        raise UsageError("how much? give either --size or --leave")
    requested = size_bytes if size_bytes is not None else leave_bytes
    if requested is None or requested < 0:
        raise UsageError(f"{requested} bytes: not below zero")
    size = size_bytes if size_bytes is not None else free_bytes - requested
    if size > free_bytes:
        raise DrillError(f"only {free_bytes} bytes are free, fewer than --size {size}")
    if size <= 0:
        raise DrillError(f"only {free_bytes} bytes are free already: nothing to take")
    return size


MEMORY_HOG_FOR_S = 30.0
# Below this the kernel may kill another process first, whatever its OOM score.
MEMORY_LEFT_BYTES_MIN = 256 * 2**20


@scenario("memory-hog", "Use up memory, then free it.", "size_bytes", "leave_bytes", "for_s")
def memory_hog(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: a child holds memory; the OOM killer would kill it first."""
    available = read_memory(target.root).available_bytes
    size = size_to_take(available, size_bytes=options.size_bytes, leave_bytes=options.leave_bytes)
    if available - size < MEMORY_LEFT_BYTES_MIN:
        raise DrillError(
            f"it would leave {(available - size) / _MIB:.0f} MiB of memory; with less than "
            f"{MEMORY_LEFT_BYTES_MIN / _MIB:.0f} MiB the kernel may kill any process"
        )
    for_s = MEMORY_HOG_FOR_S if options.for_s is None else options.for_s
    return Fault(
        breaks=f"A child of this command allocates {size / _MIB:.0f} MiB of memory; "
        f"{(available - size) / _MIB:.0f} MiB are left.",
        undone=f"After {format_seconds(for_s)} the child ends, or with this command. "
        "The OOM killer would kill it first.",
        changes=(UndoableStep(TakeMemory(size)),),
        for_s=for_s,
    )
