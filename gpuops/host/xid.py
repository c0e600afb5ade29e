"""Parse Xid and SXid lines of NVIDIA's driver.

The lines differ by driver: ``pid='<unknown>'`` or none, a name, a channel, a MIG instance after the
address, ``Fatal``/``Nonfatal`` with a link for NVLink 5, the recovery action of Xid 154. The text
that programs control (their name) is always after the code, so the code is matched at the
beginning, and everything else behind the name.

That a GPU fell off the bus is also written without the code 79 (nvidia/src/nv.c and osinit.c of
open-gpu-kernel-modules); `parse_xid` returns Xid 79 for these lines too.
"""

import re
from dataclasses import dataclass, replace

from gpuops.host.kmsg import KernelRecord, quotes_user
from gpuops.host.sysfs import sysfs_address

RECOVERY_ACTION = 154
NVLINK5 = range(144, 151)
_DETAIL_MAX = 1024

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,20})[^)]{0,48}\): (\d{1,5})\b")
# A process chooses its name, of at most 15 bytes (prctl(2), PR_SET_NAME), and ", Fatal" can be part
# of it: the name ends at the last ", " that such a name can reach.
_PROCESS = re.compile(
    r", pid=(?:'?<unknown>'?|'?(\d{1,10})'?)(?P<named>, name=((?s:.{0,15}))(?=, |\Z))?"
)
_NAMED = ", name="
_SEVERITY = re.compile(r"\b(Fatal|Non-?fatal)\b")
_LINK = re.compile(r"\bLink (\d{1,3})\b")
_RECOVERY = re.compile(r"\bto 0x([0-9a-fA-F]{1,8})\b(?: \(([^)]{1,80})\))?")
# nvml.h, nvmlDeviceGpuRecoveryAction_t, in the words of the driver's lines.
RECOVERY_WORDS = {
    0: "None",
    1: "GPU Reset Required",
    2: "Node Reboot Required",
    3: "Drain P2P",
    4: "Drain and Reset",
    5: "Recover IMEX Domain",
    6: "Bus Reset",
    7: "System Reboot",
}
_RECOVER_DOMAIN = 5
_OFF_BUS = re.compile(
    r"NVRM: (?:GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]{5,20}): GPU has fallen off the bus\b"
    r"|The NVIDIA GPU ([0-9a-fA-F:.]{5,20})\b(?s:.{0,160}?)"
    r"\bfallen off the bus and is not responding\b)"
)
PROBED = "NVRM: The NVIDIA GPU "
_OFF_BUS_END = re.compile(
    r"\s{0,32}(?:NVRM: )?(?:(?:installed in this )?system )?(?:has )?fallen off the bus and is not "
    r"responding\b"
)
_OFF_BUS_MIDDLE = re.compile(r"NVRM: (?:\(PCI ID|installed in this)\b")
_OFF_BUS_CODE = 79
_SXID = re.compile(
    r"nvidia-nvswitch\d{1,3}: SXid \(PCI:([0-9a-fA-F:.]{5,20})\): (\d{1,6}), (Fatal|Non-fatal)\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One Xid. ``fatal``: by an NVLink 5 line; None for other lines.

    ``recovery``: the action that the driver requests, in the words of Xid 154.
    """

    address: str
    code: int
    pid: int | None = None
    name: str | None = None
    fatal: bool | None = None
    link: int | None = None
    recovery: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sxid:
    """One SXid of an NVSwitch."""

    address: str
    code: int
    fatal: bool
    link: int | None = None


def parse_xid(text: str) -> Xid | None:
    """Return the Xid in *text* (one kernel record), None if there is none."""
    if quotes_user(text):
        return None
    match = _XID.match(text)
    if match is None:
        off_bus = _OFF_BUS.match(text)
        if off_bus is None:
            return None
        return Xid(address=pci_address(off_bus[1] or off_bus[2]), code=_OFF_BUS_CODE)
    code, process = int(match[2]), _PROCESS.match(text, match.end())
    words = _driver_words(text, match.end())
    severity = _SEVERITY.search(words) if code in NVLINK5 else None
    link = _LINK.search(words) if code in NVLINK5 else None
    pid, name = (process[1], process[3]) if process else (None, None)
    return Xid(
        address=pci_address(match[1]),
        code=code,
        pid=int(pid) if pid else None,
        name=name and name.partition(", ")[0],
        fatal=severity and severity[1] == "Fatal",
        link=int(link[1]) if link else None,
        recovery=_recovery(words) if code == RECOVERY_ACTION else None,
    )


def _driver_words(text: str, start: int) -> str:
    """Return the driver's own words of *text*: what is behind the code and the process."""
    process = _PROCESS.match(text, start)
    start = start if process is None else process.end()
    # A name that does not end where a name must is not the kernel's.
    return "" if text.startswith(_NAMED, start) else text[start : start + _DETAIL_MAX]


def _recovery(words: str) -> str | None:
    action = _RECOVERY.search(words)
    if action is None:
        return None
    number = int(action[1], 16)
    known = RECOVERY_WORDS.get(number, f"action 0x{number:x}")
    return known if number == _RECOVER_DOMAIN else action[2] or known


def is_of_domain(recovery: str) -> bool:
    """Return whether *recovery* is about the NVLink domain of several nodes, not about one GPU."""
    return "imex" in recovery.lower()


def without_name(text: str) -> str | None:
    """Return the kernel's line *text* without the name of a process, for patterns.

    None: it begins as an Xid's and is none.
    """
    if not text.startswith("NVRM: Xid"):
        return text
    match = _XID.match(text)
    if match is None:
        return None
    process = _PROCESS.match(text, match.end())
    if process is not None and process["named"]:
        return text[: process.start("named")] + text[process.end("named") :]
    end = match.end() if process is None else process.end()
    return f"{text[:end]}," if text.startswith(_NAMED, end) else text


class OffBusLines:
    """Joins the lines about a GPU that was off the bus when the driver was loaded.

    Only the first of them names the GPU; in `/dev/kmsg` they usually are one record.
    """

    def __init__(self) -> None:
        self._first: str | None = None

    def join(self, record: KernelRecord) -> KernelRecord:
        """Return *record*, which follows the one before; the last of the lines has the first's."""
        text, first = record.text, self._first
        if text.startswith(PROBED):
            self._first = text
        elif first is not None and _OFF_BUS_END.match(text):
            self._first = None
            return replace(record, text=f"{first}\n{text}")
        elif text.startswith("NVRM: ") and not _OFF_BUS_MIDDLE.match(text):
            self._first = None  # the lines of one message follow each other
        return record


def parse_sxid(text: str) -> Sxid | None:
    """Return the SXid in *text*; None for its further lines (``Severity``, ``Data``)."""
    match = _SXID.match(text)
    if match is None:
        return None
    link = _LINK.search(text, match.end(), match.end() + _DETAIL_MAX)
    return Sxid(
        address=pci_address(match[1]),
        code=int(match[2]),
        fatal=match[3] == "Fatal",
        link=int(link[1]) if link else None,
    )


def pci_address(text: str) -> str:
    """Return ``"0000:3b:00.0"`` for the driver's ``"0000:3b:00"``: a GPU is function 0."""
    address = sysfs_address(text)
    return address if "." in address else f"{address}.0"


def xid_head(text: str) -> str | None:
    """Return the beginning of the Xid's line *text*, with its severity: it is equal in repetitions.

    None: it is none.
    """
    match = _XID.match(text)
    if match is None:
        off_bus = _OFF_BUS.match(text)
        return None if off_bus is None or quotes_user(text) else off_bus[0]
    if int(match[2]) not in NVLINK5:
        return match[0]
    severity = _SEVERITY.search(_driver_words(text, match.end()))
    return match[0] + (severity[1] if severity else "")


def sxid_head(text: str) -> str | None:
    """Return the same for an SXid's line."""
    match = _SXID.match(text)
    return None if match is None else match[0]
