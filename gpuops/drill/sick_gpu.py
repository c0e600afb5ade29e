"""Fault injector: the kernel log says that a GPU is sick, in the words of NVIDIA's driver.

The line names the rehearsal. The kernel marks what a program writes into its log, so a check of the
node never takes it for the driver's own; an agent of ours acts on it because it is marked.
"""

import re
from pathlib import Path

from gpuops.drill.fault import Change, Fault
from gpuops.drill.scenario import Scenario, Scene, Wanted
from gpuops.drill.steps import WriteLines
from gpuops.errors import DrillError, UsageError
from gpuops.host.kmsg import REHEARSAL
from gpuops.model import Entity, EntityKind

XID = 79  # fallen off the bus
ADDRESS = "0000:00:00"
_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?")
_XID_MAX = 999
_PRIORITY = "<3>"  # an error, as the driver logs them


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: one line in the kernel's log."""
    return xid_fault(scene, wanted, scenario="sick-gpu", xid=XID, count=1)


def xid_fault(scene: Scene, wanted: Wanted, *, scenario: str, xid: int, count: int) -> Fault:
    """Return a fault of *count* Xid lines; ``--xid`` and ``--address`` go before the defaults.

    Raises:
        UsageError: Not an Xid, or not an address on the PCI bus.
        DrillError: There is no such log here.
    """
    code = xid if wanted.xid is None else wanted.xid
    address = wanted.address or ADDRESS
    if not 0 < code <= _XID_MAX:
        raise UsageError(f"--xid {code}: from 1 to {_XID_MAX}")
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"--address {address}: the GPU's PCI address, like 0000:3b:00")
    path = scene.root / "dev/kmsg"
    if not path.exists():
        raise DrillError(f"there is no {path}")
    lines = tuple(log_line(path, address, code, number) for number in range(count))
    times = "" if count == 1 else f" {count} times"
    return Fault(
        scenario=scenario,
        breaks=f"The kernel log says{times} that the GPU at {address} has Xid {code}. "
        "No GPU is touched.",
        undone="Nothing undoes it: the line stays in the log, marked as a rehearsal.",
        entities=(Entity(EntityKind.GPU, address),),
        changes=(Change(WriteLines(str(path), lines)),),
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


SCENARIO = Scenario(
    name="sick-gpu",
    summary="Write an Xid into the kernel log, marked as a rehearsal.",
    options=("address", "xid"),
    plan=plan,
)
