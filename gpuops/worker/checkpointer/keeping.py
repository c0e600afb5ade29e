"""Who keeps this rank's states: the keeper of the agent, else one that is started for the job.

Without an agent, a keeper serves one directory and the ranks of one node: the job that runs again
with the same directory finds it, while it waits for somebody to come back.
"""

import fcntl
import hashlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuops.checkpoint.address import check_address
from gpuops.checkpoint.agent_link import AgentLink
from gpuops.checkpoint.client import connect
from gpuops.checkpoint.keeper import Keeper, Policy
from gpuops.checkpoint.keeper_line import KeeperGoneError, KeeperLine
from gpuops.checkpoint.keeper_process import start_or_adopt
from gpuops.checkpoint.socket_place import socket_of
from gpuops.checkpoint.states import CheckpointError, KeeperError
from gpuops.host.directories import why_not_ours
from gpuops.worker.checkpointer.place import Place, is_group

_log = logging.getLogger(__name__)

KEEPER, DIRECTORY, GENERATION = "GPUOPS_KEEPER", "GPUOPS_CKPT_DIR", "GPUOPS_GENERATION"
LAST_SAVE_S = 600.0
_LOCK = "job.lock"
# What is in its folder; the lock is the last, for whoever has it has the folder.
_FILES = ("keeper.sock", "keeper.lock", "keeper.log", "keeper.log.1", _LOCK)
_LOCK_S = 15.0  # a killed job's data loaders may outlive it, and its lock, for a while
_PARTING_S = 5.0  # between the first rank that leaves and the last, mostly
_PROBE_S = 5.0
_APPEAR_S = 60.0
_AGAIN_S = 0.05


class NoKeeperError(KeeperError):
    """There is no keeper, and there will be none."""


class BusyDirectoryError(CheckpointError):
    """Another job that runs saves into the same directory."""


class OwnKeeper:
    """The keeper of a job without an agent.

    Who has *lock*, local rank 0, answers for it. Another rank has none, and answers for it once
    that one has left while others were at work. *patience_s*: how long parts of the last state are
    waited for.
    """

    def __init__(
        self, socket_path: Path, lock: int | None = None, *, patience_s: float = _LOCK_S
    ) -> None:
        self._socket_path = socket_path
        self._lock = lock
        self._patience_s = patience_s

    def finish(self, step: int | None, deadline_s: float = LAST_SAVE_S) -> None:
        """Have the last state persisted, that of *step* if it comes about, and end the keeper.

        Where other ranks are at work still, it is left to the last of them.

        Raises:
            KeeperError: It is gone, or could not persist it; the state before stays.
        """
        self.persist(step, deadline_s, is_over=True)

    def persist(self, step: int | None, deadline_s: float, *, is_over: bool = False) -> None:
        """Do as `finish`, and let the keeper live where it is not over: for its lease.

        Raises:
            KeeperError: It is gone, or could not persist it; the state before stays.
        """
        end_s = time.monotonic() + deadline_s
        if self._lock is None and not self._is_left_to_us():
            return
        try:
            self._persist(step, end_s, is_over=is_over)
        finally:
            self.leave()

    def _persist(self, step: int | None, end_s: float, *, is_over: bool) -> None:
        link = AgentLink.connect(self._socket_path)
        try:
            if _has_committed(link, step, self._patience_s) and is_over:
                _await_leaving(link, min(_PARTING_S, self._patience_s))
            while True:
                flushed = link.flush(max(end_s - time.monotonic(), 1.0))
                notice = link.stats().get("notice")
                has_failed = step is not None and flushed.state is None
                n_ranks, is_ending = link.leave(is_over=is_over and not has_failed)
                if is_ending:
                    self._remove()
                is_left = bool(n_ranks) or is_ending or not is_over
                if is_left or flushed.state is None or time.monotonic() >= end_s:
                    break
                time.sleep(_AGAIN_S)  # a rank that left meanwhile has saved once more
            if isinstance(notice, str):
                _log.warning("%s", notice)
            if has_failed:
                raise KeeperError(f"the last state was not persisted: {flushed.why}")
        finally:
            link.close()
        if step is not None and flushed.state is not None and flushed.state.step < step:
            later = f"; ranks still at work: {n_ranks}, whose last state persists when they leave"
            _log.warning(
                "the state after step %d is not persisted: other ranks have not saved theirs in "
                "%g s; the newest that is persisted is that after step %d%s",
                step,
                self._patience_s,
                flushed.state.step,
                later if n_ranks else "",
            )

    def _is_left_to_us(self) -> bool:
        """Say whether who answered for the keeper has left, and nobody else has taken its place."""
        try:
            line = KeeperLine(self._socket_path, deadline_s=_PROBE_S)
        except KeeperError:
            return False
        try:
            line.ask("hello", role="probe")
            is_left = line.ask("left")[0].flag("is_left")
        except KeeperError:
            return False
        finally:
            line.close()
        folder = self._socket_path.parent
        try:
            self._lock = _locked(folder / _LOCK, str(folder), wait_s=1.0) if is_left else None
        except (BusyDirectoryError, OSError):
            return False  # another rank, or the next job, which has all that there is in memory
        return self._lock is not None

    def _remove(self) -> None:
        """Remove the folder of the keeper, which has ended; whoever comes next makes another."""
        folder = self._socket_path.parent
        with suppress(OSError):
            for name in _FILES:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()

    def leave(self) -> None:
        """Let another job have the directory."""
        lock, self._lock = self._lock, None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # forked data loaders have the descriptor as well
            os.close(lock)


