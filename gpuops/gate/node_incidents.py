"""What a check run makes of this node's incidents, and the node's file that keeps them.

Runs in the child that records the run: a file that hangs or cannot be written costs no verdict.
"""

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.checks.core.runner import CheckRun
from gpuops.errors import ConfigError
from gpuops.gate.node_state import StateError, change_state
from gpuops.host.node_state import NodeState, Repair
from gpuops.incident.incidents.node import NodeCheckContext, acknowledge_repairs, update_incidents
from gpuops.incident.runbook import Runbook, parse_runbook
from gpuops.model import FailureClass, Incident, Status, uuid7
from gpuops.resources import data_dir

_NAMESPACE = uuid.UUID("1b4c5a52-6c0e-5d0b-8a3f-9a4e6d1f2c70")
_DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOccasion:
    """Why a check ran. ``gpus``: those that it asked about (None: all); ``mode``: the gate's."""

    trigger: str
    job_id: str | None = None
    gpus: frozenset[str] | None = None
    mode: str | None = None


def changed_incidents(
    ran: CheckRun,
    occasion: CheckOccasion,
    state_dir: Path,
    uid: int,
    *,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[Incident, ...]:
    """Return the incidents to be told of, after *ran*; the file in *state_dir* keeps the open ones.

    Where the file cannot be kept, what fails is one incident a day: it would be a new one at each
    check. Where it *is_late*, another check may have looked meanwhile, and *ran* changes nothing.
    """
    told: list[Incident] = []
    about = NodeCheckContext(
        runbooks=_runbooks(ran),
        new_id=lambda _key: uuid7(ran.start_us, os.urandom(10)),
        trigger=occasion.trigger,
        job_id=occasion.job_id,
        all_gpus_checked=occasion.gpus is None,
    )

    def change(state: NodeState) -> NodeState:
        if is_late():
            return state
        found = update_incidents(ran, state.incidents, replace(about, repairs=state.repairs))
        told[:] = found.changed
        return replace(state, incidents=found.open)

    try:
        change_state(state_dir, uid, change)
    except StateError:
        daily = replace(about, new_id=lambda key: _daily_id(ran, key))
        return update_incidents(ran, {}, daily).changed
    return tuple(told)


def acknowledge(state_dir: Path, uid: int, repair: Repair) -> tuple[Incident, ...]:
    """Keep *repair* in the node's file; return the incidents that it closes.

    Raises:
        StateError: The file cannot be written.
    """
    told: list[Incident] = []

    def change(state: NodeState) -> NodeState:
        found = acknowledge_repairs(state.incidents, (repair,))
        told[:] = found.changed
        return replace(state, repairs=with_repair(state.repairs, repair), incidents=found.open)

    change_state(state_dir, uid, change)
    return tuple(told)


def with_repair(repairs: tuple[Repair, ...], new: Repair) -> tuple[Repair, ...]:
    """Return *repairs* with *new*: of each thing only its latest repair, the newest first."""
    latest: dict[tuple[str, str], Repair] = {}
    for item in sorted((*repairs, new), key=lambda item: -item.t_us):
        latest.setdefault((item.entity_kind, item.entity_id), item)
    return tuple(latest.values())


def _daily_id(ran: CheckRun, key: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{ran.node}/{key}/{ran.start_us // _DAY_US}"))


def _runbooks(ran: CheckRun) -> dict[FailureClass, Runbook]:
    """Return the runbooks of what fails; a page that cannot be read is our mistake, not its."""
    classes = {item.failure_class for item in ran.findings if item.status is Status.FAIL}
    found = {}
    for kind in sorted(filter(None, classes)):
        path = data_dir("runbooks") / f"{kind.value}.md"
        try:
            found[kind] = parse_runbook(path.name, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError):
            continue
    return found
