"""Which run this is, and what its agents must have in common."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.launch.options import RunRequest
from gpuops.errors import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_NODE_UNHEALTHY,
    EXIT_REQUEUE,
    UsageError,
)

TOKEN = "GPUOPS_TOKEN"  # noqa: S105 a variable's name
CHARS_MIN, CHARS_MAX = 16, 4096
HOW = "export GPUOPS_TOKEN=$(openssl rand -hex 32) before srun, the same for all agents"
# What a worker has no use for, and may print with all its environment.
SECRET_VARIABLES = (TOKEN, "PET_RDZV_ENDPOINT")


def token_of(env: Mapping[str, str], file: str | None, uid: int) -> str:
    """Return the token of this job, ``""`` where none was given.

    Raises:
        UsageError: A token too short to be one, a file that others than *uid* can read. The token
            is in no message.
    """
    if env.get(TOKEN):
        return _checked(env[TOKEN].strip(), TOKEN)
    return "" if file is None else _checked(_content(file, uid), f"the token in {file}")


def _content(file: str, uid: int) -> str:
    path = os.path.expanduser(file)  # noqa: PTH111 as the setting was written
    try:
        # Not followed, nor waited for: who may write the folder may put a link or a fifo there.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        raise UsageError(f"run.token_file = {file}: {exc.strerror}") from exc
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"run.token_file = {file}: it is not a file")
        if status.st_uid not in {uid, 0} or status.st_mode & 0o077:
            raise UsageError(
                f"run.token_file = {file}: others can read it, or it is not yours; chmod 600"
            )
        return os.read(fd, CHARS_MAX + 1).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def _checked(token: str, where: str) -> str:
    if not CHARS_MIN <= len(token) <= CHARS_MAX or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{where}: {CHARS_MIN} to {CHARS_MAX} printable characters are wanted; {HOW}"
        )
    return token


_MEANING = {
    EXIT_REQUEUE: "requeue me: slurm.conf's RequeueExit=85 starts the job again",
    EXIT_NODE_UNHEALTHY: "this node is unhealthy: the root epilog runs every check on it",
    EXIT_DO_NOT_REQUEUE: "do not requeue: it would fail the same way again; end the chain of jobs",
}


def meaning(exit_code: int) -> str | None:
    """Return what *exit_code* asks for, None for one that asks for nothing."""
    meaning = _MEANING.get(exit_code)
    return None if meaning is None else f"exit {exit_code}: {meaning}"


def leave(exit_code: int, file: str | None) -> str | None:
    """Write *exit_code* into *file* where that is there; return what went wrong, if anything did.

    It is made by nobody here: on the other nodes of the job, where it is not, nothing is left.
    """
    if file is None or not Path(file).is_file():
        return None
    try:
        fd = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, f"{exit_code}\n".encode())
        finally:
            os.close(fd)
    except OSError as exc:
        return f"cannot write the exit code into {file}: {exc.strerror}"
    return None


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run's id, and the name of its folder; the first agent of a run makes both."""

    run_id: str
    folder: str


DIGITS = 16


def fingerprint(request: RunRequest) -> str:
    """Return 16 hexadecimal digits of what has to be equal on all agents of a run.

    That is the script by name and its arguments, the workers of a node as they were asked for, the
    range of nodes and what a restart may do. Not the script's folder, which may differ from node to
    node, nor flags that are a node's own business (logs, addresses, the order).
    """
    torch, terms = request.torch, request.plan.restart_policy
    parts = [
        Path(torch.training_script).name,
        list(torch.training_script_args),
        bool(torch.module),
        str(torch.nproc_per_node),
        [terms.nodes_min, terms.nodes_max, terms.node_unit],
        [terms.restarts_max, terms.restarts_window_s, terms.on_exhausted.value],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGITS]
