"""Find the keeper of this rank: the agent's, or else one that is started for the job.

Without an agent, a keeper serves one directory and the ranks of one node: a job that is restarted
with the same directory finds it, while it waits for its lease to expire.
"""

import fcntl
import hashlib
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.connection import (
    KeeperGoneError,
    keeper_socket_path,
)
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.keeper.rank_client import RankKeeperClient, connect_rank
from gpuops.checkpoint.storage.address import check_address
from gpuops.checkpoint.types import CheckpointError, KeeperError
from gpuops.config.resolve import state_dir_of
from gpuops.host.trust import why_not_ours
from gpuops.worker.ranks import RankContext, has_process_group

_log = logging.getLogger(__name__)

KEEPER_ENV, DIRECTORY_ENV, GENERATION_ENV = "GPUOPS_KEEPER", "GPUOPS_CKPT_DIR", "GPUOPS_GENERATION"
FINAL_PERSIST_S = 600.0
_LOCK = "job.lock"
# The files in its folder; the lock is created last, because its owner owns the folder.
_FILES = ("keeper.sock", "keeper.lock", "keeper.log", "keeper.log.1", _LOCK)
_LOCK_S = 15.0  # a killed job's data loaders may hold its lock for a while
_LEAVE_S = 5.0  # usually enough between the first rank that leaves and the last
_KEEPER_START_S = 60.0
_POLL_S = 0.05


class NoKeeperError(KeeperError):
    """There is no keeper, and there will be none."""


class DirectoryInUseError(CheckpointError):
    """Another running job saves into the same directory."""


class StandaloneKeeper:
    """The keeper of a job without an agent, for local rank 0, the owner of *lock*.

    *shards_wait_s*: how long to wait for other ranks' shards of the last state. A keeper that other
    ranks still use persists what they save last by itself, and ends.
    """

    def __init__(self, socket_path: Path, lock: int, *, shards_wait_s: float = _LOCK_S) -> None:
        self._socket_path = socket_path
        self._lock: int | None = lock
        self._shards_wait_s = shards_wait_s

    def finish(self, step: int | None, deadline_s: float = FINAL_PERSIST_S) -> None:
        """Have the last state persisted, that of *step* if it becomes complete, and end the keeper.

        Where other ranks are still connected, it does that once they have left.

        Raises:
            KeeperError: It is gone, or could not persist it; the state before it stays.
        """
        self.persist(step, deadline_s, is_over=True)

    def persist(self, step: int | None, deadline_s: float, *, is_over: bool = False) -> None:
        """Do what `finish` does, but leave the keeper running for its lease if the job is not over.

        Raises:
            KeeperError: It is gone, or could not persist it; the state before it stays.
        """
        end_s = time.monotonic() + deadline_s
        if self._lock is None:
            return
        try:
            self._persist(step, end_s, is_over=is_over)
        finally:
            self.release_directory()

    def _persist(self, step: int | None, end_s: float, *, is_over: bool) -> None:
        client = KeeperClient.connect(self._socket_path)
        try:
            if _wait_committed(client, step, self._shards_wait_s) and is_over:
                _wait_ranks_left(client, min(_LEAVE_S, self._shards_wait_s))
            while True:
                flushed = client.flush(max(end_s - time.monotonic(), 1.0))
                notice = client.stats().get("notice")
                has_failed = step is not None and flushed.state is None
                n_ranks, is_ending = client.hand_over(is_over=is_over)
                if is_ending:
                    self._remove_folder()
                has_others = bool(n_ranks) or is_ending or not is_over
                if has_others or flushed.state is None or time.monotonic() >= end_s:
                    break
                time.sleep(_POLL_S)  # a rank that left meanwhile has saved once more
            if isinstance(notice, str):
                _log.warning("%s", notice)
            if has_failed:
                raise KeeperError(f"the last state was not persisted: {flushed.why}")
        finally:
            client.close()
        if step is not None and flushed.state is not None and flushed.state.step < step:
            later = f"; ranks still connected: {n_ranks}, whose last state persists when they leave"
            _log.warning(
                "the state after step %d is not persisted: other ranks have not saved theirs in "
                "%g s; the newest that is persisted is that after step %d%s",
                step,
                self._shards_wait_s,
                flushed.state.step,
                later if n_ranks else "",
            )

    def _remove_folder(self) -> None:
        """Remove the folder of the keeper, which has ended; the next one makes another."""
        folder = self._socket_path.parent
        with suppress(OSError):
            for name in _FILES:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()

    def release_directory(self) -> None:
        """Release the directory for other jobs."""
        lock, self._lock = self._lock, None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # forked data loaders have the descriptor, too
            os.close(lock)


