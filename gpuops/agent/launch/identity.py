"""Which run this is, and what its agents must have in common."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.launch.options import RunRequest


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
