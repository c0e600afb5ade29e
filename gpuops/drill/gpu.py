"""Fault injectors: Xid lines in the kernel log, in the format of NVIDIA's driver.

The line names the rehearsal. The kernel marks what a program writes into its log, so a node check
never mistakes it for the driver's; a gpuops agent reacts to the mark. A storm is thousands of lines
of the same Xid of one GPU.
"""

import re
from pathlib import Path

from gpuops.drill.fault import DrillOptions, DrillTarget, Fault, UndoableStep, scenario
from gpuops.drill.steps import WriteLines
from gpuops.errors import DrillError, UsageError
from gpuops.host.kmsg import REHEARSAL
from gpuops.model import Entity, EntityKind

SICK_GPU_XID = 79  # fallen off the bus
DEFAULT_ADDRESS = "0000:00:00"
_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?")
_XID_MAX = 999
_PRIORITY = "<3>"  # an error, as the driver logs them


@scenario("sick-gpu", "Write an Xid into the kernel log, marked as a rehearsal.", "address", "xid")
def sick_gpu(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: one line in the kernel's log."""
    return xid_fault(target, options, xid=SICK_GPU_XID, count=1)


def xid_fault(target: DrillTarget, options: DrillOptions, *, xid: int, count: int) -> Fault:
    """Return a fault of *count* Xid lines; ``--xid`` and ``--address`` override the defaults.

    Raises:
        UsageError: Not an Xid, or not a PCI address.
        DrillError: There is no kernel log.
    """
    code = xid if options.xid is None else options.xid
    address = options.address or DEFAULT_ADDRESS
    if not 0 < code <= _XID_MAX:
        raise UsageError(f"--xid {code}: from 1 to {_XID_MAX}")
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"--address {address}: the GPU's PCI address, like 0000:3b:00")
    path = target.root / "dev/kmsg"
    if not path.exists():
        raise DrillError(f"there is no {path}")
    lines = tuple(log_line(path, address, code, number) for number in range(count))
    times = "" if count == 1 else f" {count} times"
    return Fault(
        breaks=f"The kernel log reports{times} that the GPU at {address} has Xid {code}. "
        "No GPU is affected.",
        undone="It is not undone: the line stays in the log, marked as a rehearsal.",
        entities=(Entity(EntityKind.GPU, address),),
        changes=(UndoableStep(WriteLines(str(path), lines)),),
    )


def log_line(path: Path, address: str, code: int, number: int = 0) -> str:
    """Return the line for the log *path*: a message for the kernel, a record where it is a file."""
    text = (
        f"NVRM: Xid (PCI:{address}): {code}, pid='<unknown>', name=<unknown>, {REHEARSAL} "
        f"{number + 1}"
    )
    if path.is_file():
        return f"11,{10**9 + number},{10**9 + number},-;{text}"  # facility 1: a program's
    return f"{_PRIORITY}{text}"


XID_STORM_XID = 31  # a memory page fault: one bad kernel logs it once for each block
XID_STORM_COUNT = 1000
_COUNT_MAX = 100_000


@scenario(
    "xid-storm",
    "Write many Xids into the kernel log, marked as a rehearsal.",
    "address",
    "xid",
    "count",
)
def xid_storm(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: many lines in the kernel's log."""
    count = XID_STORM_COUNT if options.count is None else options.count
    if not 0 < count <= _COUNT_MAX:
        raise UsageError(f"--count {count}: from 1 to {_COUNT_MAX}")
    return xid_fault(target, options, xid=XID_STORM_XID, count=count)
