"""Fault injector: a GPU that reports the same Xid again and again, thousands of lines."""

from gpuops.drill.fault import Fault
from gpuops.drill.scenario import Scenario, Scene, Wanted
from gpuops.drill.sick_gpu import xid_fault
from gpuops.errors import UsageError

XID = 31  # a memory page fault: one bad kernel logs it once for each block
COUNT = 1000
_COUNT_MAX = 100_000


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: many lines in the kernel's log."""
    count = COUNT if wanted.count is None else wanted.count
    if not 0 < count <= _COUNT_MAX:
        raise UsageError(f"--count {count}: from 1 to {_COUNT_MAX}")
    return xid_fault(scene, wanted, scenario="xid-storm", xid=XID, count=count)


SCENARIO = Scenario(
    name="xid-storm",
    summary="Write many Xids into the kernel log, marked as a rehearsal.",
    options=("address", "xid", "count"),
    plan=plan,
)
