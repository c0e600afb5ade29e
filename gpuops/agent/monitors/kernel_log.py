"""What the kernel said while an attempt ran: the proof of an OOM kill, or an Xid.

Records are counted by their sequence number, not by time: the kernel's clock for its log is not
the monotonic clock that dates everything else here, and the two drift apart.
"""

from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.kmsg import KernelRecord, kernel_records

LINES_MAX = 2000


class AttemptKernelLog:
    """This node's kernel log, from a mark on; empty where it may not be read. Never raises."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._mark: int | None = None

    def mark(self) -> None:
        """Remember where the log ends now."""
        records = self._read()
        self._mark = None if records is None else max((r.sequence for r in records), default=-1)

    def since_mark(self) -> tuple[str, ...]:
        """Return the newest lines after the mark, oldest first; none without a mark."""
        mark = self._mark
        if mark is None:
            return ()
        lines = [record.text for record in self._read() or () if record.sequence > mark]
        return tuple(lines[-LINES_MAX:])

    def _read(self) -> list[KernelRecord] | None:
        try:
            return list(kernel_records(self._root))
        except ProbeError:
            return None
