"""Writing a long file past the page cache, where its file system lets one.

The disk then takes the bytes from the memory that they are in: no core copies them, no page of the
cache is taken for them and written back, and what training has in the cache stays there.
"""

import errno
import fcntl
import os

from gpuops.checkpoint.directory_files import write_all

BLOCK_BYTES = 4096  # a multiple of the logical blocks of disks; open(2), O_DIRECT


class DirectWriter:
    """Writes to the beginning of the new file *fd* and on, one piece after the other.

    From the first piece on that is no whole number of blocks, or that the file system does not take
    so (it is no page's begin in memory, or nothing may go past its cache), all goes by the cache.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self.is_direct = _set_direct(fd, is_on=True)

    def write(self, data: memoryview) -> None:
        """Write all of *data*.

        Raises:
            OSError: Not all of it could be written.
        """
        n_written = self._past_cache(data) if self.is_direct else 0
        begin = self._at + n_written
        self._at += len(data)
        if n_written < len(data):
            if self.is_direct:
                self.is_direct = False
                _set_direct(self._fd, is_on=False)
            write_all(self._fd, data[n_written:])
            # On a file with dirty pages this starts their writing and waits for nothing.
            os.posix_fadvise(self._fd, begin, self._at - begin, os.POSIX_FADV_DONTNEED)

    def _past_cache(self, data: memoryview) -> int:
        """Write whole blocks of *data*; return how many bytes were."""
        whole = len(data) - len(data) % BLOCK_BYTES
        done = 0
        while done < whole:
            try:
                n_written = os.write(self._fd, data[done:whole])
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                break  # also after a write that came to lie within a block
            if n_written == 0:
                break
            done += n_written
        return done


def _set_direct(fd: int, *, is_on: bool) -> bool:
    """Have writes to *fd* go past the cache, or not; return whether they do."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_on else flags)
    except OSError:
        return False
    return is_on
