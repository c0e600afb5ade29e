"""What is on stable storage at each moment, by the calls that a process makes."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """A rename or removal of *name*, and the inodes that were not synced when it was made."""

    what: str
    name: str
    unsynced: frozenset[int]


class DiskOrder:
    """Follows the calls of ``os`` that write; a crash loses what is not synced.

    A file is unsynced from its creation or a write on, a directory from a change of its entries.
    """

    def __init__(self, monkeypatch):
        self.unsynced = set()
        self.changes = []
        for name in ("open", "write", "mkdir", "rename", "unlink", "rmdir", "fsync"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, getattr(self, f"_{name}")(real))

    def change(self, what, name):
        """Return the last change of that kind and name."""
        return [c for c in self.changes if (c.what, c.name) == (what, name)][-1]

    def is_synced(self, *paths):
        """Say whether all of *paths* would survive a crash now."""
        return not self.unsynced.intersection(Path(path).stat().st_ino for path in paths)

    def _enter(self, path, dir_fd):
        folder = Path(path).parent
        self.unsynced.add(os.stat(folder, dir_fd=dir_fd).st_ino)

    def _open(self, real):
        def call(path, flags, mode=0o777, *, dir_fd=None):
            fd = real(path, flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT:
                self.unsynced.add(os.fstat(fd).st_ino)
                self._enter(path, dir_fd)
            return fd

        return call

    def _write(self, real):
        def call(fd, data):
            self.unsynced.add(os.fstat(fd).st_ino)
            return real(fd, data)

        return call

    def _mkdir(self, real):
        def call(path, mode=0o777, *, dir_fd=None):
            real(path, mode, dir_fd=dir_fd)
            self._enter(path, dir_fd)

        return call

    def _rename(self, real):
        def call(old, new, *, src_dir_fd=None, dst_dir_fd=None):
            self._note("rename", new)
            real(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self._enter(old, src_dir_fd)
            self._enter(new, dst_dir_fd)

        return call

    def _unlink(self, real):
        def call(path, *, dir_fd=None):
            self._note("unlink", path)
            real(path, dir_fd=dir_fd)
            self._enter(path, dir_fd)

        return call

    def _rmdir(self, real):
        def call(path, *, dir_fd=None):
            real(path, dir_fd=dir_fd)
            self._enter(path, dir_fd)

        return call

    def _fsync(self, real):
        def call(fd):
            real(fd)
            self.unsynced.discard(os.fstat(fd).st_ino)

        return call

    def _note(self, what, path):
        self.changes.append(Change(what, Path(path).name, frozenset(self.unsynced)))
