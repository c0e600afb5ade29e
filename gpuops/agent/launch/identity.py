"""Which run this is, and what its agents must have in common."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.launch.options import RunRequest
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
