"""Which processes a signal may reach: an agent, worker or control store proven to be of this run.

A state file is only a claim, and process ids are reused. So each process is verified in ``/proc``:
its owner, its start time, its open files, its parent. A signal then goes through a pidfd, to the
process that still has that start time.
"""

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpuops.errors import DrillError
from gpuops.host.process.inspect import descendants
from gpuops.host.procfs import process
from gpuops.host.trust import read_file, read_json
from gpuops.wire.ring import RingError, read_beats, read_header

STATE_BYTES_MAX = 2**20
PID_MAX = 2**22  # PID_MAX_LIMIT of linux/threads.h


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStateFile:
    """One agent's state file. ``owner_uid`` owns the file; its content is not trusted."""

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
        """Return the run's folder."""
        return self.path.parent


def read_states(directory: Path) -> list[AgentStateFile]:
    """Return the state files of a run in *directory*, its own folder or the parent of several.

    In a parent only the newest run counts: folder names begin with the time. A malformed file is
    skipped.
    """
    found = (_parse_state(*item) for item in _newest(directory))
    return [item for item in found if item is not None]


def choose_state(
    states: Sequence[AgentStateFile], *, node: str | None, rank: int | None
) -> AgentStateFile:
    """Return the state of the agent of *node*, the one with *rank*, or the only one.

    Raises:
        DrillError: None matches, or several do.
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


def _newest(directory: Path) -> list[tuple[Path, dict[str, Any], int]]:
    runs = [directory] if _state_files(directory) else run_folders(directory)
    for run in runs:
        found = ((path, read_json(path, STATE_BYTES_MAX)) for path in _state_files(run))
        states = [(path, *state) for path, state in found if state is not None]
        if states:
            return states
    return []


def run_folders(directory: Path) -> list[Path]:
    """Return the folders in *directory*, the newest run first."""
    try:
        return sorted((path for path in directory.iterdir() if path.is_dir()), reverse=True)
    except OSError:
        return []


def _state_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("state*.json"))


def _parse_state(path: Path, body: Mapping[str, Any], owner_uid: int) -> AgentStateFile | None:
    try:
        store_pid = body.get("board_pid")
        return AgentStateFile(
            path=path,
            owner_uid=owner_uid,
            run_id=str(body["run_id"])[:128],
            node=str(body["node"])[:255],
            generation=int(body["generation"]),
            phase=str(body["phase"]),
            agent_pid=_pid(body["agent_pid"]),
            pids={int(rank): _pid(pid) for rank, pid in dict(body["pids"]).items()},
            ring_dir=Path(str(body["ring_dir"])),
            control_store_pid=None if store_pid is None else _pid(store_pid),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _pid(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 < value <= PID_MAX:
        raise ValueError(f"{value!r} is not a process id")
    return value


RING_BYTES_MAX = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrigger:
    """A rank that reaches *at_step* in *generation*, or in any generation if that is None.

    The step is that of the ring, or its number of heartbeats if the optimizer counts no steps.
    """

    rank: int
    at_step: int
    generation: int | None = 0


@dataclass(frozen=True, slots=True)
class RankAtStep:
    """A process that has reached its step, as *state* claims."""

    pid: int
    step: int
    state: AgentStateFile


def find_rank_at_step(trigger: StepTrigger, states: Sequence[AgentStateFile]) -> RankAtStep | None:
    """Return the process of *trigger* if one of *states* shows that it has reached its step."""
    for state in states:
        pid = state.pids.get(trigger.rank)
        if pid is None or trigger.generation not in {None, state.generation}:
            continue
        ring = state.ring_dir / f"rank{trigger.rank}.ring"
        step = newest_step(trigger.rank, state.generation, pid, ring)
        if state.phase == "running" and step is not None and step >= trigger.at_step:
            return RankAtStep(pid, step, state)
    return None


def newest_step(rank: int, generation: int, pid: int, ring: Path) -> int | None:
    """Return the newest step in *ring*, None if it is not this process' ring."""
    found = read_file(ring, RING_BYTES_MAX)
    try:
        data = b"" if found is None else found[0]
        header = read_header(data)
        beats = read_beats(data, max(0, header.head - 2))
    except (RingError, ValueError):
        return None
    if not beats or (header.rank, header.generation, header.pid) != (rank, generation, pid):
        return None
    return beats[-1].step if beats[-1].step >= 0 else beats[-1].seq


