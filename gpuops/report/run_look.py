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

from gpuops.control.board import Board, BoardError, Entry
from gpuops.control.keys import Keys
from gpuops.control.record import (
    BAD_ENTRY,
    CONTROL,
    ControlRecord,
    Member,
    RecordError,
    Roster,
    pack,
    unpack,
)
from gpuops.report.liveness import read_state
from gpuops.report.run_view import RunView, of_board, whole

FOLDERS_MAX = 10_000
STATES_MAX = 4096
ANSWER_BYTES_MAX = 2**20
ASK_S = 2.0


def find_folder(parent: Path, wanted: str | None) -> Path | None:
    """Return the folder of the run *wanted* (an end of its id or its name), else of the newest.

    Names begin with the time of the launch, so that the last by name is the newest.
    """
    try:
        names = sorted(entry.name for entry in parent.iterdir())[-FOLDERS_MAX:]
    except OSError:
        return None
    for name in reversed(names):
        folder = parent / name
        if _is_meant(folder, wanted) and any(states(folder)):
            return folder
    return None


def states(folder: Path) -> Iterator[dict[str, Any]]:
    """Return what the agents of a run say in its folder, group rank 0's first."""
    try:
        paths = sorted(folder.glob("state*.json"), key=lambda path: (len(path.name), path.name))
    except OSError:
        return
    for path in paths[:STATES_MAX]:
        found = read_state(path)
        if found is not None:
            yield found[0]


def ask_board(board: Board) -> RunView | None:
    """Return the run as *board* has it, None where it has none.

    Raises:
        BoardError: See `Board`.
    """
    entry = board.get(CONTROL)
    if not entry.version:
        return None
    try:
        record = ControlRecord.from_bytes(entry.value)
    except RecordError as exc:
        raise BoardError(f"the board's record cannot be read: {exc}") from exc
    keys = Keys(run_id=record.run_id)
    # The only way to the board's time; the key is no agent's.
    beaten = board.beat(
        f"{keys.prefix}/onlooker", pack({}), watch=CONTROL, seen=entry.version, hold_s=0.0
    )
    agents = {m.agent: m for e in board.list(keys.agent()).values() if (m := _member(e))}
    alive = {key.rpartition("/")[2]: _body(beat) for key, beat in board.list(keys.alive()).items()}
    return of_board(record, _roster(board, keys, record), agents, alive, beaten.board_s)


def ask_agent(port: object) -> Mapping[str, Any] | None:
    """Return the state of the agent that listens on *port* of this machine."""
    number = whole(port)
    if number is None or not 0 < number < 2**16:
        return None
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", number, timeout=ASK_S)) as there:
            there.request("GET", "/state")
            answer = there.getresponse()
            data = answer.read(ANSWER_BYTES_MAX)
        body = json.loads(data) if answer.status == http.client.OK else None
    except (OSError, ValueError, http.client.HTTPException, RecursionError):
        return None
    is_ours = isinstance(body, dict) and body.get("schema") == "gpuops.agent-state/1"
    return body if is_ours else None


def _is_meant(folder: Path, wanted: str | None) -> bool:
    if wanted is None or folder.name == wanted:
        return True
    part = wanted.strip().lower()
    ids = {str(state.get("run_id")) for state in states(folder)}
    return any(run_id.startswith(part) or run_id.endswith(part) for run_id in ids)


def _roster(board: Board, keys: Keys, record: ControlRecord) -> Roster | None:
    """Return the roster of the record's generation, else of the one before that is being left."""
    for generation in (record.generation, record.generation - 1):
        if generation < 0:
            continue
        entry = board.get(keys.roster(generation))
        if entry.version:
            try:
                return Roster.from_bytes(entry.value)
            except RecordError:
                return None
    return None


def _member(entry: Entry) -> Member | None:
    try:
        return Member.from_json(unpack(entry.value))
    except BAD_ENTRY:
        return None


def _body(entry: Entry) -> Mapping[str, Any]:
    try:
        return unpack(entry.value)
    except BAD_ENTRY:
        return {}
