"""A run that may be in progress: its folder, its control store, its agent on this machine.

Every read has a deadline and returns None if nothing is found. The content of a folder is trusted
only as an address to query. An agent's state file names its process; reading is separate from
judging: a process id may belong to another process since, and is meaningless on another node.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.control.record import (
    ENTRY_ERRORS,
    RECORD_KEY,
    ControlKeys,
    ControlRecord,
    Member,
    RecordError,
    Roster,
    pack,
    unpack,
)
from gpuops.control.store import ControlStore, ControlStoreError, Entry
from gpuops.errors import ProbeError
from gpuops.host.procfs import Process, boot_us, parse_stat, read_text
from gpuops.host.trust import read_json
from gpuops.report.run_view import RunView, from_control_store, int_or_none
from gpuops.report.time_breakdown import AgentLiveness
from gpuops.store.queries.run_queries import RunRow
from gpuops.units import US_PER_S

STATE_BYTES_MAX = 2**20
# An agent starts before its run does. The kernel reports its boot in whole seconds, computed
# from a clock that may have been set meanwhile.
CLOCK_SLACK_US = 10 * US_PER_S
_DEAD_STATES = frozenset("ZX")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentObservation:
    """A run's state file, and the process that has its agent's id now.

    ``can_see_all``: a process that was not found does not exist; on a hardened system a user sees
    only their own. ``started_us`` is when the process started, None if unknown.
    """

    state: Mapping[str, Any]
    process: Process | None
    started_us: int | None
    can_see_all: bool


def observe_agent(run_dir: Path, root: Path = Path("/")) -> AgentObservation | None:
    """Return the observation of the agent that wrote *run_dir*, None without a state file."""
    found = read_json(run_dir / "state.json", STATE_BYTES_MAX)
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
    """Return whether the agent of *run* is running, as far as *observation* on *node* shows."""
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


FOLDERS_MAX = 10_000
STATES_MAX = 4096
ANSWER_BYTES_MAX = 2**20
QUERY_TIMEOUT_S = 2.0  # for the whole answer, however slowly it arrives
_CHUNK_BYTES = 2**16


def has_state(folder: Path) -> bool:
    """Return whether *folder* is one that an agent of a run has written its state to."""
    return any(read_states(folder))


def has_journal(folder: Path) -> bool:
    """Return whether *folder* holds the journal of a run, which may never have started workers."""
    return (folder / "journal").is_dir()


def find_run_folder(
    parent: Path, wanted_name: str | None, is_run: Callable[[Path], bool] = has_state
) -> Path | None:
    """Return the folder of the run *wanted_name* (an end of its id, or a folder), else the newest.

    Names begin with the time of the launch, so that the last by name is the newest. *is_run* says
    which folders count.
    """
    try:
        names = sorted(entry.name for entry in parent.iterdir())[-FOLDERS_MAX:]
    except OSError:
        return None
    for name in reversed(names):
        folder = parent / name
        if _matches_name(folder, wanted_name) and is_run(folder):
            return folder
    return None


def run_names(parent: Path) -> list[str]:
    """Return the names of the runs' folders in *parent*, the newest first."""
    try:
        names = sorted((entry.name for entry in parent.iterdir()), reverse=True)[:FOLDERS_MAX]
    except OSError:
        return []
    return [name for name in names if has_state(parent / name)]


def read_states(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the state files of a run's agents in its folder, that of group rank 0 first."""
    try:
        paths = sorted(folder.glob("state*.json"), key=lambda path: (len(path.name), path.name))
    except OSError:
        return
    for path in paths[:STATES_MAX]:
        found = read_json(path, STATE_BYTES_MAX)
        if found is not None:
            yield found[0]


def read_control_store(store: ControlStore) -> RunView | None:
    """Return the run in *store*, None if it has none.

    Raises:
        ControlStoreError: See `ControlStore`.
    """
    entry = store.get(RECORD_KEY)
    if not entry.version:
        return None
    try:
        record = ControlRecord.from_bytes(entry.value)
    except RecordError as exc:
        raise ControlStoreError(f"the control store's record cannot be read: {exc}") from exc
    keys = ControlKeys(run_id=record.run_id)
    # The only way to read the control store's time; no agent has this key.
    reply = store.heartbeat(
        f"{keys.prefix}/onlooker",
        pack({}),
        watch=RECORD_KEY,
        seen_version=entry.version,
        hold_s=0.0,
    )
    agents = {m.agent: m for e in store.list(keys.agent()).values() if (m := _member(e))}
    alive = {
        key.rpartition("/")[2]: _body(beat) for key, beat in store.list(keys.heartbeat()).items()
    }
    roster, published = _roster(store, keys, record), store.list(keys.published("straggler"))
    slow = {
        key.rpartition("/")[2]: body.get("published")
        for key, entry in published.items()
        if roster is not None and (body := _body(entry)).get("generation") == roster.generation
    }
    return from_control_store(record, roster, agents, alive, reply.store_s, slow)


def query_agent(port: object) -> Mapping[str, Any] | None:
    """Return the state of the agent that listens on *port* of this host."""
    number = int_or_none(port)
    if number is None or not 0 < number < 2**16:
        return None
    try:
        head, _, data = _ask(number, time.monotonic() + QUERY_TIMEOUT_S).partition(b"\r\n\r\n")
        body = json.loads(data) if head.split()[1:2] == [b"200"] else None
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(body, dict) and body.get("schema") == "gpuops.agent-state/1"
    return body if is_ours else None


def _ask(port: int, end_s: float) -> bytes:
    """Return the answer by *end_s*; another user's program may listen on an ended agent's port."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), end_s - time.monotonic()) as sock:
        sock.sendall(b"GET /state HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        while (left_s := end_s - time.monotonic()) > 0 and len(answer) <= ANSWER_BYTES_MAX:
            sock.settimeout(left_s)
            if not (data := sock.recv(_CHUNK_BYTES)):
                break
            answer += data
    return answer


def _matches_name(folder: Path, wanted_name: str | None) -> bool:
    if wanted_name is None or folder.name == wanted_name:
        return True
    part = wanted_name.strip().lower()
    if part and folder.name.endswith(f"-{part}"):  # where no state was written
        return True
    ids = {str(state.get("run_id")) for state in read_states(folder)}
    return any(run_id.startswith(part) or run_id.endswith(part) for run_id in ids)


def _roster(store: ControlStore, keys: ControlKeys, record: ControlRecord) -> Roster | None:
    """Return the roster of the record's generation, else of the one before, which is ending."""
    for generation in (record.generation, record.generation - 1):
        if generation < 0:
            continue
        entry = store.get(keys.roster(generation))
        if entry.version:
            try:
                return Roster.from_bytes(entry.value)
            except RecordError:
                return None
    return None


def _member(entry: Entry) -> Member | None:
    try:
        return Member.from_json(unpack(entry.value))
    except ENTRY_ERRORS:
        return None


def _body(entry: Entry) -> Mapping[str, Any]:
    try:
        return unpack(entry.value)
    except ENTRY_ERRORS:
        return {}
