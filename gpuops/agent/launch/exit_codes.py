"""What the exit codes of ``gpuops run`` ask of the scheduler, in a line, and where it finds them.

srun ends with the highest code of any task, and a task on a node that was lost counts as killed:
137, though the run went on and ended with another. So the batch script makes a file, and the agent
on its node writes the run's code there.
"""

import os
from pathlib import Path

from gpuops.errors import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_NODE_UNHEALTHY,
    EXIT_REQUEUE,
)

_MEANING = {
    EXIT_REQUEUE: "requeue me: slurm.conf's RequeueExit=85 starts the job again",
    EXIT_NODE_UNHEALTHY: "this node is unhealthy: the root epilog runs every check on it",
    EXIT_DO_NOT_REQUEUE: "do not requeue: it would fail the same way again; end the chain of jobs",
}


def meaning(exit_code: int) -> str | None:
    """Return what *exit_code* asks for, None for one that asks for nothing."""
    said = _MEANING.get(exit_code)
    return None if said is None else f"exit {exit_code}: {said}"


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
