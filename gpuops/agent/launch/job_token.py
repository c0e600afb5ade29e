"""The token that proves to the agents of a run that they belong together: given, or made here."""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpuops.agent.launch.options import RunRequest
from gpuops.agent.launch.plan import EndpointPlan
from gpuops.control.store import OtherTokenError
from gpuops.errors import UsageError

TOKEN = "GPUOPS_TOKEN"  # noqa: S105 a variable's name
CHARS_MIN, CHARS_MAX = 16, 4096
HOW = (
    "export GPUOPS_TOKEN=$(openssl rand -hex 32) before srun, or give all agents the same "
    "--token-file FILE"
)
# What a worker has no use for, and may print with all its environment.
SECRET_VARIABLES = (TOKEN, "PET_RDZV_ENDPOINT")
_OWN = "token"
_OWN_BYTES = 32
_OWN_TOKEN = re.compile(f"[0-9a-f]{{{2 * _OWN_BYTES}}}")


def given_token(env: Mapping[str, str], file: str | None, uid: int) -> str:
    """Return the token that *env* or the file *file* gives, ``""`` without one.

    Raises:
        UsageError: A token too short to be one, a file that others than *uid* can read. The token
            is in no message.
    """
    if env.get(TOKEN):
        return _checked(env[TOKEN].strip(), TOKEN)
    if file is None:
        return ""
    name = f"--token-file={file} (run.token_file)"
    path = Path(file).expanduser()
    try:
        return _checked(_content(path, name, uid), name)
    except OSError as exc:
        raise UsageError(f"{name}: {exc.strerror}") from exc


def own_token_file(state_dir: Path) -> Path:
    """Return where the user's own token is, if it was made."""
    return state_dir / _OWN


def own_token(path: Path, uid: int) -> str:
    """Return the user's own token in the file *path*, which is made if it is not there.

    Where nodes share its directory, as a home directory, all of them get the same: only the first
    one's is linked to the name.

    Raises:
        UsageError: It cannot be made or read, or others than *uid* can read it.
    """
    try:
        found = read_own_token(path, uid)
        if not found:
            _make(path)
            found = read_own_token(path, uid)
    except OSError as exc:
        raise UsageError(
            f"agents on several nodes need a token, and {path} cannot be made: {exc.strerror}; "
            f"{HOW}"
        ) from exc
    return found


def with_own_token(request: RunRequest, uid: int) -> RunRequest:
    """Return *request* with the user's own token, if no other was given; see `own_token`."""
    endpoint = request.plan.endpoint
    if endpoint.own_token is None:
        return request
    endpoint = replace(endpoint, token=own_token(endpoint.own_token, uid))
    return replace(request, plan=replace(request.plan, endpoint=endpoint))


def refused_token(exc: OtherTokenError, endpoint: EndpointPlan) -> UsageError:
    """Return the error of an agent whose token is not that of the others."""
    mine = f"is that which {TOKEN} or --token-file gives"
    if endpoint.own_token is not None:
        mine = f"is in {endpoint.own_token}, which this node does not share with the others"
    return UsageError(f"{exc}. The agents of a run need one token; that of this node {mine}. {HOW}")


def read_own_token(path: Path, uid: int) -> str:
    """Return the user's own token in the file *path*, ``""`` if none was made.

    Raises:
        UsageError: It is no token that we made, or others than *uid* can read it.
        OSError: It cannot be read.
    """
    try:
        found = _content(path, str(path), uid)
    except FileNotFoundError:
        return ""
    # Who may write into the folder can put a private file of this user there that they know.
    if not _OWN_TOKEN.fullmatch(found):
        raise UsageError(f"{path}: it is no token that gpuops made; remove it, or {HOW}")
    return found


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(f"{secrets.token_hex(_OWN_BYTES)}\n")
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces the token that another agent made meanwhile.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _content(path: Path, name: str, uid: int) -> str:
    # Not followed, nor waited for: who may write the folder may put a link or a fifo there.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{name}: it is not a file")
        if status.st_uid not in {uid, 0} or status.st_mode & 0o077:
            raise UsageError(f"{name}: others can read it, or it is not yours; chmod 600")
        return os.read(fd, CHARS_MAX + 1).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def _checked(token: str, where: str) -> str:
    if not CHARS_MIN <= len(token) <= CHARS_MAX or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{where}: {CHARS_MIN} to {CHARS_MAX} printable characters are wanted; {HOW}"
        )
    return token
