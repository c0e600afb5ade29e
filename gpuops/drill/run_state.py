"""What a run publishes about itself, and whether a rank has reached a step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.errors import DrillError
from gpuops.wire.ring import RingError, read_beats, read_header

STATE_BYTES_MAX = 2**20
PID_MAX = 2**22  # PID_MAX_LIMIT of linux/threads.h


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStateFile:
    """One agent's state file. ``owner_uid`` is who wrote it; nothing in it is believed as it is."""

    path: Path
    owner_uid: int
    run_id: str
    node: str
    generation: int
    phase: str
    agent_pid: int
    pids: Mapping[int, int]
    ring_dir: Path
    control_store_pid: int | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return self.path.parent


def read_raw_states(directory: Path) -> list[dict[str, Any]]:
    """Return the run states in *directory*, a run's own folder or the parent of several.

    Of a parent only the newest run counts: folder names begin with the time.
    """
    return [body for _path, body in _newest(directory)]


def read_states(directory: Path) -> list[AgentStateFile]:
    """Return what the agents of a run publish in *directory*, chosen as by `newest_states`.

    A file that makes no sense is left out.
    """
    found = (_parse_state(path, body) for path, body in _newest(directory))
    return [item for item in found if item is not None]


def choose_state(
    states: Sequence[AgentStateFile], *, node: str | None, rank: int | None
) -> AgentStateFile:
    """Return the agent that is meant: the one of *node*, the one with *rank*, or the only one.

    Raises:
        DrillError: None is, or several are.
    """
    matching = [
        state
        for state in states
        if node in {None, state.node} and (rank is None or rank in state.pids)
    ]
    if len(matching) == 1:
        return matching[0]
    which = [f"node {node}"] if node is not None else []
    which += [f"rank {rank}"] if rank is not None else []
    wanted = " and ".join(which) or "an agent"
    if not states:
        raise DrillError("no run publishes its state there; is it running, on this node?")
    agents_text = "; ".join(
        f"node {state.node} with ranks {', '.join(map(str, sorted(state.pids))) or 'none'}"
        for state in states[:16]
    )
    if not matching:
        raise DrillError(f"nothing of this run has {wanted}; there is {agents_text}")
    raise DrillError(f"several agents fit {wanted}: {agents_text}; name one with --node")


def _newest(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    runs = [directory] if _state_files(directory) else sorted(_children(directory), reverse=True)
    for run in runs:
        states = [(path, body) for path in _state_files(run) if (body := _read(path)) is not None]
        if states:
            return states
    return []


def _children(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []


def _state_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("state*.json"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            state = json.loads(file.read(STATE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _parse_state(path: Path, body: Mapping[str, Any]) -> AgentStateFile | None:
    try:
        store_pid = body.get("board_pid")
        return AgentStateFile(
            path=path,
            owner_uid=path.lstat().st_uid,
            run_id=str(body["run_id"])[:128],
            node=str(body["node"])[:255],
            generation=int(body["generation"]),
            phase=str(body["phase"]),
            agent_pid=_pid(body["agent_pid"]),
            pids={int(rank): _pid(pid) for rank, pid in dict(body["pids"]).items()},
            ring_dir=Path(str(body["ring_dir"])),
            control_store_pid=None if store_pid is None else _pid(store_pid),
        )
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _pid(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 < value <= PID_MAX:
        raise ValueError(f"{value!r} is not a process id")
    return value


RING_BYTES_MAX = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrigger:
    """Which rank, and when: at *at_step* of *generation*, of any where that is None.

    The step is the ring's own; where the optimizer keeps none, its number of beats.
    """

    rank: int
    at_step: int
    generation: int | None = 0


@dataclass(frozen=True, slots=True)
class RankAtStep:
    """A process that has reached its step."""

    pid: int
    step: int


def find_rank_at_step(
    trigger: StepTrigger, states: Sequence[Mapping[str, Any]]
) -> RankAtStep | None:
    """Return the process that is meant if one of *states* shows that it got there."""
    for state in states:
        pids, generation = state.get("pids"), state.get("generation")
        pid = pids.get(str(trigger.rank)) if isinstance(pids, dict) else None
        if trigger.generation not in {None, generation} or state.get("phase") != "running":
            continue
        if isinstance(pid, int) and isinstance(generation, int):
            ring = Path(str(state.get("ring_dir"))) / f"rank{trigger.rank}.ring"
            step = newest_step(trigger.rank, generation, pid, ring)
            if step is not None and step >= trigger.at_step:
                return RankAtStep(pid, step)
    return None


def has_reached(trigger: StepTrigger, states: Sequence[AgentStateFile]) -> bool:
    """Say whether one of *states* shows the rank of *trigger* at its step."""
    for state in states:
        if trigger.generation in {None, state.generation} and trigger.rank in state.pids:
            ring = state.ring_dir / f"rank{trigger.rank}.ring"
            step = newest_step(trigger.rank, state.generation, state.pids[trigger.rank], ring)
            if state.phase == "running" and step is not None and step >= trigger.at_step:
                return True
    return False


def newest_step(rank: int, generation: int, pid: int, ring: Path) -> int | None:
    """Return the newest step in *ring*, None where it is not this process' ring."""
    try:
        with ring.open("rb") as file:
            data = file.read(RING_BYTES_MAX)
        header = read_header(data)
        beats = read_beats(data, max(0, header.head - 2))
    except (OSError, RingError, ValueError):
        return None
    if not beats or (header.rank, header.generation, header.pid) != (rank, generation, pid):
        return None
    return beats[-1].step if beats[-1].step >= 0 else beats[-1].seq
