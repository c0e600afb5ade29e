"""One job at a time saves into a directory: a file there says which, and that it lives.

The file is made by `O_EXCL` and renamed when it is taken over, which network file systems do for
one of several; its time is renewed by who holds it. Others never compare that time with a clock of
their own: they look whether it changes. An owner on this host whose process is gone is dead at
once, one elsewhere once its file has not changed for `STALE_S`. So a job that was requeued gets the
directory, at the latest after that time; a second job while the first one lives does not.
"""

import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gpuops.checkpoint.directory_files import make_durably
from gpuops.checkpoint.directory_names import this_host
from gpuops.checkpoint.manifest import utc
from gpuops.checkpoint.state_store import CheckpointStore
from gpuops.checkpoint.states import CheckpointError
from gpuops.checkpoint.stores import open_store
from gpuops.errors import ProbeError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.procfs import parse_stat, read_text

OWNER = ".owner"
RENEWED_S = 5.0
STALE_S = 40.0
LEAVING_S = 15.0  # a job that was killed, and its data loaders, take a moment to be gone
LOOK_S = 1.0
SILENT_S = 8.0  # longer than between two renewals: whoever is silent for so long may be gone
_BYTES_MAX = 4096
_NAMESPACE = re.compile(r"-[0-9]{9,}\Z")  # see `this_host`
_TEXT_MAX = 256


class TakenError(CheckpointError):
    """Another job that lives saves into the directory."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a directory. ``job`` is the same for all nodes of a run, "" where it has no name.

    ``start_ticks`` tells the process from a later one with its number, ``nonce`` this owner from
    all others; ``since`` is UTC.
    """

    job: str
    host: str
    pid: int
    start_ticks: int
    since: str
    nonce: str

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def __str__(self) -> str:
        host = _NAMESPACE.sub("", self.host)
        return f"{self.job or 'a job'} on {host}, its keeper's pid {self.pid}, since {self.since}"


def owner_of(content: bytes) -> Owner | None:
    """Return the owner that *content* names; None where it names none, as while it is written."""
    try:
        values = json.loads(content)
        texts = [values[name] for name in ("job", "host", "since", "nonce")]
        numbers = [values["pid"], values["start_ticks"]]
        is_sound = all(isinstance(t, str) and len(t) <= _TEXT_MAX for t in texts)
        if not is_sound or not all(type(n) is int and n >= 0 for n in numbers):
            return None
        return Owner(texts[0], texts[1], numbers[0], numbers[1], texts[2], texts[3])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class _Seen:
    owner: Owner | None
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Myself:
    """The process that claims; *alive* says whether another one of this host lives."""

    host: str
    pid: int
    alive: Callable[[int, int], bool]
    randomness: Callable[[int], bytes] = os.urandom
    clock: Clock = field(default_factory=SystemClock)
    pause: Callable[[float], object] = time.sleep