def _wait_committed(client: KeeperClient, step: int | None, timeout_s: float) -> bool:
    """Wait a little for the other ranks' shards of the last state; return whether they came."""
    end_s = time.monotonic() + timeout_s
    while step is not None and time.monotonic() < end_s:
        newest = client.stats().get("newest")
        if isinstance(newest, list) and len(newest) == 2 and newest[1] >= step:
            return True
        time.sleep(_POLL_S)
    return step is None


def _wait_ranks_left(client: KeeperClient, timeout_s: float) -> None:
    """Wait a little until no rank is connected: usually all leave at the same time."""
    end_s = time.monotonic() + timeout_s
    while client.stats().get("ranks") and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def resolve_directory(given: object, env: Mapping[str, str]) -> str | None:
    """Return where states persist: *given*, or else as *env* says; paths are absolute.

    Raises:
        CheckpointError: It is neither a path nor a supported URL.
    """
    if given is None:
        given = env.get(DIRECTORY_ENV) or None
    if given is None:
        return None
    if not isinstance(given, str | Path) or not str(given).strip():
        raise CheckpointError(f"directory={given!r:.80}: give a path or a URL")
    text = str(given)
    check_address(text)
    if "://" in text:
        return text
    try:
        return str(Path(text).expanduser().absolute())
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(f"directory={text!r:.80}: {exc}") from exc


class KeeperFinder:
    """Finds the keeper for one rank, again each time it is lost."""

    def __init__(
        self,
        given: RankKeeperClient | None,
        env: Mapping[str, str],
        ranks: RankContext,
        policy: CheckpointPolicy,
    ) -> None:
        self._given = given
        self._env = env
        self._ranks = ranks
        self._policy = policy
        self.standalone: StandaloneKeeper | None = None

    def find(self, *, is_reconnect: bool = False) -> RankKeeperClient:
        """Return the keeper, with the policy set; *is_reconnect*: this rank already trains.

        Raises:
            NoKeeperError: There is none, and none would be useful.
            DirectoryInUseError: Another job has the directory.
            KeeperError: It does not answer, or cannot be started.
        """
        keeper = self._given or self._connect(is_reconnect=is_reconnect)
        keeper.set_policy(self._policy)
        return keeper

    def _connect(self, *, is_reconnect: bool) -> RankKeeperClient:
        env, ranks = self._env, self._ranks
        path = env.get(KEEPER_ENV, "")
        if path:
            generation = int(env.get(GENERATION_ENV) or 0)
            return _connect_to(Path(path), ranks, generation, is_reconnect=is_reconnect)
        directory = self._policy.directory
        if directory is None:
            raise NoKeeperError(
                "this job runs without `gpuops run` and without a directory, so that no "
                "checkpoint would outlive it: start it with `gpuops run`, or give directory= or "
                "GPUOPS_CKPT_DIR"
            )
        if ranks.world != ranks.local_world:
            raise NoKeeperError(
                f"this job runs on {ranks.n_nodes} nodes without `gpuops run`, whose agents agree "
                "on what is saved"
            )
        folder = standalone_folder(env, directory)
        if ranks.local_rank == 0 and self.standalone is None:
            self.standalone = _start_standalone(folder, directory)
        elif ranks.local_rank == 0:
            start_or_adopt(folder)  # it may have died, and no one else starts another
        end_s = time.monotonic() + _KEEPER_START_S
        while True:
            try:
                return _connect_to(keeper_socket_path(folder), ranks, 0, is_reconnect=is_reconnect)
            except KeeperGoneError:
                if ranks.local_rank == 0 or time.monotonic() > end_s:
                    raise
                if is_reconnect and not _is_locked(folder):
                    raise KeeperError(
                        "the first rank of this node has left, and the keeper of the job is gone: "
                        "it is not restarted"
                    ) from None
            time.sleep(_POLL_S)


def _connect_to(
    path: Path, ranks: RankContext, generation: int, *, is_reconnect: bool
) -> RankKeeperClient:
    return connect_rank(
        path,
        rank=ranks.rank,
        world=ranks.world,
        local_rank=ranks.local_rank,
        local_world=ranks.local_world,
        generation=generation,
        is_reconnect=is_reconnect,
    )


