"""Memory that processes share by a file descriptor, and that outlives each of them.

A slot is one memfd (memfd_create(2)) of the exact size of its image. It leaves no name behind, is
not limited by ``/dev/shm`` or ``memlock``, and its size is sealed (F_SEAL_SHRINK), so that no
process can truncate it while another one maps it, which would end that one with SIGBUS.
"""

import errno
import fcntl
import mmap
import os
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuops.checkpoint.memory.available import available_bytes
from gpuops.checkpoint.memory.raw_memory import madvise
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, CheckpointError
from gpuops.units import format_bytes

__all__ = ["SEALS", "SharedBuffer", "available_bytes"]

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
POPULATE_BYTES = 32 * 2**20  # 20 to 80 ms of page faults: the longest delay of a stop

HUGE_PAGE_BYTES = 2 * 2**20  # x86-64, and aarch64 with base pages of 4 KiB

_UNMAP_STEP_BYTES = 4 * 2**20  # less than a millisecond: the delay of a stop

_MFD_NOEXEC_SEAL = 0x0008  # linux/memfd.h, since Linux 6.3
_MADV_POPULATE_READ = 22  # asm-generic/mman-common.h, both since Linux 5.14
_MADV_POPULATE_WRITE = 23
_NAME_CHARS_MAX = 200  # memfd_create(2) takes 249 bytes


