"""A control store in a Postgres table, so that any single node of a run may be lost.

The table `gpuops_board` is created where it is missing. Compare-and-set is an UPDATE of one row
where its version is still the one seen. A waiting heartbeat polls every `POLL_S`: LISTEN would take
a second connection of each agent, does not pass through a pooler, and is lost with the connection;
a poll is one read by primary key.

With a token every value is signed: what somebody else wrote into the table is refused, with the
name of its key. Who can write to the table can still remove rows: the agents then find nothing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpuops.control.memory import check_key, check_prefix, check_value, is_own_write
from gpuops.control.postgres import sql
from gpuops.control.postgres.session import PostgresSessions
from gpuops.control.signing import SignatureError, ValueSigner
from gpuops.control.store import (
    NO_ENTRY,
    VALUE_BYTES_MAX,
    ControlStoreError,
    ControlStoreResetError,
    Entry,
    HeartbeatReply,
    OtherTokenError,
)
from gpuops.host.net.job_proof import PROOF_BYTES, nonce

if TYPE_CHECKING:
    from psycopg import Connection, Cursor

DEADLINE_S = 5.0
POLL_S = 0.25
RUN_KEY_CHARS_MAX = 255
# A run that lives writes every second.
KEEP_DAYS = 7

INSTANCE_BYTES = 16
# A row that is longer than any of ours is not read whole.
_VALUE_READ_BYTES_MAX = VALUE_BYTES_MAX + PROOF_BYTES + 2
T = TypeVar("T")


class PostgresControlStore:
    """A `ControlStore` in the database at *url*; safe from several threads.

    Its time is the database's clock, in seconds since the epoch. Every call ends within
    *deadline_s* (a heartbeat: and its hold). Where it raises `ControlStoreUnreachableError`, what
    it asked for may still have been done.

    Raises:
        ControlStoreError: The driver is not installed, or *url* or *run_key* is malformed.
    """

    def __init__(
        self, url: str, *, run_key: str, token: str = "", deadline_s: float = DEADLINE_S
    ) -> None:
        if not 0 < len(run_key) <= RUN_KEY_CHARS_MAX or "\0" in run_key:
            raise ControlStoreError(
                f"a run's key has 1 to {RUN_KEY_CHARS_MAX} characters, none of them 0"
            )
        self._run = run_key
        self._deadline_s = deadline_s
        self._signer = ValueSigner(run_key, token)
        self._instance: bytes | None = None
        self._sessions = PostgresSessions(url, self._prepare, connect_timeout_s=deadline_s)

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

        def read(connection: "Connection[Any]") -> list[tuple[str, bytes, int, int]]:
            values = {"run": self._run, "prefix": prefix, "cut": _VALUE_READ_BYTES_MAX}
            return connection.execute(sql.LIST, values).fetchall()

        return {key: self._entry(key, row) for key, *row in self._call(read)}

    def put(self, key: str, value: bytes) -> None:
        check_value(check_key(key), value)
        self._call(lambda line: line.execute(sql.PUT, self._values(key, value)))

    def compare_and_set(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        check_value(check_key(key), value)
        statement = sql.UPDATE if version else sql.INSERT

        def write(connection: "Connection[Any]") -> tuple[bool, Entry]:
            values = self._values(key, value, version=version + 1)
            arrival_row = connection.execute(statement, values).fetchone()
            if arrival_row is not None:
                return True, Entry(bytes(value), version + 1, arrival_row[0])
            current = self._get(connection, key)
            return is_own_write(current, value, version), current

        return self._call(write)

    def heartbeat(
        self, key: str, value: bytes, *, watch: str, seen_version: int, hold_s: float
    ) -> HeartbeatReply:
        check_value(check_key(key), value)
        check_key(watch)
        awaited = {"watch": watch, "seen": seen_version, "cut": _VALUE_READ_BYTES_MAX}

        def values() -> dict[str, object]:
            return self._values(key, value) | awaited

        hold_end_s = time.monotonic() + hold_s
        reply = self._execute_heartbeat(sql.HEARTBEAT, watch, values)
        while reply.watched is None and (left_s := hold_end_s - time.monotonic()) > 0:
            # Not inside a call: others of this handle go first.
            self._sessions.wait(min(left_s, POLL_S))
            reply = self._execute_heartbeat(sql.READ_WATCHED, watch, values)
        return reply

    def delete(self, prefix: str) -> None:
        values = {"run": self._run, "prefix": check_prefix(prefix)}
        self._call(lambda line: line.execute(sql.DELETE, values))

    def disconnected_s(self) -> float:
        return 0.0  # a pooler hides who is connected: silence alone tells

    def close(self) -> None:
        self._sessions.close()

    def _execute_heartbeat(
        self, statement: sql.Statement, watch: str, values: Callable[[], Mapping[str, object]]
    ) -> HeartbeatReply:
        row = self._call(lambda line: line.execute(statement, values()).fetchone())
        assert row is not None
        store_s, *entry_row = row
        is_newer = entry_row[0] is not None
        return HeartbeatReply(self._entry(watch, entry_row) if is_newer else None, store_s)

    def _get(self, connection: "Connection[Any]", key: str) -> Entry:
        row = connection.execute(
            sql.GET, {"run": self._run, "key": key, "cut": _VALUE_READ_BYTES_MAX}
        ).fetchone()
        return NO_ENTRY if row is None else self._entry(key, row)

    def _entry(self, key: str, row: Sequence[Any]) -> Entry:
        signed, version, arrival = row
        try:
            return Entry(self._signer.verify_value(key, bytes(signed), version), version, arrival)
        except SignatureError as exc:
            raise ControlStoreError(
                f"the control store's row {key!r} is not to be trusted: {exc}"
            ) from None

    def _values(self, key: str, value: bytes, version: int = 0) -> dict[str, object]:
        """Return what to write; on a connection, so that the instance is known."""
        signed = self._signer.sign_value(key, bytes(value), version)
        return {"run": self._run, "key": key, "value": signed, "version": version}

    def _call(self, operation: Callable[["Connection[Any]"], T]) -> T:
        return self._sessions.run(operation, self._deadline_s)

    def _prepare(self, connection: "Connection[Any]") -> None:
        connection.execute(sql.SETTINGS, {"timeout": str(round(self._deadline_s * 1000))})
        if not _first_value(connection.execute(sql.TABLE_EXISTS)):
            with connection.transaction():
                connection.execute(sql.LOCK)
                connection.execute(sql.CREATE)
        if self._instance is None:
            self._begin(connection)
        if self._instance != self._read_instance(connection):
            raise ControlStoreResetError(
                "the control store in Postgres was cleaned up and forgot this run"
            )

    def _begin(self, connection: "Connection[Any]") -> None:
        """Find this run's rows, or begin them."""
        values = self._values("", nonce()[:INSTANCE_BYTES], version=1)
        if connection.execute(sql.INSERT, values).fetchone() is not None:
            connection.execute(sql.DELETE_OLD, {"days": KEEP_DAYS})
        found = self._read_instance(connection)
        self._signer.instance = found or b""
        self._instance = found

    def _read_instance(self, connection: "Connection[Any]") -> bytes | None:
        row = connection.execute(
            sql.GET, {"run": self._run, "key": "", "cut": _VALUE_READ_BYTES_MAX}
        ).fetchone()
        try:
            return None if row is None else self._signer.verify_value("", bytes(row[0]), row[1])
        except SignatureError as exc:
            raise OtherTokenError(
                f"the control store in Postgres has another token for this run: {exc}"
            ) from None


def _first_value(cursor: "Cursor[Any]") -> object:
    row = cursor.fetchone()
    return None if row is None else row[0]