def standalone_folder(env: Mapping[str, str], directory: str) -> Path:
    """Return the private folder of the keeper that saves into *directory* from this node.

    All ranks of this user on the node get the same one. It is in the state directory where another
    user has created the folder in the temporary directory, as anyone may.
    """
    uid, session = os.geteuid(), env.get("XDG_RUNTIME_DIR", "")
    parents = [Path(session) / "gpuops"] if session.startswith("/") else []
    parents.append(Path(tempfile.gettempdir()) / f"gpuops-{uid}")
    fallback = state_dir_of(env, is_root=uid == 0) / "keepers"
    parent = next((path for path in parents if _is_ours(path)), fallback)
    text = f"{socket.gethostname()}\0{directory}"
    name = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return parent / "own-keepers" / name


def _is_ours(path: Path) -> bool:
    """Create *path* in a folder that exists; return whether only this user can write into it."""
    return path.parent.is_dir() and why_not_ours(path, private=True) is None


def _start_standalone(folder: Path, directory: str) -> StandaloneKeeper:
    """Start the keeper in *folder*, or adopt the one that waits there.

    Raises:
        DirectoryInUseError: A running job has it.
        KeeperError: It cannot be started.
    """
    lock = None
    while lock is None:
        for path in (folder.parent.parent, folder.parent, folder):
            why = why_not_ours(path, private=True)
            if why is not None:
                raise KeeperError(f"a keeper cannot use {path}: {why}")
        try:
            lock = _acquire_lock(folder / _LOCK, directory)
        except FileNotFoundError:
            continue  # the previous job has just removed the folder
        except OSError as exc:
            raise KeeperError(f"cannot lock {folder / _LOCK}: {exc.strerror}") from exc
    try:
        process = start_or_adopt(folder)
    except BaseException:  # boundary: after any error the lock is released
        os.close(lock)
        raise
    _log.warning(
        "there is no `gpuops run`: a keeper of the job's own (pid %d) saves into %s, and "
        "the job is not restarted after a failure",
        process.pid,
        directory,
    )
    return StandaloneKeeper(process.socket_path, lock)


def _acquire_lock(path: Path, directory: str, *, wait_s: float = _LOCK_S) -> int | None:
    """Return the lock *path*; None where its last owner has removed it meanwhile.

    Raises:
        DirectoryInUseError: A running job has it.
        OSError: It cannot be opened or locked.
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
                    raise DirectoryInUseError(
                        f"another job (pid {_lock_holder(lock)}) saves into {directory} from "
                        "this node; two jobs in one directory would load each other's states: "
                        "end that one, or give this one another directory"
                    ) from None
            time.sleep(_POLL_S)
        if os.fstat(lock).st_nlink == 0:
            os.close(lock)
            return None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:  # boundary: after any error the lock is released
        os.close(lock)
        raise
    return lock


def _is_locked(folder: Path) -> bool:
    """Return whether the keeper in *folder* has a responsible owner."""
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


def _lock_holder(lock: int) -> str:
    with suppress(OSError, UnicodeDecodeError):
        text = os.pread(lock, 20, 0).decode("ascii")
        if text.isdigit():
            return text
    return "unknown"


def process_group_store(ranks: RankContext) -> tuple[Any, str] | None:
    """Return the store of torch's process group, None where there is none."""
    if not has_process_group(ranks):
        return None
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError:  # a torch that hides it: the keeper decides instead
        return None
    return _get_default_store(), ranks.run


class KeeperSearch:
    """One attempt to connect with *find*, which returns a keeper or raises."""

    def __init__(self, find: Callable[[], RankKeeperClient]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._found: RankKeeperClient | None = None
        self._error: Exception | None = None
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="gpuops-find-keeper", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Return whether there is a result; never waits."""
        return not self._thread.is_alive()

    def result(self) -> RankKeeperClient:
        """Return the keeper, or raise the error; only once it is done."""
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found

    def cancel(self) -> None:
        """Cancel; never waits. A connection that is made later is closed."""
        with self._lock:
            self._is_wanted = False
            found, self._found = self._found, None
        if found is not None:
            found.close()

    def _run(self) -> None:
        try:
            found = self._find()
        except Exception as exc:  # noqa: BLE001 boundary: `result` raises it
            self._error = exc
            return
        with self._lock:
            if self._is_wanted:
                self._found = found
                return
        found.close()
