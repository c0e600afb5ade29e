"""Which checkpoint service a run has, the private folder of its keeper, and this node's domain.

The folder's name follows from the job, not from this agent, so that the next agent of the same job
finds a keeper whose agent was killed. A file lock, which the kernel releases when its holder dies,
separates two living agents that were started with the same command.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from gpuops.errors import ConfigError, GpuopsError, UsageError
from gpuops.host.clock import Clock
from gpuops.slurm import topology
from gpuops.units import US_PER_S

log = logging.getLogger(__name__)

LOCK = "agent.lock"
# How long the folder, with its log, of a keeper that was killed or has lost its lease is kept.
KEPT_S = 86_400.0
DIGITS = 16
# Agents of the same command on one node: tests and sweeps start several at once.
SAME_COMMAND_MAX = 64
# Variables that change between logins, terminals or attempts, and do not identify the job.
_PREFIXES = (
    "GPUOPS_",
    "SLURM",
    "SSH_",
    "XDG_",
    "TERM",
    "TMUX",
    "LC_",
    "PYTEST_",
    "DBUS_",
    "VSCODE",
)
_TRANSIENT = frozenset(
    ("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "DISPLAY", "WINDOWID", "LANG", "PS1")
)
# Timeout of a keeper's answer from memory: a restart of the workers waits for it.
ANSWER_S = 10.0
READY_S = 12.0
# The keeper hashes with these; without them no script can create a Checkpointer either.
NEEDED = ("xxhash", "blake3")


class FolderError(GpuopsError):
    """No folder is private enough for a keeper; the message has the problem of each candidate."""


@dataclass(slots=True)
class KeeperFolder:
    """A folder that this agent holds the lock of.

    ``problems``: why other folders were not taken; ``made``: the parent that is for it alone.
    """

    path: Path
    lock: int
    problems: tuple[str, ...] = ()
    made: Path | None = None

    def release(self, *, remove: bool) -> None:
        """Release the lock; *remove* the folder where the next agent does not need it."""
        if remove:
            _remove(self.path)
            if self.made is not None:
                shutil.rmtree(self.made, ignore_errors=True)
        os.close(self.lock)


def keeper_key(request: RunRequest, env: Mapping[str, str], *, node: str, cwd: str) -> str:
    """Return 16 hexadecimal digits that the agents of the same job on *node* share.

    A run with an id (``--rdzv-id``) is identified by it and by its rendezvous endpoint. Any other
    is identified by its command (script, arguments, folder, numbers of nodes and workers) and its
    Slurm job, else its environment: a script may read its learning rate from there, and a sweep
    must not resume from another one's weights.
    """
    endpoint = request.plan.endpoint
    job = env.get("SLURM_JOB_ID", "")
    place = [endpoint.kind.value, endpoint.host, endpoint.port]
    parts: list[object] = [node, *place, endpoint.run_key]
    if "rdzv_id" not in request.given:
        command = [fingerprint(request), cwd, str(request.torch.training_script)]
        parts = [node, *place, *command, job, {} if job else _job_env(env)]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGITS]


def _job_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *env* that may identify the job."""
    return {k: v for k, v in env.items() if k not in _TRANSIENT and not k.startswith(_PREFIXES)}


def runtime_parents(env: Mapping[str, str], temporary: Path, uid: int) -> list[Path]:
    """Return the parents of such folders: the session's runtime directory, else *temporary*."""
    session = env.get("XDG_RUNTIME_DIR", "")
    found = [Path(session) / "gpuops"] if session.startswith("/") else []
    return [*found, temporary / f"gpuops-{uid}"]


def keeper_parents(job: "CheckpointJob") -> list[Path]:
    """Return the parents of such folders, the best first; the state directory is created.

    Anyone may create ``/tmp/gpuops-UID`` first. The state directory may be shared by nodes.
    """
    with suppress(OSError):
        job.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    last = job.state_dir / f"keepers-{job.node.replace('/', '_')}"
    return [*runtime_parents(job.env, job.temporary, job.uid), last]


