"""What a run publishes about itself: ``state*.json`` in its folder, one file for each agent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.errors import DrillError

STATE_BYTES_MAX = 2**20
PID_MAX = 2**22  # PID_MAX_LIMIT of linux/threads.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
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
    board_pid: int | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return self.path.parent


def newest_states(directory: Path) -> list[dict[str, Any]]:
    """Return the run states in *directory*, a run's own folder or the parent of several.

    Of a parent only the newest run counts: folder names begin with the time.
    """
    return [body for _path, body in _newest(directory)]


def read_published(directory: Path) -> list[Published]:
    """Return what the agents of a run publish in *directory*, chosen as by `newest_states`.

    A file that makes no sense is left out.
    """
    found = (_published(path, body) for path, body in _newest(directory))
    return [item for item in found if item is not None]


def choose(states: Sequence[Published], *, node: str | None, rank: int | None) -> Published:
    """Return the agent that is meant: the one of *node*, the one with *rank*, or the only one.

    Raises:
        DrillError: None is, or several are.
    """
    fitting = [
        state
        for state in states
        if node in {None, state.node} and (rank is None or rank in state.pids)
    ]
    if len(fitting) == 1:
        return fitting[0]
    which = [f"node {node}"] if node is not None else []
    which += [f"rank {rank}"] if rank is not None else []
    wanted = " and ".join(which) or "an agent"
    if not states:
        raise DrillError("no run publishes its state there; is it running, on this node?")
    there = "; ".join(
        f"node {state.node} with ranks {', '.join(map(str, sorted(state.pids))) or 'none'}"
        for state in states[:16]
    )
    if not fitting:
        raise DrillError(f"nothing of this run has {wanted}; there is {there}")
    raise DrillError(f"several agents fit {wanted}: {there}; name one with --node")


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


def _published(path: Path, body: Mapping[str, Any]) -> Published | None:
    try:
        board = body.get("board_pid")
        return Published(
            path=path,
            owner_uid=path.lstat().st_uid,
            run_id=str(body["run_id"])[:128],
            node=str(body["node"])[:255],
            generation=int(body["generation"]),
            phase=str(body["phase"]),
            agent_pid=_pid(body["agent_pid"]),
            pids={int(rank): _pid(pid) for rank, pid in dict(body["pids"]).items()},
            ring_dir=Path(str(body["ring_dir"])),
            board_pid=None if board is None else _pid(board),
        )
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _pid(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 < value <= PID_MAX:
        raise ValueError(f"{value!r} is not a process id")
    return value
