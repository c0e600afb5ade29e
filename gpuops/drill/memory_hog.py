"""Fault injector: memory is short for a while, because a child of ours holds it."""

from gpuops.drill.fault import Change, Fault
from gpuops.drill.fill_disk import size_to_take
from gpuops.drill.scenario import Scenario, Scene, Wanted, seconds
from gpuops.drill.steps import TakeMemory
from gpuops.errors import DrillError
from gpuops.host.procfs import read_memory

FOR_S = 30.0
# Below this the kernel may well end something else first, whatever is offered to it.
LEAVE_BYTES_MIN = 256 * 2**20
_MIB = 2**20


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: a child holds memory; the kernel would end it before anything else."""
    available = read_memory(scene.root).available_bytes
    size = size_to_take(available, size_bytes=wanted.size_bytes, leave_bytes=wanted.leave_bytes)
    if available - size < LEAVE_BYTES_MIN:
        raise DrillError(
            f"it would leave {(available - size) / _MIB:.0f} MiB of memory; with less than "
            f"{LEAVE_BYTES_MIN / _MIB:.0f} MiB the kernel kills what it likes"
        )
    for_s = FOR_S if wanted.for_s is None else wanted.for_s
    return Fault(
        scenario="memory-hog",
        breaks=f"{size / _MIB:.0f} MiB of memory are taken by a child of this command; "
        f"{(available - size) / _MIB:.0f} MiB are left.",
        undone=f"After {seconds(for_s)} the child ends; also with this command. The kernel would "
        "end it before anything else.",
        changes=(Change(TakeMemory(size)),),
        for_s=for_s,
    )


SCENARIO = Scenario(
    name="memory-hog",
    summary="Take memory, then give it back.",
    options=("size_bytes", "leave_bytes", "for_s"),
    plan=plan,
)
