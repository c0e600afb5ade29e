"""Xids as the kernel's log has them, from now on: with the driver's words, for who may read it."""

import os
import select
from collections.abc import Iterator
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import GpuName, read_gpu_names
from gpuops.host.kmsg import RECORD_MAX, open_kmsg, parse_kmsg
from gpuops.host.xid import parse_xid
from gpuops.host.xid_watch import XidEvent, XidReporter, XidSource
from gpuops.model import UnknownReason

WAIT_S = 0.2


class XidLog:
    """Follows the kernel's log below *root* from its end as it is when this is made.

    Raises:
        ProbeError: ``missing_tool`` without a GPU, ``no_permission``, ``not_supported``.
    """

    def __init__(self, root: Path, teller: XidReporter, clock: Clock) -> None:
        self._teller = teller
        self._clock = clock
        self._gpus: dict[str, GpuName] = {gpu.address: gpu for gpu in read_gpu_names(root, {})}
        if not self._gpus:
            raise ProbeError("there is no GPU", UnknownReason.MISSING_TOOL)
        self._fd = open_kmsg(root)
        self._rest = b""
        os.lseek(self._fd, 0, os.SEEK_END)

    def run(self) -> None:
        """Tell of each Xid; does not return.

        Raises:
            ProbeError: The log cannot be read any more.
        """
        self.begun()
        for _ in self.steps():
            self._teller.tick()

    def begun(self) -> None:
        """Tell which GPUs there are."""
        self._teller.begun(list(self._gpus.values()))

    def steps(self) -> Iterator[None]:
        """Tell of what came, yielding after each read and each wait."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while True:
            chunk = self._read()
            if chunk is None:
                poller.poll(WAIT_S * 1000)
            elif chunk:
                self._take(chunk)
            else:
                # The end of a plain file, which always polls as readable.
                select.select([], [], [], WAIT_S)
            yield

    def close(self) -> None:
        """Close the log."""
        os.close(self._fd)

    def _read(self) -> bytes | None:
        """Return what there is: nothing at a plain file's end, None at the log's."""
        try:
            return os.read(self._fd, RECORD_MAX)
        except BlockingIOError:
            return None
        except BrokenPipeError:
            return self._read()  # the record was overwritten; the next read has the oldest
        except OSError as exc:
            text = f"cannot read the kernel's log: {exc.strerror}"
            raise ProbeError(text, UnknownReason.CRASH) from exc

    def _take(self, chunk: bytes) -> None:
        whole, newline, rest = (self._rest + chunk).rpartition(b"\n")
        self._rest = rest[-RECORD_MAX:]
        if not newline:
            return
        for record in parse_kmsg(whole.decode("utf-8", errors="replace"), rehearsals=True):
            xid = parse_xid(record.text)
            if xid is None:
                continue
            gpu = self._gpus.get(xid.address)
            self._teller.tell(
                XidEvent(
                    source=XidSource.KERNEL,
                    code=xid.code,
                    mono_ns=self._clock.mono_ns(),
                    now_us=self._clock.now_us(),
                    address=xid.address,
                    uuid=None if gpu is None else gpu.uuid,
                    index=None if gpu is None else gpu.index,
                    process=xid.pid,
                    fatal=xid.fatal,
                    recovery=xid.recovery,
                    line=record.text,
                )
            )
