"""A lease on a directory: one job at a time saves into it, and a file there names the owner.

The file is created with `O_EXCL` and renamed before a takeover; network file systems let only one
of several succeed. The owner renews its modification time. Others never compare that time with
their own clock, they check whether it changes. An owner on this host whose process has ended is
dead at once, one elsewhere once its file has not changed for `STALE_S`. So a requeued job gets the
directory, at the latest after that time; a second job does not get it while the first one lives.
"""

import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from gpuops.checkpoint.manifest import format_utc
from gpuops.checkpoint.storage.address import local_directory, open_store
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.directory_files import host_identity, make_directories
from gpuops.checkpoint.types import CheckpointError
from gpuops.errors import ProbeError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.procfs import parse_stat, read_text
from gpuops.wire.messages import NUMBER_MAX, Limit, Message

LOCK_NAME = ".owner"
RENEW_S = 5.0
STALE_S = 40.0
EXIT_GRACE_S = 15.0  # a job that was killed, and its data loaders, take a moment to end
POLL_S = 1.0
RENEWAL_TIMEOUT_S = 8.0  # longer than between two renewals: a silent owner may have ended
_BYTES_MAX = 4096
_NAMESPACE = re.compile(r"-[0-9]{9,}\Z")  # see `this_host`
_TEXT_MAX = 256
_Text = Annotated[str, Limit(_TEXT_MAX)]
_Count = Annotated[int, Limit(NUMBER_MAX)]


class DirectoryLockedError(CheckpointError):
    """Another running job saves into the directory."""


@dataclass(frozen=True, slots=True)
class LockOwner(Message):
    """The owner of a directory. ``job``: the same on all nodes of a run, "" where it has no name.

    ``start_ticks`` distinguishes the process from a later one with the same pid, ``nonce`` this
    owner from all others; ``since`` is UTC.
    """

    job: _Text
    host: _Text
    pid: _Count
    start_ticks: _Count
    since: _Text
    nonce: _Text

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(self.to_json()).encode() + b"\n"

    def __str__(self) -> str:
        host = _NAMESPACE.sub("", self.host)
        return f"{self.job or 'a job'} on {host}, its keeper's pid {self.pid}, since {self.since}"


def parse_owner(content: bytes) -> LockOwner | None:
    """Return the owner that *content* names; None where it is incomplete or invalid."""
    try:
        return LockOwner.from_json(json.loads(content))
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class _LockState:
    owner: LockOwner | None
    changed_ns: int

    @property
    def nonce(self) -> str | None:
        return None if self.owner is None else self.owner.nonce


class _Watch:
    """How long this process has waited for an owner, and whether that owner renews its lease."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_ns = clock.mono_ns()
        self._first: _LockState | None = None

    def is_renewed(self, state: _LockState) -> bool:
        """Return whether the file of this owner has changed since it was first read."""
        if self._first is None or self._first.nonce != state.nonce:
            self._first = state
        return state.changed_ns != self._first.changed_ns

    def waited_s(self) -> float:
        return (self._clock.mono_ns() - self._begin_ns) / 1e9


@dataclass(frozen=True, slots=True)
class LockProcess:
    """The process that takes the lock; *is_alive*: of a pid and its start ticks on this host."""

    host: str
    pid: int
    is_alive: Callable[[int, int], bool]
    random_bytes: Callable[[int], bytes] = os.urandom
    clock: Clock = field(default_factory=SystemClock)
    sleep: Callable[[float], object] = time.sleep


def this_process() -> LockProcess:
    """Return this process."""
    return LockProcess(host_identity(), os.getpid(), is_alive)


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return whether the process *pid* that began at *start_ticks* exists, and is not a zombie."""
    try:
        found = parse_stat(read_text(Path(f"/proc/{pid}/stat")))
    except ProbeError:
        return False
    return found is not None and found.start_ticks == start_ticks and found.state not in "ZX"


