"""One test of the whole node at a time: a locked file, which says who holds it; other locks."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuops.errors import BusyError
from gpuops.host.trust import why_not_ours

_BYTES_MAX = 4096


@contextmanager
def node_lock(state_dir: Path, suite: str) -> Iterator[str | None]:
    """Hold the node for *suite*; yield None, or why *state_dir* has no lock for this user.

    The lock ends with this process, whatever ends it.

    Raises:
        BusyError: Another process holds it; names its pid and suite.
    """
    problem = why_not_ours(state_dir, private=False)
    if problem is not None:
        yield f"{state_dir}: {problem}"
        return
    path = state_dir / "node-test.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        yield f"{path}: {exc.strerror}"
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"this node is being tested: {_holder(fd)} holds {path}") from None
        problem = _write(fd, suite)
        yield problem and f"{path}: {problem}"
    finally:
        os.close(fd)


def _holder(fd: int) -> str:
    try:
        body = json.loads(os.pread(fd, _BYTES_MAX, 0))
        return f"{body['suite']} (pid {int(body['pid'])})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _write(fd: int, suite: str) -> str | None:
    """Write who holds the lock; return what went wrong. It is held all the same."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "suite": suite}).encode(), 0)
    except OSError as exc:
        return exc.strerror
    return None


@contextmanager
def try_lock(lock: Path) -> Iterator[bool]:
    """Lock the file *lock*; yields False if another process holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)