STORE_SERVER_MODULE = "gpuops.control.tcp.serve"
BYTES_MAX = 2**20
_ENDED = frozenset("ZX")
_READ_VARIABLES = ("GPUOPS_AGENT_PID", "GPUOPS_RING")


@dataclass(frozen=True, slots=True)
class Victim:
    """One process, identified by its pid and its start time in clock ticks."""

    pid: int
    start_ticks: int
    uid: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A process as ``/proc`` shows it; ``env`` holds only gpuops' own variables."""

    pid: int
    start_ticks: int
    uid: int
    parent: int
    argv: tuple[str, ...] = ()
    env: Mapping[str, str]
    open_files: frozenset[str] = frozenset()


def inspect_process(pid: int) -> ProcessSnapshot | None:
    """Return the process *pid*, None if it has ended."""
    folder, known = Path(f"/proc/{pid}"), process(pid)
    try:
        uid, parent = folder.stat().st_uid, psutil.Process(pid).ppid()
    except (OSError, psutil.NoSuchProcess):
        return None
    if known is None:
        return None
    pairs = (word.partition("=") for word in _read_strings(folder / "environ"))
    return ProcessSnapshot(
        pid=pid,
        start_ticks=known.start_ticks,
        uid=uid,
        parent=parent,
        argv=_read_strings(folder / "cmdline"),
        env={name: value for name, _, value in pairs if name in _READ_VARIABLES},
        open_files=frozenset(_open_files(folder / "fd")),
    )


def why_not_agent(state: AgentStateFile, process: ProcessSnapshot, uid: int) -> str | None:
    """Return why *process* is not the agent that wrote *state*, None if it is.

    The agent has a file of the run open: its journal, or the lock of its rings.
    """
    if process.uid != uid:
        return f"it belongs to user {process.uid}"
    places = (f"{state.folder}/", f"{state.ring_dir.parent}/")
    if any(name.startswith(places) for name in process.open_files):
        return None
    return "it has no file of this run open"


def why_not_worker(state: AgentStateFile, process: ProcessSnapshot, agent: Victim) -> str | None:
    """Return why *process* is not a worker of *agent*, None if it is its child or has its ring.

    A program may overwrite its environment, and a container may be between the two.
    """
    if process.uid != agent.uid:
        return f"it belongs to user {process.uid}"
    if process.start_ticks < agent.start_ticks:
        return "it is older than the agent"
    rings = f"{state.ring_dir.parent}/"
    is_tagged = process.env.get("GPUOPS_AGENT_PID") == str(agent.pid) and process.env.get(
        "GPUOPS_RING", ""
    ).startswith(rings)
    return None if is_tagged or process.parent == agent.pid else "the agent did not start it"


def why_not_control_store(process: ProcessSnapshot, uid: int) -> str | None:
    """Return why *process* is not the control store of a run, None if it is."""
    if process.uid != uid:
        return f"it belongs to user {process.uid}"
    return None if STORE_SERVER_MODULE in process.argv else f"it does not run {STORE_SERVER_MODULE}"


def find_agent(state: AgentStateFile, uid: int) -> Victim:
    """Return the agent of *state*, which must be of user *uid*.

    Raises:
        DrillError: It has ended, or the process is not the agent.
    """
    what = f"the agent of node {state.node}"
    process = _required_process(state.agent_pid, what)
    _raise_if_mismatch(why_not_agent(state, process, uid), process, what)
    return _victim(process, what)