class DirectoryLock:
    """This process' lock on the directory *root*."""

    def __init__(self, root: Path, process: LockProcess) -> None:
        self._path = root / LOCK_NAME
        self._process = process
        self._own: LockOwner | None = None
        self._peer_seen: tuple[str, int, int] | None = None  # nonce, file time, when seen
        self._mutex = threading.Lock()

    def acquire(self, job: str) -> None:
        """Lock the directory for *job*, unless this process or a peer of *job* already has it.

        It takes up to `STALE_S` where there is another owner.

        Raises:
            DirectoryLockedError: Another live job has it.
            OSError: Nothing can be written there.
        """
        with self._mutex:
            watch = _Watch(self._process.clock)
            while (state := self._read()) is not None or not self._create(job):
                if state is None:
                    continue
                if self._is_shared_with_us(state, job):
                    return
                waited_s, is_renewed = watch.waited_s(), watch.is_renewed(state)
                if self._is_dead(state.owner) or (not is_renewed and waited_s >= STALE_S):
                    self._break_stale(state)
                elif waited_s >= EXIT_GRACE_S and (
                    is_renewed or self._is_on_this_host(state.owner)
                ):
                    raise DirectoryLockedError(self._conflict_message(state.owner))
                else:
                    self._process.sleep(POLL_S)

    def conflict(self, job: str, own_pid: int | None = None) -> str | None:
        """Return why *job* cannot have the directory; None where it can, or `acquire` decides.

        Nothing is written. *own_pid*: a process of this host whose lock is that of the job. It
        takes up to `EXIT_GRACE_S` where there is another owner, which may be about to end.
        """
        watch = _Watch(self._process.clock)
        while (state := self._read_or_none()) is not None:
            owner, is_here = state.owner, self._is_on_this_host(state.owner)
            if self._is_dead(owner) or (owner is not None and owner.job == job):
                return None
            if owner is not None and is_here and owner.pid == own_pid:
                return None
            is_seen_alive = watch.is_renewed(state) or is_here
            waited_s = watch.waited_s()
            if waited_s >= EXIT_GRACE_S and is_seen_alive:
                return self._conflict_message(owner)
            if waited_s >= RENEWAL_TIMEOUT_S and not is_seen_alive:
                return None
            self._process.sleep(POLL_S)
        return None

    def renew(self) -> None:
        """Renew the lease, where this process has it."""
        with contextlib.suppress(OSError):
            state = self._read()
            if self._own is not None and state is not None and state.nonce == self._own.nonce:
                os.utime(self._path)

    def release(self) -> None:
        """Remove the file, where this process has the lock."""
        with self._mutex, contextlib.suppress(OSError):
            own, self._own = self._own, None
            state = self._read()
            if own is not None and state is not None and state.nonce == own.nonce:
                self._path.unlink()

    def _is_shared_with_us(self, state: _LockState, job: str) -> bool:
        """Return whether the owner is this process, or another live one of the same run."""
        owner, own = state.owner, self._own
        if owner is None:
            return False
        if own is not None and owner.nonce == own.nonce:
            if owner.job != job:
                self._write(os.open(self._path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC), job)
            return True
        if not job or owner.job != job or self._is_dead(owner):
            return False
        now_ns = self._process.clock.mono_ns()
        peer_seen = self._peer_seen
        if peer_seen is None or peer_seen[:2] != (owner.nonce, state.changed_ns):
            self._peer_seen = (owner.nonce, state.changed_ns, now_ns)
            return True
        if (now_ns - peer_seen[2]) / 1e9 < STALE_S:
            return True
        self._break_stale(state)
        return False

    def _is_on_this_host(self, owner: LockOwner | None) -> bool:
        return owner is not None and owner.host == self._process.host

    def _is_dead(self, owner: LockOwner | None) -> bool:
        if owner is None or not self._is_on_this_host(owner):
            return False
        return not self._process.is_alive(owner.pid, owner.start_ticks)

    def _read(self) -> _LockState | None:
        """Return the current owner; the file is opened each time, to ask the file server."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return _LockState(parse_owner(os.read(fd, _BYTES_MAX)), os.fstat(fd).st_mtime_ns)
        finally:
            os.close(fd)

    def _read_or_none(self) -> _LockState | None:
        try:
            return self._read()
        except OSError:
            return None  # the write that follows reports it

    def _create(self, job: str) -> bool:
        """Create the file; return False where another process was first."""
        make_directories(self._path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, 0o644)
        except FileExistsError:
            return False
        self._own = None
        self._write(fd, job)
        return True

    def _write(self, fd: int, job: str) -> None:
        process = self._process
        stat = parse_stat(read_text(Path("/proc/self/stat")))
        self._own = LockOwner(
            job=job[:_TEXT_MAX],
            host=process.host[:_TEXT_MAX],
            pid=process.pid,
            start_ticks=0 if stat is None else stat.start_ticks,
            since=format_utc(process.clock.now_us()),
            nonce=process.random_bytes(8).hex(),
        )
        try:
            os.write(fd, self._own.to_bytes())
            os.fsync(fd)
        finally:
            os.close(fd)

    def _break_stale(self, state: _LockState) -> None:
        """Remove the file of a dead owner; one that was created meanwhile is put back."""
        moved_path = self._path.with_name(f"{LOCK_NAME}.{self._process.random_bytes(8).hex()}")
        try:
            self._path.rename(moved_path)
        except FileNotFoundError:
            return
        try:
            moved = _LockState(parse_owner(moved_path.read_bytes()[:_BYTES_MAX]), 0)
            if moved.nonce != state.nonce:
                with contextlib.suppress(FileExistsError):
                    os.link(moved_path, self._path)
        finally:
            moved_path.unlink()

    def _conflict_message(self, owner: LockOwner | None) -> str:
        who = "an owner that cannot be read" if owner is None else str(owner)
        return (
            f"another job saves into {self._path.parent}: {who}. Two jobs in one directory would "
            "load each other's states: end that one, or give this one a directory of its own"
        )


def lock_conflict(
    address: str, job: str, clock: Clock, keeper_pid: int | None, sleep: Callable[[float], object]
) -> str | None:
    """Return why *job* cannot save at *address*, as its agent sees it before its workers start.

    *keeper_pid*: the job's own keeper on this node. See `DirectoryLock.conflict`.
    """
    path = local_directory(address)
    if path is None:
        return None
    process = replace(this_process(), clock=clock, sleep=sleep)
    return DirectoryLock(path, process).conflict(job, keeper_pid)


class DirectoryLocks:
    """The directories that a process saves into, each held while *is_in_use* says so."""

    def __init__(
        self, job: Callable[[], str], is_in_use: Callable[[], bool], process: LockProcess
    ) -> None:
        self._job = job
        self._is_in_use = is_in_use
        self._process = process
        self._locks: dict[Path, DirectoryLock] = {}
        self._stop = threading.Event()
        self._start_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gpuops-locks", daemon=True)

    def open_store(self, address: str) -> CheckpointStore:
        """Return the store at *address*; a directory is locked for the job first.

        Raises:
            DirectoryLockedError: Another live job has it.
            CheckpointError: See `gpuops.checkpoint.storage.address.open_store`.
        """
        store, path = open_store(address), local_directory(address)
        if path is not None:
            lock = self._locks.setdefault(path, DirectoryLock(path, self._process))
            # A directory that cannot be written to needs no lock; the save reports why.
            with contextlib.suppress(OSError):
                lock.acquire(self._job())
            with self._start_lock:
                if self._thread.ident is None:
                    self._thread.start()
        return store

    def close(self) -> None:
        """Release all of them."""
        self._stop.set()
        self._release()

    def _run(self) -> None:
        for n_polls in itertools.count(1):
            if self._stop.wait(POLL_S):
                return
            if not self._is_in_use():
                self._release()
            elif n_polls % round(RENEW_S / POLL_S) == 0:
                for lock in list(self._locks.values()):
                    lock.renew()

    def _release(self) -> None:
        for lock in list(self._locks.values()):
            lock.release()
