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
from gpuops.checkpoint.keeper_line import KeeperGoneError
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
_APPEAR_S = 60.0
_AGAIN_S = 0.05


class NoKeeperError(KeeperError):
    """There is no keeper, and there will be none."""


class BusyDirectoryError(CheckpointError):
    """Another job that runs saves into the same directory."""


class OwnKeeper:
    """The keeper of a job without an agent; this process, local rank 0, answers for it."""

    def __init__(self, socket_path: Path, lock: int) -> None:
        self._socket_path = socket_path
        self._lock = lock

    def finish(self, step: int | None, deadline_s: float = LAST_SAVE_S) -> None:
        """Have the last state persisted, that of *step* if it comes about, and end the keeper.

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
        link = AgentLink.connect(self._socket_path)
        try:
            _await_commit(link, step)
            flushed = link.flush(max(end_s - time.monotonic(), 1.0))
            notice = link.stats().get("notice")
            if isinstance(notice, str):
                _log.warning("%s", notice)
            if step is not None and flushed.state is None:
                raise KeeperError(f"the last state was not persisted: {flushed.why}")
            if is_over:
                link.end()
                self._remove()
        finally:
            link.close()
            self.leave()

    def _remove(self) -> None:
        """Remove the folder of the keeper, which has ended; whoever comes next makes another."""
        folder = self._socket_path.parent
        with suppress(OSError):
            for name in _FILES:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()

    def leave(self) -> None:
        """Let another job have the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _await_commit(link: AgentLink, step: int | None) -> None:
    """Wait a little for the other ranks' parts of the last state."""
    end_s = time.monotonic() + _LOCK_S
    while step is not None and time.monotonic() < end_s:
        newest = link.stats().get("newest")
        if isinstance(newest, list) and len(newest) == 2 and newest[1] >= step:
            return
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
        end_s = time.monotonic() + _APPEAR_S
        while True:
            try:
                return _line(socket_of(folder), place, 0, is_back=is_back)
            except KeeperGoneError:
                if place.local_rank == 0 or time.monotonic() > end_s:
                    raise
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