def sweep(parents: Sequence[Path], uid: int, now_s: float) -> None:
    """Remove the folders of keepers that are gone and were not used for `KEPT_S`.

    A parent of another user, or a link, is left alone: it may lead to any folder of this user.
    """
    for parent in parents:
        if _why_foreign(parent, uid, private=False) or _why_foreign(
            parent / "keepers", uid, private=True
        ):
            continue
        with suppress(OSError):
            for path in list((parent / "keepers").iterdir()):
                if now_s - path.stat().st_mtime < KEPT_S or _is_held(path / LOCK_NAME):
                    continue
                folder = _locked(path, uid, must_exist=False)
                if folder is not None:
                    folder.release(remove=True)


def take_folder(
    parents: Sequence[Path], key: str, uid: int, temporary: Path | None = None
) -> KeeperFolder:
    """Return the folder of *key*, locked; one that has a keeper is preferred to a new one.

    Where none of *parents* serves, it is in a new folder in *temporary*: an agent that follows this
    one does not find it, nor the keeper in it.

    Raises:
        FolderError: None of them can be created and is private to this user.
    """
    problems: list[str] = []
    for parent in parents:
        base = parent / "keepers"
        problem = _why_not(parent, uid, private=False) or _why_not(base, uid, private=True)
        if problem is None:
            for must_exist in (True, False):
                for number in range(SAME_COMMAND_MAX):
                    folder = _locked(base / f"{key}-{number}", uid, must_exist=must_exist)
                    if folder is not None:
                        return replace(folder, problems=tuple(problems))
            problem = f"{SAME_COMMAND_MAX} agents of this command are running in {base}"
        problems.append(problem)
    if temporary is not None:
        try:
            made = Path(tempfile.mkdtemp(prefix=f"gpuops-{uid}-", dir=temporary))
            return replace(take_folder([made], key, uid), problems=tuple(problems), made=made)
        except OSError as exc:
            problems.append(f"{temporary}: {exc.strerror}")
    raise FolderError("; ".join(problems) or "there is no folder for it")