class SharedBuffer:
    """The memory of one slot, mapped here. A context manager; `close` may be called twice."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        """Map *fd*, which this object owns; it is closed on failure. Use `create` or `attach`."""
        self.nbytes = nbytes
        self.writable = writable
        self._fd = fd
        self._lock = threading.Lock()
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._close_fd.atexit = False
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapped = mmap.mmap(fd, nbytes, access=access)
        except OSError as exc:
            self._close_fd()
            raise _kernel_error(f"map {format_bytes(nbytes)} of a slot", exc) from exc
        with suppress(OSError):
            mapped.madvise(mmap.MADV_DONTDUMP)  # a core file with it could fill a disk
        self._map: mmap.mmap | None = mapped
        self._view = memoryview(mapped)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Self:
        """Return new memory of *nbytes* zeros, sealed at that size; it is not populated yet.

        *name* shows in ``/proc/PID/maps`` and need not be unique.

        Raises:
            CheckpointError: The size is invalid, or the kernel refuses.
        """
        if not 0 < nbytes <= IMAGE_BYTES_MAX:
            raise CheckpointError(f"a slot cannot have {nbytes} bytes (1 to {IMAGE_BYTES_MAX})")
        what = f"create a slot of {format_bytes(nbytes)}"
        shown = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_NAME_CHARS_MAX]
        try:
            fd = _memfd(shown)
        except OSError as exc:
            raise _kernel_error(what, exc) from exc
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as exc:
            os.close(fd)
            raise _kernel_error(what, exc) from exc
        return cls(fd, nbytes, writable=True)

    @classmethod
    def attach(cls, fd: int, *, nbytes: int | None = None, writable: bool = True) -> Self:
        """Return the memory that another process created and sent as *fd*.

        The result owns *fd*, which is closed when this raises.

        Raises:
            CheckpointError: It is not sealed memory, not of *nbytes* bytes, or cannot be mapped.
        """
        try:
            os.set_inheritable(fd, False)
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as exc:
            if exc.errno != errno.EBADF:
                os.close(fd)
            raise _kernel_error(f"use descriptor {fd} as a slot (no memfd?)", exc) from exc
        wrong = _why_invalid(seals, size, nbytes)
        if wrong:
            os.close(fd)
            raise CheckpointError(f"descriptor {fd} is not a slot: {wrong}")
        return cls(fd, size, writable=writable)

    @property
    def fd(self) -> int:
        """The descriptor of the memory, open until `close`.

        Raises:
            CheckpointError: It is closed.
        """
        if not self._close_fd.alive:
            raise CheckpointError("this slot is closed")
        return self._fd

    @property
    def view(self) -> memoryview:
        """All of the memory, as bytes; read-only where it was attached read-only.

        Raises:
            CheckpointError: It is closed.
        """
        if not self._close_fd.alive:
            raise CheckpointError("this slot is closed")
        return self._view

    def populate(
        self,
        stop: Callable[[], bool] = lambda: False,
        *,
        n_threads: int = 1,
        root: Path = Path("/"),
    ) -> bool:
        """Allocate and map all of the memory now, so that no later copy waits for a page fault.

        The content stays, also what another process writes meanwhile. *stop* is called every
        `POPULATE_BYTES`; other threads run. The memory is in huge pages where the machine allows
        that. Returns whether it was completed.

        Raises:
            CheckpointError: There is not enough memory; the message has the figures.
        """
        with self._lock:
            try:
                fd, mapped = os.dup(self.fd), self._map
            except OSError as exc:
                raise _kernel_error("populate a slot", exc) from exc
        assert mapped is not None

        def populate_piece(begin: int) -> bool:
            if stop() or not self._close_fd.alive:
                return False
            end = min(begin + POPULATE_BYTES, self.nbytes)
            self._check_room(fd, end - begin if begin else self.nbytes, root)
            try:
                _populate(mapped, fd, begin, end, writable=self.writable)
            except OSError as exc:
                what = f"populate {format_bytes(self.nbytes)} of a slot (bytes from {begin} on)"
                raise _kernel_error(what, exc, root) from exc
            return True

        pieces = range(0, self.nbytes, POPULATE_BYTES)
        try:
            if self.writable:
                _allow_huge_pages(mapped)
            if n_threads == 1:
                return all(map(populate_piece, pieces))
            with ThreadPoolExecutor(n_threads, "gpuops-populate") as pool:
                return all(pool.map(populate_piece, pieces))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Release the memory, now or when the last reference to `view` is dropped.

        The mapping is dropped, not unmapped explicitly: ``torch.frombuffer`` keeps a reference to
        the view but no lock on its buffer, so that a tensor over it would read unmapped memory.
        """
        with self._lock:
            self._close_fd()
            self._view, self._map = memoryview(b""), None

    def unmap(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Remove the pages from this process's page table, gradually; their content stays.

        That takes a tenth of a second per gigabyte, which a background thread can spend: other
        threads run meanwhile. A reader of the view has the pages mapped again. *stop* is called
        about each millisecond.
        """
        mapped = self._map
        if mapped is not None:
            for begin in range(0, self.nbytes, _UNMAP_STEP_BYTES):
                if stop():
                    return
                nbytes = min(_UNMAP_STEP_BYTES, self.nbytes - begin)
                madvise(mapped, begin, nbytes, mmap.MADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_room(self, fd: int, wanted_bytes: int, root: Path) -> None:
        """Refuse before the kernel's OOM killer would kill a process."""
        taken_bytes = os.fstat(fd).st_blocks * 512
        missing_bytes = min(wanted_bytes, self.nbytes - taken_bytes)
        if missing_bytes <= 0:
            return
        try:
            room_bytes = available_bytes(root)
        except CheckpointError:
            return  # unknown: the kernel decides
        if missing_bytes > room_bytes:
            raise CheckpointError(
                f"a slot of {format_bytes(self.nbytes)} does not fit: "
                f"{format_bytes(self.nbytes - taken_bytes)} of it are not populated, "
                f"{format_bytes(room_bytes)} are available here; give the job more memory, "
                "or use fewer slots"
            )


def _memfd(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _why_invalid(seals: int, size: int, nbytes: int | None) -> str:
    if seals & SEALS != SEALS:
        return f"its size is not sealed (seals {seals:#x})"
    if not 0 < size <= IMAGE_BYTES_MAX:
        return f"it has {size} bytes"
    if nbytes is not None and size != nbytes:
        return f"it has {size} bytes, not {nbytes}"
    return ""


def _populate(mapped: mmap.mmap, fd: int, begin: int, end: int, *, writable: bool) -> None:
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    try:
        madvise(mapped, begin, end - begin, advice)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        _touch(mapped, fd, begin, end, writable=writable)


def _allow_huge_pages(mapped: mmap.mmap) -> None:
    """Allow transparent huge pages, which the machine's settings may refuse.

    Not for the end of the memory: a huge page there would be larger than what is left of it.
    """
    nbytes = len(mapped) - len(mapped) % HUGE_PAGE_BYTES
    if nbytes:
        with suppress(OSError):  # a kernel without them
            madvise(mapped, 0, nbytes, mmap.MADV_HUGEPAGE)


def _touch(mapped: mmap.mmap, fd: int, begin: int, end: int, *, writable: bool) -> None:
    """Populate on a kernel without MADV_POPULATE_WRITE.

    Nothing is written: reading a byte and writing it back could undo another process's write.
    """
    if writable:
        os.posix_fallocate(fd, begin, end - begin)
    with memoryview(mapped) as view:
        bytes(view[begin : end : mmap.PAGESIZE])


def _kernel_error(what: str, exc: OSError, root: Path = Path("/")) -> CheckpointError:
    room = ""
    if exc.errno in {errno.ENOMEM, errno.ENOSPC}:
        with suppress(CheckpointError):
            room = f"; {format_bytes(available_bytes(root))} of memory are available"
    return CheckpointError(f"cannot {what}: {exc.strerror}{room}")
