"""The verdict file: what a hook of Slurm needs besides exit code 1 before it fails.

Python itself exits 1 where an import fails, so that exit code alone would drain every node with a
broken environment. The hook names the file with a number that it just drew; only a command that
came to its own verdict in this very invocation writes it.
"""

from pathlib import Path

from gpuops.errors import UsageError
from gpuops.host.directories import why_not_ours
from gpuops.host.replacing import replace_file

REFUSE = "refuse"


def write_verdict(path: Path) -> None:
    """Write at *path* that this node is refused; all of it is there or nothing.

    Raises:
        UsageError: Its folder is not ours alone, or cannot be written.
    """
    trouble = why_not_ours(path.parent, private=True)
    if trouble is not None:
        raise UsageError(f"cannot write a verdict into {path.parent}: {trouble}")
    try:
        replace_file(path, f"{REFUSE}\n".encode(), 0o600)
    except OSError as exc:
        raise UsageError(f"cannot write the verdict {path}: {exc.strerror}") from exc