def this_process() -> Myself:
    """Return this process."""
    return Myself(this_host(), os.getpid(), is_alive)


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return whether the process *pid* that began at *start_ticks* is there, and no zombie."""
    try:
        found = parse_stat(read_text(Path(f"/proc/{pid}/stat")))
    except ProbeError:
        return False
    return found is not None and found.start_ticks == start_ticks and found.state not in "ZX"


class Claim:
    """This process' claim on the directory *root*."""

    def __init__(self, root: Path, me: Myself) -> None:
        self._path = root / OWNER
        self._me = me
        self._mine: Owner | None = None
        self._shared: tuple[str, int, int] | None = None  # of a peer: nonce, its time, when seen
        self._turn = threading.Lock()

    def hold(self, job: str) -> None:
        """Claim the directory for *job*, or see that a peer of that job, or this process, has it.

        It takes up to `STALE_S` where another one is there.

        Raises:
            TakenError: Another job has it, and lives.
            OSError: Nothing can be written there.
        """
        with self._turn:
            begin_ns, first = self._me.clock.mono_ns(), None
            while (seen := self._seen()) is not None or not self._made(job):
                if seen is None:
                    continue
                if self._is_fine(seen, job):
                    return
                waited_s = (self._me.clock.mono_ns() - begin_ns) / 1e9
                if first is None or _nonce(first) != _nonce(seen):
                    first = seen
                is_moving = seen.changed_ns != first.changed_ns
                if self._is_dead(seen.owner) or (not is_moving and waited_s >= STALE_S):
                    self._put_away(seen)
                elif waited_s >= LEAVING_S and (is_moving or self._is_here(seen.owner)):
                    raise TakenError(self._why(seen.owner))
                else:
                    self._me.pause(LOOK_S)

    def refusal(self, job: str, ours: int | None = None) -> str | None:
        """Return why *job* cannot have the directory; None where it can, or where `hold` will tell.

        Nothing is written. *ours*: a process of this host whose claim is that of the job. It takes
        up to `LEAVING_S` where another one is there, for it may be about to leave.
        """
        begin_ns, first = self._me.clock.mono_ns(), None
        while (seen := self._seen_if_any()) is not None:
            owner, is_here = seen.owner, self._is_here(seen.owner)
            if self._is_dead(owner) or (owner is not None and owner.job == job):
                return None
            if owner is not None and is_here and owner.pid == ours:
                return None
            if first is None or _nonce(first) != _nonce(seen):
                first = seen
            is_seen_alive = is_here or seen.changed_ns != first.changed_ns
            waited_s = (self._me.clock.mono_ns() - begin_ns) / 1e9
            if waited_s >= LEAVING_S and is_seen_alive:
                return self._why(owner)
            if waited_s >= SILENT_S and not is_seen_alive:
                return None
            self._me.pause(LOOK_S)
        return None

    def renew(self) -> None:
        """Show that the owner lives, where that is this process."""
        with contextlib.suppress(OSError):
            seen = self._seen()
            if self._mine is not None and seen is not None and _nonce(seen) == self._mine.nonce:
                os.utime(self._path)

    def release(self) -> None:
        """Let others have it, where this process has it."""
        with self._turn, contextlib.suppress(OSError):
            mine, self._mine = self._mine, None
            seen = self._seen()
            if mine is not None and seen is not None and _nonce(seen) == mine.nonce:
                self._path.unlink()

    def _is_fine(self, seen: _Seen, job: str) -> bool:
        """Say whether the owner is this process, or another one of the same run that lives."""
        owner, mine = seen.owner, self._mine
        if owner is None:
            return False
        if mine is not None and owner.nonce == mine.nonce:
            if owner.job != job:
                self._write(os.open(self._path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC), job)
            return True
        if not job or owner.job != job or self._is_dead(owner):
            return False
        now_ns = self._me.clock.mono_ns()
        known = self._shared
        if known is None or known[:2] != (owner.nonce, seen.changed_ns):
            self._shared = (owner.nonce, seen.changed_ns, now_ns)
            return True
        if (now_ns - known[2]) / 1e9 < STALE_S:
            return True
        self._put_away(seen)
        return False

    def _is_here(self, owner: Owner | None) -> bool:
        return owner is not None and owner.host == self._me.host

    def _is_dead(self, owner: Owner | None) -> bool:
        return (
            owner is not None
            and owner.host == self._me.host
            and not self._me.alive(owner.pid, owner.start_ticks)
        )

    def _seen(self) -> _Seen | None:
        """Return who is there; the file is opened anew, so that a file server is asked."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return _Seen(owner_of(os.read(fd, _BYTES_MAX)), os.fstat(fd).st_mtime_ns)
        finally:
            os.close(fd)

    def _seen_if_any(self) -> _Seen | None:
        try:
            return self._seen()
        except OSError:
            return None  # whoever writes there will tell

    def _made(self, job: str) -> bool:
        """Make the file; return False where somebody was faster."""
        make_durably(self._path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, 0o644)
        except FileExistsError:
            return False
        self._mine = None
        self._write(fd, job)
        return True

    def _write(self, fd: int, job: str) -> None:
        me = self._me
        stat = parse_stat(read_text(Path("/proc/self/stat")))
        self._mine = Owner(
            job=job[:_TEXT_MAX],
            host=me.host[:_TEXT_MAX],
            pid=me.pid,
            start_ticks=0 if stat is None else stat.start_ticks,
            since=utc(me.clock.now_us()),
            nonce=me.randomness(8).hex(),
        )
        try:
            os.write(fd, self._mine.to_bytes())
            os.fsync(fd)
        finally:
            os.close(fd)

    def _put_away(self, seen: _Seen) -> None:
        """Remove the file of an owner that is dead; one that was made meanwhile is put back."""
        aside = self._path.with_name(f"{OWNER}.{self._me.randomness(8).hex()}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        try:
            if _nonce(seen) != getattr(owner_of(aside.read_bytes()[:_BYTES_MAX]), "nonce", None):
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._path)
        finally:
            aside.unlink()

    def _why(self, owner: Owner | None) -> str:
        who = "an owner that cannot be read" if owner is None else str(owner)
        return (
            f"another job saves into {self._path.parent}: {who}. Two jobs in one directory would "
            "load each other's states: end that one, or give this one a directory of its own"
        )


def _nonce(seen: _Seen) -> str | None:
    return None if seen.owner is None else seen.owner.nonce


def directory_of(address: str) -> Path | None:
    """Return the directory that *address* names; None for a URL, which nobody can claim."""
    path = address.removeprefix("file://")
    return None if "://" in path else Path(path)


def refusal(
    address: str,
    job: str,
    clock: Clock,
    keeper_pid: int | None,
    pause: Callable[[float], object],
) -> str | None:
    """Return why *job* cannot save at *address*, as its agent sees it before its workers start.

    *keeper_pid*: the job's own keeper on this node. See `Claim.refusal`.
    """
    path = directory_of(address)
    if path is None:
        return None
    me = replace(this_process(), clock=clock, pause=pause)
    return Claim(path, me).refusal(job, keeper_pid)


class Claims:
    """The directories that a process saves into, each held while *is_in_use* says so."""

    def __init__(self, job: Callable[[], str], is_in_use: Callable[[], bool], me: Myself) -> None:
        self._job = job
        self._is_in_use = is_in_use
        self._me = me
        self._claims: dict[Path, Claim] = {}
        self._ends = threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gpuops-claims", daemon=True)

    def open_store(self, address: str) -> CheckpointStore:
        """Return the store at *address*; a directory is claimed for the job first.

        Raises:
            TakenError: Another job has it, and lives.
            CheckpointError: See `gpuops.checkpoint.stores.open_store`.
        """
        store, path = open_store(address), directory_of(address)
        if path is not None:
            claim = self._claims.setdefault(path, Claim(path, self._me))
            # What cannot be written to, no other job can have written to because of us.
            with contextlib.suppress(OSError):
                claim.hold(self._job())
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()
        return store

    def close(self) -> None:
        """Let all of them go."""
        self._ends.set()
        self._release()

    def _run(self) -> None:
        for n_looks in itertools.count(1):
            if self._ends.wait(LOOK_S):
                return
            if not self._is_in_use():
                self._release()
            elif n_looks % round(RENEWED_S / LOOK_S) == 0:
                for claim in list(self._claims.values()):
                    claim.renew()

    def _release(self) -> None:
        for claim in list(self._claims.values()):
            claim.release()