def _has_committed(link: AgentLink, step: int | None, patience_s: float) -> bool:
    """Wait a little for the other ranks' parts of the last state; say whether they came."""
    end_s = time.monotonic() + patience_s
    while step is not None and time.monotonic() < end_s:
        newest = link.stats().get("newest")
        if isinstance(newest, list) and len(newest) == 2 and newest[1] >= step:
            return True
        time.sleep(_AGAIN_S)
    return step is None


def _await_leaving(link: AgentLink, patience_s: float) -> None:
    """Wait a little until no rank is connected: mostly all leave at the same time."""
    end_s = time.monotonic() + patience_s
    while link.stats().get("ranks") and time.monotonic() < end_s:
        time.sleep(_AGAIN_S)


def default_directory(given: object, env: Mapping[str, str]) -> str | None:
    """Return where states persist: what was *given*, else what *env* says; paths are absolute.

    Raises:
        CheckpointError: It is neither a path nor a URL that can be spoken to here.
    """
    if given is None:
        given = env.get(DIRECTORY) or None
    if given is None:
        return None
    if not isinstance(given, str | Path) or not str(given).strip():
        raise CheckpointError(f"directory={given!r:.80}: a path or a URL is wanted")
    text = str(given)
    check_address(text)
    if "://" in text:
        return text
    try:
        return str(Path(text).expanduser().absolute())
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(f"directory={text!r:.80}: {exc}") from exc


class Finder:
    """Finds the keeper for one rank, again and again where it is lost."""

    def __init__(
        self, given: Keeper | None, env: Mapping[str, str], place: Place, policy: Policy
    ) -> None:
        self._given = given
        self._env = env
        self._place = place
        self._policy = policy
        self.own: OwnKeeper | None = None

    def find(self, *, is_back: bool = False) -> Keeper:
        """Return the keeper, told of the policy; *is_back*: this rank trains already.

        Raises:
            NoKeeperError: There is none, and none would be of use.
            BusyDirectoryError: Another job has the directory.
            KeeperError: It does not answer, or cannot be started.
        """
        keeper = self._given or self._connected(is_back=is_back)
        keeper.settings(self._policy)
        return keeper

    def _connected(self, *, is_back: bool) -> Keeper:
        env, place = self._env, self._place
        path = env.get(KEEPER, "")
        if path:
            generation = int(env.get(GENERATION) or 0)
            return _line(Path(path), place, generation, is_back=is_back)
        directory = self._policy.directory
        if directory is None:
            raise NoKeeperError(
                "this job runs without `gpuops run` and was given no directory, so nothing of a "
                "checkpoint would outlive it: start it with `gpuops run`, or give directory= or "
                "GPUOPS_CKPT_DIR"
            )
        if place.world != place.local_world:
            raise NoKeeperError(
                f"this job runs on {place.n_nodes} nodes without `gpuops run`, whose agents agree "
                "on what is saved"
            )
        folder = own_folder(env, directory)
        if place.local_rank == 0 and self.own is None:
            self.own = _start(folder, directory)
        elif place.local_rank == 0:
            start_or_adopt(folder)  # it may have died, and nobody else starts another
        else:
            self.own = OwnKeeper(socket_of(folder))
        end_s = time.monotonic() + _APPEAR_S
        while True:
            try:
                return _line(socket_of(folder), place, 0, is_back=is_back)
            except KeeperGoneError:
                if place.local_rank == 0 or time.monotonic() > end_s:
                    raise
                if is_back and not _is_locked(folder):
                    raise KeeperError(
                        "the first rank of this node has left, and the keeper of the job is gone: "
                        "nobody starts another"
                    ) from None
            time.sleep(_AGAIN_S)


