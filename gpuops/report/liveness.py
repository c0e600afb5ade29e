"""Whether the agent of a run without an end on record is still there.

Its state file names its process. Looking is apart from judging: a process id may have gone to
another process since, and on another node it says nothing.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.errors import ProbeError
from gpuops.host.procfs import Process, boot_us, parse_stat, read_text
from gpuops.report.time_breakdown import AgentLiveness
from gpuops.store.queries.run_queries import RunRow
from gpuops.units import US_PER_S

STATE_BYTES_MAX = 2**20
# An agent starts before its run does. The kernel tells of its boot in whole seconds, and reckons it
# back from a clock that may have been set meanwhile.
CLOCK_SLACK_US = 10 * US_PER_S
_DEAD_STATES = frozenset("ZX")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentObservation:
    """What a run's state file says, and the process that has its agent's id now.

    ``can_see_all`` says whether a process that was not found is not there: on a hardened system a
    user sees only their own. ``started_us`` is when the process began, None where it is not known.
    """

    state: Mapping[str, Any]
    process: Process | None
    started_us: int | None
    can_see_all: bool


def observe_agent(run_dir: Path, root: Path = Path("/")) -> AgentObservation | None:
    """Return what is to be seen of the agent that wrote *run_dir*, None without a state file."""
    found = read_state(run_dir / "state.json")
    if found is None:
        return None
    state, owner = found
    pid = state.get("agent_pid")
    process = _process(pid, root) if isinstance(pid, int) else None
    return AgentObservation(
        state=state,
        process=process,
        started_us=None if process is None else _started_us(process, root),
        can_see_all=os.geteuid() in (0, owner),
    )


def judge_liveness(run: RunRow, node: str, observation: AgentObservation | None) -> AgentLiveness:
    """Return what has become of the agent of *run*, as far as *observation* on *node* tells."""
    if observation is None or not isinstance(observation.state.get("agent_pid"), int):
        return AgentLiveness.UNKNOWN
    if (observation.state.get("run_id"), observation.state.get("node")) != (run.id, node):
        return AgentLiveness.UNKNOWN
    if observation.process is None:
        return AgentLiveness.GONE if observation.can_see_all else AgentLiveness.UNKNOWN
    is_later = (
        observation.started_us is not None
        and observation.started_us > run.created_us + CLOCK_SLACK_US
    )
    return (
        AgentLiveness.GONE
        if is_later or observation.process.state in _DEAD_STATES
        else AgentLiveness.RUNNING
    )


def read_state(path: Path) -> tuple[dict[str, Any], int] | None:
    """Return the state in *path* and the user that it belongs to, None where there is none."""
    try:
        # A run directory is what the store says it is: it may name anything.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            state = json.loads(file.read(STATE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return (state, status.st_uid) if isinstance(state, dict) else None


def _process(pid: int, root: Path) -> Process | None:
    try:
        return parse_stat(read_text(root / f"proc/{pid}/stat"))
    except ProbeError:
        return None


def _started_us(process: Process, root: Path) -> int | None:
    booted_us = boot_us(root)
    if booted_us is None:
        return None
    return booted_us + process.start_ticks * US_PER_S // os.sysconf("SC_CLK_TCK")