def _why_not(path: Path, uid: int, *, private: bool) -> str | None:
    """Create *path* if it is missing; return why it cannot be trusted, None where it can."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    return _why_foreign(path, uid, private=private)


def _why_foreign(path: Path, uid: int, *, private: bool) -> str | None:
    """Return why *path* cannot be trusted, None where it can; nothing is created."""
    try:
        found = path.lstat()
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        return f"{path} is not a folder of this user"
    if found.st_mode & (0o077 if private else 0o022):
        return f"other users may {'read' if private else 'write'} {path}; chmod 700"
    return None


def _locked(path: Path, uid: int, *, must_exist: bool) -> KeeperFolder | None:
    """Return the folder *path* locked, None where another agent has it or it has no keeper."""
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
        # Its last owner may have removed it just before this lock was acquired.
        if os.fstat(lock).st_ino == (path / LOCK).stat().st_ino:
            return KeeperFolder(path, lock)
    except OSError:
        pass
    os.close(lock)
    return None


def _is_held(path: Path) -> bool:
    """Return whether a process holds the lock *path*; a missing one is not held."""
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
    """Remove *folder* and the files in it; it is private to this user."""
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointJob:
    """The job of this agent and its environment; ``name`` is the same on all nodes of the run.

    ``temporary``: the folder for temporary files; ``state_dir``: gpuops' own files of this user.
    """

    request: RunRequest
    name: str
    env: Mapping[str, str]
    node: str
    cwd: str
    uid: int
    temporary: Path
    state_dir: Path


def check_can_persist(job: CheckpointJob) -> None:
    """Check that the states of *job* can persist, if it names a directory for them.

    A full disk is only a warning: space may be there by the time of the first state.

    Raises:
        UsageError: They cannot: modules are missing, no folder is private enough for a keeper, or
            nothing can ever be written there.
    """
    plan = job.request.plan.checkpoints
    if plan.directory is None or not plan.in_memory:
        return
    problem, remedy = "", "make one of these folders yours (chmod 700)"
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        problem = f"the Python modules {' and '.join(missing)} are missing"
        remedy = "install them"
    else:
        try:
            folder = take_folder(keeper_parents(job), _key(job), job.uid, job.temporary)
            folder.release(remove=not (folder.path / SOCKET_NAME).exists())
        except FolderError as exc:
            problem = f"no folder is private enough for the process that holds states: {exc}"
    if not problem:
        problem, remedy = _why_unwritable(plan.directory), "name one that your user can write"
    if problem:
        raise UsageError(
            f"checkpoints cannot persist in {plan.directory}: {problem}; {remedy}, or run without "
            "--ckpt-dir (checkpoint.dir)"
        )


def _why_unwritable(directory: str) -> str:
    """Return why nothing can ever be written into *directory*, "" where something may be."""
    from gpuops.checkpoint.storage.address import local_directory
    from gpuops.checkpoint.storage.directory_files import try_writing

    path = local_directory(directory)
    found = None if path is None else try_writing(path)
    if found is None:
        return ""
    why, is_permanent = found
    if not is_permanent:
        log.warning("checkpoints cannot persist in %s now, and are tried again: %s", directory, why)
    return why if is_permanent else ""


def _key(job: CheckpointJob) -> str:
    return keeper_key(job.request, job.env, node=job.node, cwd=job.cwd)


def start_keeper(
    folder: Path, *, lease_s: float, node: str, job: str, answer_s: float = ANSWER_S
) -> StartedKeeper:
    """Return the keeper in *folder*, started if there is none; it answers within *answer_s*.

    One that hangs is ended: its memory cannot be read, and it would block the next one.

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
    follower: CommitFollower | None = None,
) -> CheckpointService:
    """Return the checkpoint service of *job*; the start of a keeper has begun when this returns.

    *follower*: for the agreement with the other nodes of the run; None where there are none.
    """
    plan = job.request.plan.checkpoints
    if not plan.in_memory or any(find_spec(name) is None for name in NEEDED):
        return CheckpointService(plan.directory)
    usual = runtime_parents(job.env, job.temporary, job.uid)
    parents = keeper_parents(job)
    sweep(parents, job.uid, clock.now_us() / US_PER_S)
    try:
        folder = take_folder(parents, _key(job), job.uid, job.temporary)
    except FolderError as exc:
        record.failed("creating a folder for the keeper of the checkpoints", exc)
        return CheckpointService(plan.directory)
    if folder.path.parent.parent not in usual:
        log.warning("the keeper is in %s: %s", folder.path, "; ".join(folder.problems))
    return KeeperSupervisor(
        partial(start_keeper, folder.path, lease_s=plan.lease_s, node=job.node, job=job.name),
        record,
        clock,
        directory=plan.directory,
        release=lambda ended: folder.release(remove=ended),
        refusal=partial(_refusal, plan.directory, job.name, clock),
        follower=follower,
    ).open()


def _refusal(
    directory: str | None,
    job: str,
    clock: Clock,
    keeper_pid: int | None,
    pause: Callable[[float], object],
) -> str | None:
    """Return why another job holds the lock of *directory*, None where none does."""
    if directory is None:
        return None
    from gpuops.checkpoint.storage.directory_lock import lock_conflict

    return lock_conflict(directory, job, clock, keeper_pid, pause)


def domain_of(
    option: str, node: str, env: Mapping[str, str], warn: Callable[[str], None]
) -> DomainPath:
    """Return the names of the failure domains of *node*, the widest first; () where none is known.

    *option* is ``auto`` (from Slurm's variables in *env*), ``off``, a path like row1/rack3, or a
    file as `parse_domains` reads it. A file that cannot be used is reported with *warn*.
    """
    if option == "off":
        return ()
    if option == "auto":
        return topology.domain_of(env)
    if not is_domain_file(option):
        return tuple(option.split("/"))
    try:
        known = read_domains(Path(option).expanduser()).paths
    except ConfigError as exc:
        warn(f"copies of checkpoints are placed without failure domains: {exc}")
        return ()
    # The agent's name of the node, Slurm's, and the host name without its domain.
    names = [node, env.get("SLURMD_NODENAME", ""), node.partition(".")[0]]
    found = next((known[name] for name in names if name in known), None)
    if found is None:
        warn(f"no failure domain of {node} in {option}: its copies may share a failure domain")
    return found or ()
