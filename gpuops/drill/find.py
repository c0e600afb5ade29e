"""Whom a signal may reach: a process that provably is an agent, worker or board of this very run.

A state file is only a claim, and process ids are used again. So each process is looked at in
``/proc``: who owns it, when it started, what it has open, whose child it is. A signal then goes
through a pidfd, to the process that still has that start time.
"""

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuops.drill.run_state import AgentStateFile
from gpuops.errors import DrillError
from gpuops.host.procfs import process, processes

STORE_SERVER_MODULE = "gpuops.control.tcp.serve"
BYTES_MAX = 2**20
_ENDED = frozenset("ZX")
_READ_VARIABLES = ("GPUOPS_AGENT_PID", "GPUOPS_RING")


@dataclass(frozen=True, slots=True)
class Victim:
    """One process, told from any later one with its pid by the ticks at which it started."""

    pid: int
    start_ticks: int
    uid: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """What ``/proc`` says of a process; ``env`` holds our own variables only."""

    pid: int
    start_ticks: int
    uid: int
    parent: int
    argv: tuple[str, ...] = ()
    env: Mapping[str, str]
    open_files: frozenset[str] = frozenset()


def inspect_process(pid: int) -> ProcessSnapshot | None:
    """Return what there is to know of *pid*, None where it is gone."""
    folder, known = Path(f"/proc/{pid}"), process(pid)
    try:
        uid = folder.stat().st_uid
        parent = _parent(pid)
    except (OSError, ValueError, IndexError):
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
    """Return why *process* is not the agent that wrote *state*, None where it is.

    It is by a file of the run that it has open: its journal, or the lock of its rings.
    """
    if process.uid != uid:
        return f"it belongs to user {process.uid}"
    places = (f"{state.folder}/", f"{state.ring_dir.parent}/")
    if any(name.startswith(places) for name in process.open_files):
        return None
    return "it has no file of this run open"


def why_not_worker(state: AgentStateFile, process: ProcessSnapshot, agent: Victim) -> str | None:
    """Return why *process* is not a worker of *agent*, None where it is its child or has its ring.

    A program may have overwritten its environment, and a container may sit between the two.
    """
    if process.uid != agent.uid:
        return f"it belongs to user {process.uid}"
    if process.start_ticks < agent.start_ticks:
        return "it is older than the agent"
    rings = f"{state.ring_dir.parent}/"
    knows = process.env.get("GPUOPS_AGENT_PID") == str(agent.pid) and process.env.get(
        "GPUOPS_RING", ""
    ).startswith(rings)
    return None if knows or process.parent == agent.pid else "the agent did not start it"


def why_not_control_store(process: ProcessSnapshot, uid: int) -> str | None:
    """Return why *process* is not the store of a run, None where it is."""
    if process.uid != uid:
        return f"it belongs to user {process.uid}"
    return None if STORE_SERVER_MODULE in process.argv else f"it does not run {STORE_SERVER_MODULE}"


def find_agent(state: AgentStateFile, uid: int) -> Victim:
    """Return the agent of *state*, which must be of user *uid*.

    Raises:
        DrillError: There is none any more, or it is not what the file says.
    """
    what = f"the agent of node {state.node}"
    process = _required_process(state.agent_pid, what)
    _raise_if_mismatch(why_not_agent(state, process, uid), process, what)
    return _victim(process, what)


def find_worker(state: AgentStateFile, rank: int, agent: Victim) -> Victim:
    """Return the worker with *rank*.

    Raises:
        DrillError: As for `agent_of`.
    """
    what = f"rank {rank}"
    if rank not in state.pids:
        raise DrillError(f"{what} is not on node {state.node}")
    process = _required_process(state.pids[rank], what)
    _raise_if_mismatch(why_not_worker(state, process, agent), process, what)
    return _victim(process, what)


def find_workers(state: AgentStateFile, agent: Victim) -> tuple[Victim, ...]:
    """Return the workers that there are, by rank; those that have ended are left out."""
    found = []
    for rank in sorted(state.pids):
        with suppress(DrillError):
            found.append(find_worker(state, rank, agent))
    return tuple(found)


def find_control_store(state: AgentStateFile, agent: Victim) -> Victim:
    """Return the process that serves the control store of the run, started by *agent*.

    Raises:
        DrillError: None runs on this node, or it is not one.
    """
    what = "the store of the run"
    if state.control_store_pid is not None:
        process = _required_process(state.control_store_pid, what)
        _raise_if_mismatch(why_not_control_store(process, agent.uid), process, what)
        return _victim(process, what)
    for pid in _descendants(agent.pid, _children_by_parent()):
        candidate = inspect_process(pid)
        if candidate is not None and why_not_control_store(candidate, agent.uid) is None:
            return _victim(candidate, what)
    raise DrillError(f"{what} does not run on node {state.node}")


def find_descendants(agent: Victim, *, excluded: Iterable[Victim] = ()) -> tuple[Victim, ...]:
    """Return every process below *agent*: workers, their helpers, what they started.

    This process and those above it are left out, as is what runs the store of the run.
    """
    excluded_pids = {victim.pid for victim in excluded} | set(_ancestors(os.getpid()))
    found = []
    for pid in _descendants(agent.pid, _children_by_parent()):
        process = inspect_process(pid)
        if process is not None and pid not in excluded_pids and process.uid == agent.uid:
            found.append(_victim(process, f"a process of {agent.what}"))
    return tuple(item for item in found if not _is_control_store(item.pid))


def send(victim: Victim, number: signal.Signals) -> bool:
    """Signal *victim* if it is still the one that was looked at; say whether it was."""
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
    """Say whether *victim* runs no more; a zombie that nobody has reaped does not run."""
    now = process(victim.pid)
    return now is None or now.start_ticks != victim.start_ticks or now.state in _ENDED


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


def _parent(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[1])


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for item in processes():
        with suppress(OSError, ValueError, IndexError):
            children.setdefault(_parent(item.pid), []).append(item.pid)
    return children


def _descendants(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    found: list[int] = []
    queue = list(children.get(pid, ()))
    while queue:
        found.append(queue.pop(0))
        queue += children.get(found[-1], ())
    return found


def _ancestors(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError, ValueError, IndexError):
        while found[-1] > 1:
            found.append(_parent(found[-1]))
    return found


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
