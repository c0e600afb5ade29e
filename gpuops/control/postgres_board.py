"""A board in a Postgres table, so that any single node of a run may be lost.

The table `gpuops_board` is made where it is not there. Compare-and-swap is an UPDATE of one row
where its version is still the one seen. A waiting heartbeat looks every `POLL_S`: LISTEN would take
a second connection of each agent, does not pass through a pooler, and is lost with the connection;
a look is one read by primary key.

With a token every value is sealed: what somebody else wrote into the table is refused, with the
name of its key. Who can write to the table can still remove rows; the agents then find no board.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpuops.control import postgres_sql as sql
from gpuops.control.board import (
    NOTHING,
    VALUE_BYTES_MAX,
    Beaten,
    BoardError,
    BoardForgotError,
    Entry,
)
from gpuops.control.postgres_session import Sessions
from gpuops.control.seal import Sealed, SealError
from gpuops.control.shelf import check_key, check_prefix, check_value, is_ours
from gpuops.host.job_proof import PROOF_BYTES, nonce

if TYPE_CHECKING:
    from psycopg import Connection, Cursor

DEADLINE_S = 5.0
POLL_S = 0.25
RUN_KEY_CHARS_MAX = 255
# A run that lives writes every second.
KEEP_DAYS = 7

INSTANCE_BYTES = 16
# A row that is longer than any of ours is not read whole.
_CUT = VALUE_BYTES_MAX + PROOF_BYTES + 2
T = TypeVar("T")


class PostgresBoard:
    """A `Board` in the database at *url*; safe from several threads.

    Its time is the database's clock, in seconds since the epoch. Every call ends within
    *deadline_s* (a heartbeat: and its hold). Where it raises `BoardUnreachableError`, what it asked
    for may still have been done.

    Raises:
        BoardError: The driver is not installed, or *url* or *run_key* is malformed.
    """

    def __init__(
        self, url: str, *, run_key: str, token: str = "", deadline_s: float = DEADLINE_S
    ) -> None:
        if not 0 < len(run_key) <= RUN_KEY_CHARS_MAX or "\0" in run_key:
            raise BoardError(f"a run's key has 1 to {RUN_KEY_CHARS_MAX} characters, none of them 0")
        self._run = run_key
        self._deadline_s = deadline_s
        self._sealed = Sealed(run_key, token)
        self._instance: bytes | None = None
        self._sessions = Sessions(url, self._prepare, connect_s=deadline_s)

    @property
    def instance(self) -> str:
        """Return the name of this run's rows, "" before the first answer.

        A run that was cleaned up and begun again has another.
        """
        return (self._instance or b"").hex()

    def get(self, key: str) -> Entry:
        check_key(key)
        return self._call(lambda line: self._get(line, key))

    def list(self, prefix: str) -> Mapping[str, Entry]:
        check_prefix(prefix)

        def read(line: "Connection[Any]") -> list[tuple[str, bytes, int, int]]:
            values = {"run": self._run, "prefix": prefix, "cut": _CUT}
            return line.execute(sql.LIST, values).fetchall()

        return {key: self._entry(key, row) for key, *row in self._call(read)}

    def put(self, key: str, value: bytes) -> None:
        values = self._values(check_key(key), check_value(key, value))
        self._call(lambda line: line.execute(sql.PUT, values))

    def swap(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        values = self._values(check_key(key), check_value(key, value), version=version + 1)
        statement = sql.UPDATE if version else sql.INSERT

        def write(line: "Connection[Any]") -> tuple[bool, Entry]:
            order = line.execute(statement, values).fetchone()
            if order is not None:
                return True, Entry(bytes(value), version + 1, order[0])
            there = self._get(line, key)
            return is_ours(there, value, version), there

        return self._call(write)

    def beat(self, key: str, value: bytes, *, watch: str, seen: int, hold_s: float) -> Beaten:
        values = self._values(check_key(key), check_value(key, value))
        values |= {"watch": check_key(watch), "seen": seen, "cut": _CUT}
        hold_end_s = time.monotonic() + hold_s
        beaten = self._look(sql.BEAT, values)
        while beaten.watched is None and (left_s := hold_end_s - time.monotonic()) > 0:
            # Not inside a call: others of this handle go first.
            self._sessions.wait(min(left_s, POLL_S))
            beaten = self._look(sql.LOOK, values)
        return beaten

    def delete(self, prefix: str) -> None:
        values = {"run": self._run, "prefix": check_prefix(prefix)}
        self._call(lambda line: line.execute(sql.DELETE, values))

    def close(self) -> None:
        self._sessions.close()

    def _look(self, statement: sql.Statement, values: Mapping[str, object]) -> Beaten:
        row = self._call(lambda line: line.execute(statement, values).fetchone())
        assert row is not None
        board_s, *found = row
        is_newer = found[0] is not None
        return Beaten(self._entry(str(values["watch"]), found) if is_newer else None, board_s)

    def _get(self, line: "Connection[Any]", key: str) -> Entry:
        row = line.execute(sql.GET, {"run": self._run, "key": key, "cut": _CUT}).fetchone()
        return NOTHING if row is None else self._entry(key, row)

    def _entry(self, key: str, row: Sequence[Any]) -> Entry:
        sealed, version, order = row
        try:
            return Entry(self._sealed.open(key, bytes(sealed), version), version, order)
        except SealError as exc:
            raise BoardError(f"the board's row {key!r} is not to be trusted: {exc}") from None

    def _values(self, key: str, value: bytes, version: int = 0) -> dict[str, object]:
        sealed = self._sealed.close(key, bytes(value), version)
        return {"run": self._run, "key": key, "value": sealed, "version": version}

    def _call(self, act: Callable[["Connection[Any]"], T]) -> T:
        return self._sessions.run(act, self._deadline_s)

    def _prepare(self, line: "Connection[Any]") -> None:
        line.execute(sql.SETTINGS, {"timeout": str(round(self._deadline_s * 1000))})
        if not _one(line.execute(sql.IS_THERE)):
            with line.transaction():
                line.execute(sql.LOCK)
                line.execute(sql.CREATE)
        if self._instance is None:
            self._begin(line)
        if self._instance != self._read_instance(line):
            raise BoardForgotError("the board in Postgres was cleaned up and forgot this run")

    def _begin(self, line: "Connection[Any]") -> None:
        """Find this run's rows, or begin them."""
        values = self._values("", nonce()[:INSTANCE_BYTES], version=1)
        if line.execute(sql.INSERT, values).fetchone() is not None:
            line.execute(sql.DELETE_OLD, {"days": KEEP_DAYS})
        self._instance = self._read_instance(line)

    def _read_instance(self, line: "Connection[Any]") -> bytes | None:
        row = line.execute(sql.GET, {"run": self._run, "key": "", "cut": _CUT}).fetchone()
        try:
            return None if row is None else self._sealed.open("", bytes(row[0]), row[1])
        except SealError as exc:
            raise BoardError(
                f"the board in Postgres has another token for this run: {exc}"
            ) from None


def _one(cursor: "Cursor[Any]") -> object:
    row = cursor.fetchone()
    return None if row is None else row[0]
