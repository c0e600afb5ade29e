"""Fault injector: a file system is full, or nearly, for a while."""

from pathlib import Path

from gpuops.drill.fault import Change, Fault
from gpuops.drill.scenario import Scenario, Scene, Wanted, seconds
from gpuops.drill.steps import TakeSpace, room_bytes
from gpuops.errors import DrillError, UsageError

FOR_S = 60.0
_MIB = 2**20


def plan(scene: Scene, wanted: Wanted) -> Fault:  # noqa: ARG001 it needs no run
    """Return the fault: a nameless file of a size, or one that leaves so much room."""
    if wanted.directory is None:
        raise UsageError("which directory? name one on the file system that is to fill up: --dir")
    free = room_bytes(Path(wanted.directory))
    size = size_to_take(free, size_bytes=wanted.size_bytes, leave_bytes=wanted.leave_bytes)
    for_s = FOR_S if wanted.for_s is None else wanted.for_s
    left = free - size
    return Fault(
        scenario="fill-disk",
        breaks=f"{size / _MIB:.0f} MiB of the file system of {wanted.directory} are taken; "
        f"{left / _MIB:.1f} MiB are left to everybody who writes there.",
        undone=f"After {seconds(for_s)} the room is given back; by the kernel, should this "
        "command be killed.",
        changes=(Change(TakeSpace(wanted.directory, size)),),
        for_s=for_s,
    )


def size_to_take(free_bytes: int, *, size_bytes: int | None, leave_bytes: int | None) -> int:
    """Return how many of *free_bytes* to take.

    Raises:
        UsageError: Not exactly one of the two was given, or it is below zero.
        DrillError: There is not that much.
    """
    if (size_bytes is None) == (leave_bytes is None):
        raise UsageError("how much? give either --size or --leave")
    asked = size_bytes if size_bytes is not None else leave_bytes
    if asked is None or asked < 0:
        raise UsageError(f"{asked} bytes: not below zero")
    size = size_bytes if size_bytes is not None else free_bytes - asked
    if size > free_bytes:
        raise DrillError(f"only {free_bytes} bytes are free, fewer than --size {size}")
    if size <= 0:
        raise DrillError(f"only {free_bytes} bytes are free already: nothing to take")
    return size


SCENARIO = Scenario(
    name="fill-disk",
    summary="Take the room of a file system, then give it back.",
    options=("directory", "size_bytes", "leave_bytes", "for_s"),
    plan=plan,
)