def find_worker(state: AgentStateFile, rank: int, agent: Victim) -> Victim:
    """Return the worker with *rank*.

    Raises:
        DrillError: As for `find_agent`.
    """
    what = f"rank {rank}"
    if rank not in state.pids:
        raise DrillError(f"{what} is not on node {state.node}")
    process = _required_process(state.pids[rank], what)
    _raise_if_mismatch(why_not_worker(state, process, agent), process, what)
    return _victim(process, what)


def find_control_store(state: AgentStateFile, agent: Victim) -> Victim:
    """Return the process that serves the control store of the run, started by *agent*.

    Raises:
        DrillError: None runs on this node, or the process is not one.
    """
    what = "the store of the run"
    if state.control_store_pid is not None:
        process = _required_process(state.control_store_pid, what)
        _raise_if_mismatch(why_not_control_store(process, agent.uid), process, what)
        return _victim(process, what)
    for pid in descendants(agent.pid):
        candidate = inspect_process(pid)
        if candidate is not None and why_not_control_store(candidate, agent.uid) is None:
            return _victim(candidate, what)
    raise DrillError(f"{what} does not run on node {state.node}")


def find_descendants(agent: Victim, *, excluded: Iterable[Victim] = ()) -> tuple[Victim, ...]:
    """Return every process below *agent*: workers, their helpers, what they started.

    Without this process, its ancestors, and the control store.
    """
    excluded_pids = {victim.pid for victim in excluded} | set(_ancestors(os.getpid()))
    found = []
    for pid in descendants(agent.pid):
        process = inspect_process(pid)
        if process is not None and pid not in excluded_pids and process.uid == agent.uid:
            found.append(_victim(process, f"a process of {agent.what}"))
    return tuple(item for item in found if not _is_control_store(item.pid))


def send(victim: Victim, number: signal.Signals) -> bool:
    """Signal *victim* if its pid is still that process; return whether it is."""
    if victim.pid == os.getpid():
        return False
    try:
        fd = os.pidfd_open(victim.pid)
    except OSError:
        return False
    try:
        if has_ended(victim):
            return False
        if Path(f"/proc/{victim.pid}").stat().st_uid != victim.uid:
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def has_ended(victim: Victim) -> bool:
    """Return whether *victim* has ended; a zombie has."""
    now = process(victim.pid)
    return now is None or now.start_ticks != victim.start_ticks or now.state in _ENDED


def identify(pid: int) -> Victim | None:
    """Return the process that has *pid* now, None without one."""
    known = process(pid)
    with suppress(OSError):
        if known is not None:
            uid = Path(f"/proc/{pid}").stat().st_uid
            return Victim(pid, known.start_ticks, uid, known.name)
    return None


def _required_process(pid: int, what: str) -> ProcessSnapshot:
    process = inspect_process(pid)
    if process is None:
        raise DrillError(f"{what} (pid {pid}) does not run on this machine any more")
    return process


def _raise_if_mismatch(mismatch: str | None, process: ProcessSnapshot, what: str) -> None:
    if mismatch is not None:
        raise DrillError(f"pid {process.pid} is not {what}: {mismatch}; nothing was touched")


def _victim(process: ProcessSnapshot, what: str) -> Victim:
    return Victim(process.pid, process.start_ticks, process.uid, what)


def _is_control_store(pid: int) -> bool:
    return STORE_SERVER_MODULE in _read_strings(Path(f"/proc/{pid}/cmdline"))


def _ancestors(pid: int) -> list[int]:
    try:
        return [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except psutil.NoSuchProcess:
        return [pid]


def _read_strings(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX).decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(word for word in text.split("\0") if word)


def _open_files(folder: Path) -> list[str]:
    try:
        links = list(folder.iterdir())
    except OSError:
        return []
    found = []
    for link in links:
        with suppress(OSError):
            found.append(str(link.readlink()))
    return found
