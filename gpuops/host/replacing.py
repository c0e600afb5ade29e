"""Replace a file as a whole: a reader sees the old content or the new, never a part."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Give *path* the *content* and the *mode* in one step; nothing is synced to the disk.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, mode)
        draft.replace(path)
    except BaseException:  # boundary: no draft stays behind, whatever ends this
        draft.unlink(missing_ok=True)
        raise