def _line(path: Path, place: Place, generation: int, *, is_back: bool) -> Keeper:
    return connect(
        path,
        rank=place.rank,
        world=place.world,
        local_rank=place.local_rank,
        local_world=place.local_world,
        epoch_hint=generation,
        is_back=is_back,
    )


def own_folder(env: Mapping[str, str], directory: str) -> Path:
    """Return the private folder of the keeper that saves into *directory* from this node."""
    session = env.get("XDG_RUNTIME_DIR", "")
    private = Path(session) / "gpuops" if session.startswith("/") else None
    parent = private or Path(tempfile.gettempdir()) / f"gpuops-{os.geteuid()}"
    text = f"{socket.gethostname()}\0{directory}"
    name = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return parent / "own-keepers" / name


def _start(folder: Path, directory: str) -> OwnKeeper:
    """Start the keeper in *folder*, or take over the one that waits there.

    Raises:
        BusyDirectoryError: A job that runs has it.
        KeeperError: It cannot be started.
    """
    lock = None
    while lock is None:
        for path in (folder.parent.parent, folder.parent, folder):
            why = why_not_ours(path, private=True)
            if why is not None:
                raise KeeperError(f"a keeper cannot use {path}: {why}")
        try:
            lock = _locked(folder / _LOCK, directory)
        except FileNotFoundError:
            continue  # the job before has just removed the folder
        except OSError as exc:
            raise KeeperError(f"cannot lock {folder / _LOCK}: {exc.strerror}") from exc
    try:
        process = start_or_adopt(folder)
    except BaseException:  # boundary: whatever it is, the lock does not stay
        os.close(lock)
        raise
    _log.warning(
        "no `gpuops run` looks after this job: a keeper of its own (pid %d) saves into %s, and "
        "nobody restarts the job",
        process.pid,
        directory,
    )
    return OwnKeeper(process.socket_path, lock)


def _locked(path: Path, directory: str, *, wait_s: float = _LOCK_S) -> int | None:
    """Return the lock *path*; None where its last holder has removed it meanwhile.

    Raises:
        BusyDirectoryError: A job that runs has it.
        OSError: It cannot be had.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    end_s = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise BusyDirectoryError(
                        f"another job (pid {_reader(lock)}) saves into {directory} from this node; "
                        "two jobs in one directory would load each other's states: end that one, "
                        "or give this one another directory"
                    ) from None
            time.sleep(_AGAIN_S)
        if os.fstat(lock).st_nlink == 0:
            os.close(lock)
            return None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:  # boundary: whatever it is, the lock does not stay
        os.close(lock)
        raise
    return lock


def _is_locked(folder: Path) -> bool:
    """Say whether somebody answers for the keeper in *folder*."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _reader(lock: int) -> str:
    with suppress(OSError, UnicodeDecodeError):
        text = os.pread(lock, 20, 0).decode("ascii")
        if text.isdigit():
            return text
    return "unknown"


def group_store(place: Place) -> tuple[Any, str] | None:
    """Return the store of torch's process group, None where there is none."""
    if not is_group(place):
        return None
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError:  # a torch that hides it: the keeper decides instead
        return None
    return _get_default_store(), place.run
