"""The private folder in which the keeper of a job on this node is found again.

Its name follows from what the job is, not from this agent: the next agent of the same job finds it
after this one was killed. A lock, which the kernel lets go of when its holder dies, keeps two
living agents apart that were started with the very same command.
"""

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.launch.identity import fingerprint
from gpuops.agent.launch.options import RunRequest
from gpuops.checkpoint.keeper.connection import LOCK_NAME, SOCKET_NAME
from gpuops.errors import GpuopsError

LOCK = "agent.lock"
# A keeper that was killed, or whose lease is over, leaves its log for so long.
KEPT_S = 86_400.0
DIGITS = 16
# Agents of one very command on one node: tests and sweeps start several at once.
TWINS_MAX = 64
# What changes from one login, terminal or try to the next, and says nothing of the job.
_PASSING = ("GPUOPS_", "SLURM", "SSH_", "XDG_", "TERM", "TMUX", "LC_", "PYTEST_", "DBUS_", "VSCODE")
_OWN = frozenset(
    ("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "DISPLAY", "WINDOWID", "LANG", "PS1")
)


class FolderError(GpuopsError):
    """No folder here is private enough for a keeper; the message says which were tried, and why."""


@dataclass(slots=True)
class KeeperFolder:
    """A folder that is this agent's for as long as it lives."""

    path: Path
    lock: int

    @property
    def socket(self) -> Path:
        """Return where its keeper listens."""
        return self.path / SOCKET_NAME

    def leave(self, *, remove: bool) -> None:
        """Let go of it; *remove* it where nothing is in there for a next agent."""
        if remove:
            _remove(self.path)
        os.close(self.lock)


def keeper_key(request: RunRequest, env: Mapping[str, str], *, node: str, cwd: str) -> str:
    """Return 16 hexadecimal digits that the agents of the same job on *node* share.

    A run with an id (``--rdzv-id``) is that id, at the place where its agents meet. Any other is
    its command (script, arguments, folder, numbers of nodes and workers) in its job of Slurm, or in
    its environment: a script may take its learning rate from there, and a sweep must not go on from
    another one's weights.
    """
    meeting = request.plan.endpoint
    job = env.get("SLURM_JOB_ID", "")
    place = [meeting.kind.value, meeting.host, meeting.port]
    parts: list[object] = [node, *place, meeting.run_key]
    if "rdzv_id" not in request.said:
        command = [fingerprint(request), cwd, str(request.torch.training_script)]
        parts = [node, *place, *command, job, {} if job else _lasting(env)]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGITS]


def _lasting(env: Mapping[str, str]) -> dict[str, str]:
    """Return what of *env* may be a part of the job."""
    return {k: v for k, v in env.items() if k not in _OWN and not k.startswith(_PASSING)}


def runtime_parents(env: Mapping[str, str], temporary: Path, uid: int) -> list[Path]:
    """Return where such folders may be made: the session's own directory, else *temporary*."""
    session = env.get("XDG_RUNTIME_DIR", "")
    found = [Path(session) / "gpuops"] if session.startswith("/") else []
    return [*found, temporary / f"gpuops-{uid}"]


def sweep(parents: Iterable[Path], uid: int, now_s: float) -> None:
    """Remove the folders of keepers that are gone and that nobody came back to for `KEPT_S`."""
    for parent in parents:
        with suppress(OSError):
            for path in list((parent / "keepers").iterdir()):
                if now_s - path.stat().st_mtime < KEPT_S or _is_held(path / LOCK_NAME):
                    continue
                folder = _locked(path, uid, must_exist=False)
                if folder is not None:
                    folder.leave(remove=True)


def take_folder(parents: Iterable[Path], key: str, uid: int) -> KeeperFolder:
    """Return the folder of *key*, locked: one that has a keeper already rather than a new one.

    Raises:
        FolderError: None of *parents* can be made and is this user's alone.
    """
    problems = []
    for parent in parents:
        base = parent / "keepers"
        problem = _why_not(parent, uid, private=False) or _why_not(base, uid, private=True)
        if problem is None:
            for must_exist in (True, False):
                for number in range(TWINS_MAX):
                    folder = _locked(base / f"{key}-{number}", uid, must_exist=must_exist)
                    if folder is not None:
                        return folder
            problem = f"{TWINS_MAX} agents of this very command are at work in {base}"
        problems.append(problem)
    raise FolderError("; ".join(problems) or "no folder to make it in")


def _why_not(path: Path, uid: int, *, private: bool) -> str | None:
    """Make *path* if it is missing; return why it cannot be trusted, None where it can."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        return f"{path} is not a folder of this user"
    if found.st_mode & (0o077 if private else 0o022):
        return f"others may {'look into' if private else 'write'} {path}; chmod 700"
    return None


def _locked(path: Path, uid: int, *, must_exist: bool) -> KeeperFolder | None:
    """Return the folder *path* if no living agent has it, and it is the one wanted."""
    if must_exist and not (path / SOCKET_NAME).exists():
        return None
    if _why_not(path, uid, private=True) is not None:
        return None
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(path / LOCK, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have removed it just before we got the lock on what it was.
        if os.fstat(lock).st_ino == (path / LOCK).stat().st_ino:
            return KeeperFolder(path, lock)
    except OSError:
        pass
    os.close(lock)
    return None


def _is_held(path: Path) -> bool:
    """Say whether a process holds the lock *path*; it is not held where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _remove(folder: Path) -> None:
    """Remove *folder* and the files in it; it is ours alone."""
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()
