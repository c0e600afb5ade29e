"""Looking at a run that may be going on: its folder, its board, its agent on this machine.

Every look has a deadline and returns None where there is nothing to be seen. Nothing that a folder
says is trusted further than to ask there.
"""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gpuops.control.keys import ControlKeys
from gpuops.control.record import (
    ENTRY_ERRORS,
    RECORD_KEY,
    ControlRecord,
    Member,
    RecordError,
    Roster,
    pack,
    unpack,
)
from gpuops.control.store import ControlStore, ControlStoreError, Entry
from gpuops.report.liveness import read_state
from gpuops.report.run_view import RunView, from_control_store, int_or_none

FOLDERS_MAX = 10_000
STATES_MAX = 4096
ANSWER_BYTES_MAX = 2**20
QUERY_TIMEOUT_S = 2.0


def find_run_folder(parent: Path, wanted_name: str | None) -> Path | None:
    """Return the folder of the run *wanted_name* (an end of its id or name), else of the newest.

    Names begin with the time of the launch, so that the last by name is the newest.
    """
    try:
        names = sorted(entry.name for entry in parent.iterdir())[-FOLDERS_MAX:]
    except OSError:
        return None
    for name in reversed(names):
        folder = parent / name
        if _matches_name(folder, wanted_name) and any(read_states(folder)):
            return folder
    return None


def read_states(folder: Path) -> Iterator[dict[str, Any]]:
    """Return what the agents of a run say in its folder, group rank 0's first."""
    try:
        paths = sorted(folder.glob("state*.json"), key=lambda path: (len(path.name), path.name))
    except OSError:
        return
    for path in paths[:STATES_MAX]:
        found = read_state(path)
        if found is not None:
            yield found[0]


def read_control_store(store: ControlStore) -> RunView | None:
    """Return the run as *store* has it, None where it has none.

    Raises:
        ControlStoreError: See `ControlStore`.
    """
    entry = store.get(RECORD_KEY)
    if not entry.version:
        return None
    try:
        record = ControlRecord.from_bytes(entry.value)
    except RecordError as exc:
        raise ControlStoreError(f"the board's record cannot be read: {exc}") from exc
    keys = ControlKeys(run_id=record.run_id)
    # The only way to the board's time; the key is no agent's.
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
    return from_control_store(record, _roster(store, keys, record), agents, alive, reply.store_s)


def query_agent(port: object) -> Mapping[str, Any] | None:
    """Return the state of the agent that listens on *port* of this machine."""
    number = int_or_none(port)
    if number is None or not 0 < number < 2**16:
        return None
    try:
        with closing(
            http.client.HTTPConnection("127.0.0.1", number, timeout=QUERY_TIMEOUT_S)
        ) as connection:
            connection.request("GET", "/state")
            response = connection.getresponse()
            data = response.read(ANSWER_BYTES_MAX)
        body = json.loads(data) if response.status == http.client.OK else None
    except (OSError, ValueError, http.client.HTTPException, RecursionError):
        return None
    is_ours = isinstance(body, dict) and body.get("schema") == "gpuops.agent-state/1"
    return body if is_ours else None


def _matches_name(folder: Path, wanted_name: str | None) -> bool:
    if wanted_name is None or folder.name == wanted_name:
        return True
    part = wanted_name.strip().lower()
    ids = {str(state.get("run_id")) for state in read_states(folder)}
    return any(run_id.startswith(part) or run_id.endswith(part) for run_id in ids)


def _roster(store: ControlStore, keys: ControlKeys, record: ControlRecord) -> Roster | None:
    """Return the roster of the record's generation, else of the one before that is being left."""
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
