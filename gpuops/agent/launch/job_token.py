"""The token that agents of one run prove to each other: where it is read, and how it stays secret.

It comes from GPUOPS_TOKEN or a file that only its owner can read. No worker inherits it.
"""

import os
import stat
from collections.abc import Mapping

from gpuops.errors import UsageError

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
