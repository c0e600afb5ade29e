"""Which checkpoint service a run has, the private folder of its keeper, and this node's domain.

The folder's name follows from the job, not from this agent, so that the next agent of the same job
finds a keeper whose agent was killed. A file lock, which the kernel releases when its holder dies,
separates two living agents that were started with the same command.
"""

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpuops.agent.checkpoint.api import CheckpointService, StartedKeeper
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.agent.checkpoint.keeper_supervisor import KeeperSupervisor
from gpuops.agent.checkpoint.record import CheckpointRecord
from gpuops.agent.launch.identity import fingerprint
from gpuops.agent.launch.options import RunRequest
from gpuops.checkpoint.keeper.agent_client import KeeperClient, open_agent_connection
from gpuops.checkpoint.keeper.connection import LOCK_NAME, SOCKET_NAME
from gpuops.checkpoint.placement.domains import DomainPath, read_domains
from gpuops.checkpoint.types import KeeperError
from gpuops.config.schema import is_domain_file
from gpuops.errors import ConfigError, GpuopsError
from gpuops.host.clock import Clock
from gpuops.slurm import topology
from gpuops.units import US_PER_S

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
# How long a keeper may take to answer from memory: a restart of the workers waits for it.
ANSWER_S = 10.0
READY_S = 12.0
# The keeper hashes with these; without them no script can make a Checkpointer either.
NEEDED = ("xxhash", "blake3")


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
    if "rdzv_id" not in request.given:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointJob:
    """What this agent runs, and where; ``name`` is the same on all nodes of the run."""

    request: RunRequest
    name: str
    env: Mapping[str, str]
    node: str
    cwd: str
    uid: int


def start_keeper(
    folder: Path, *, lease_s: float, node: str, job: str, answer_s: float = ANSWER_S
) -> StartedKeeper:
    """Return the keeper in *folder*, started where none is there; it answers within *answer_s*.

    One that hangs is ended: nobody could have its memory, and no other could begin.

    Raises:
        KeeperError: It could not be started.
    """
    from gpuops.checkpoint.keeper.process import start_or_adopt  # only where a run checkpoints

    process = start_or_adopt(folder, lease_s=lease_s, node=node, ready_s=READY_S)
    try:
        connection = open_agent_connection(process.socket_path, deadline_s=answer_s)
    except KeeperError:
        process.kill()
        raise
    return StartedKeeper(
        client=KeeperClient(connection, job, on_close=process.is_running),  # which reaps it
        socket=str(process.socket_path),
        pid=process.pid,
        adopted=process.is_adopted,
        ended=process.killed_why,
    )


def checkpoints_of(
    job: CheckpointJob,
    record: CheckpointRecord,
    clock: Clock,
    agreement: CommitFollower | None = None,
) -> CheckpointService:
    """Return what keeps the checkpoints of *job*; a keeper is being started when this returns.

    *agreement*: with the other nodes of the run; None where there are none.
    """
    plan = job.request.plan.checkpoints
    if not plan.in_memory or any(find_spec(name) is None for name in NEEDED):
        return CheckpointService(plan.directory)
    key = keeper_key(job.request, job.env, node=job.node, cwd=job.cwd)
    parents = runtime_parents(job.env, Path(tempfile.gettempdir()), job.uid)
    sweep(parents, job.uid, clock.now_us() / US_PER_S)
    try:
        folder = take_folder(parents, key, job.uid)
    except FolderError as exc:
        record.failed("making a folder for the keeper of the checkpoints", exc)
        return CheckpointService(plan.directory)
    return KeeperSupervisor(
        partial(start_keeper, folder.path, lease_s=plan.lease_s, node=job.node, job=job.name),
        record,
        clock,
        directory=plan.directory,
        release=lambda ended: folder.leave(remove=ended),
        refusal=partial(_refusal, plan.directory, job.name, clock),
        agreement=agreement,
    ).open()


def _refusal(
    directory: str | None,
    job: str,
    clock: Clock,
    keeper_pid: int | None,
    pause: Callable[[float], object],
) -> str | None:
    """Return why another job has *directory*, None where none has; URLs have no owner."""
    if directory is None:
        return None
    from gpuops.checkpoint.storage.directory_lock import lock_conflict

    return lock_conflict(directory, job, clock, keeper_pid, pause)


def domain_of(
    wanted: str, node: str, env: Mapping[str, str], say: Callable[[str], None]
) -> DomainPath:
    """Return the names of the domains of *node*, the widest first; () where none is known.

    *wanted* is ``auto`` (what Slurm tells the step in *env*), ``off``, a path like row1/rack3, or a
    file as `parse_domains` reads it. A file that is of no use is said, and stops nothing.
    """
    if wanted == "off":
        return ()
    if wanted == "auto":
        return topology.domain_of(env)
    if not is_domain_file(wanted):
        return tuple(wanted.split("/"))
    try:
        known = read_domains(Path(wanted).expanduser()).paths
    except ConfigError as exc:
        say(f"copies of checkpoints are placed as if nothing failed together: {exc}")
        return ()
    # As the agent calls itself, as Slurm does, and without the network's name.
    names = [node, env.get("SLURMD_NODENAME", ""), node.partition(".")[0]]
    found = next((known[name] for name in names if name in known), None)
    if found is None:
        say(f"no failure domain of {node} in {wanted}: copies of checkpoints may lie together")
    return found or ()
