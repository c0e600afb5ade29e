"""A run's journal: the lines of its spool, kept with the run and never deleted.

With it a run directory alone is reportable, whatever became of spool and store.
"""

import os
from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".jsonl"


class Journal:
    """Appends lines to ``<directory>/<origin>.jsonl``. Every method raises OSError."""

    def __init__(self, directory: Path, origin: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(directory / f"{origin}{SUFFIX}", flags, 0o644)
        self._size = os.fstat(self._fd).st_size

    def append_lines(self, lines: Sequence[bytes], *, sync: bool) -> None:
        data = b"".join(lines)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            if sync:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
