"""The control store of a quorum: keys in its etcd, and which agents are connected to its members.

etcd does not say that a client has closed its connection. So each member also serves as in
`gpuops.control.tcp`: an agent keeps a heartbeat on every one of them, and the kernel of a killed
agent, or of a host whose processes end, closes these connections. An agent that a majority of the
members has seen go, `CLOSED_DEAD_S` ago, has no heartbeat any more. The agent sees the same closed
connections and ends its workers before (`EtcdControlStore.disconnected_s`). It writes no heartbeat
to etcd before it is connected to a majority, and two majorities share a member.

Silence is no sign: a frozen host and one that is cut off close nothing.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.store import (
    CLOSED_DEAD_S,
    NO_ENTRY,
    ControlStoreError,
    ControlStoreUnreachableError,
    Entry,
    HeartbeatReply,
)
from gpuops.control.tcp.server import RUN_OVER_KEY
from gpuops.control.tcp.store import TcpControlStore

# What is watched so that the server holds a heartbeat; nobody writes it.
WATCH_KEY = "presence"
HOLD_S = 1.0
# Of an agent that leads or may soon: it also reads who is there.
READ_HOLD_S = 0.25
READ_FOR_S = 5.0
FRESH_S = 2.0
RETRY_S = 0.25
CALL_TIMEOUT_S = 2.0


class MemberPresence:
    """This agent's heartbeat on one member, and which agents the member has seen go."""

    def __init__(self, store: TcpControlStore) -> None:
        self._store = store
        self._outage = (0.0, 0.0)  # seconds, and when it was seen
        self._present: frozenset[str] = frozenset()
        self._gone: frozenset[str] = frozenset()
        self._read_s = float("-inf")
        self.is_connected = False

    def announce(self, key: str, *, reads: bool) -> None:
        """Renew the heartbeat *key*; with *reads*, look who else has one.

        Raises:
            ControlStoreError: The member does not answer.
        """
        self._note_outage()
        hold_s = READ_HOLD_S if reads else HOLD_S
        self._store.heartbeat(key, b"", watch=WATCH_KEY, seen_version=0, hold_s=hold_s)
        self.is_connected = True
        if reads:
            present = frozenset(self._store.list(key.rpartition("/")[0] + "/"))
            self._gone = (self._gone | self._present) - present
            self._present, self._read_s = present, time.monotonic()

    def has_seen_go(self, key: str) -> bool:
        """Say whether the member had the heartbeat *key* and has it no more."""
        return key in self._gone and time.monotonic() - self._read_s <= FRESH_S

    def disconnected_s(self) -> float:
        """Return for how long the member's side was closed lately, or is."""
        self._note_outage()
        seconds, seen_s = self._outage
        return seconds if time.monotonic() - seen_s <= CLOSED_DEAD_S else 0.0

    def end_server(self) -> None:
        """Have the member's server end: the run is over."""
        with suppress(ControlStoreError):
            self._store.put(RUN_OVER_KEY, b"1")

    def close(self) -> None:
        """Close the connection, which the member takes for this agent's end."""
        self._store.close()

    def _note_outage(self) -> None:
        """Keep what the next heartbeat lets the store forget."""
        seconds = self._store.disconnected_s()
        if seconds:
            self._outage = (seconds, time.monotonic())


class QuorumControlStore(EtcdControlStore):
    """A `ControlStore` in the etcd at *url*, whose members serve presence at *servers*."""

    def __init__(
        self,
        url: str,
        *,
        servers: Sequence[tuple[str, int]],
        run_key: str,
        token: str,
        deadline_s: float,
    ) -> None:
        super().__init__(url, run_key=run_key, token=token, deadline_s=deadline_s)
        self._presence_timeout_s = deadline_s
        self._members = [
            MemberPresence(
                TcpControlStore(host, port, run_key=run_key, token=token, deadline_s=CALL_TIMEOUT_S)
            )
            for host, port in servers
        ]
        self._majority = len(servers) // 2 + 1
        self._key = ""
        self._wanted_s = float("-inf")
        self._ended = threading.Event()
        self._connected = threading.Condition()

    def get(self, key: str) -> Entry:
        return NO_ENTRY if self._is_gone(key) else super().get(key)

    def list(self, prefix: str) -> Mapping[str, Entry]:
        if self._key.startswith(prefix):
            self._wanted_s = time.monotonic()
        found = super().list(prefix)
        return {key: entry for key, entry in found.items() if not self._is_gone(key)}

    def heartbeat(
        self, key: str, value: bytes, *, watch: str, seen_version: int, hold_s: float
    ) -> HeartbeatReply:
        self._connect(key)
        return super().heartbeat(key, value, watch=watch, seen_version=seen_version, hold_s=hold_s)

    def disconnected_s(self) -> float:
        closed_s = sorted((member.disconnected_s() for member in self._members), reverse=True)
        return closed_s[self._majority - 1]

    def end_servers(self) -> None:
        """Have the members' servers end: the run is over."""
        for member in self._members:
            member.end_server()

    def close(self) -> None:
        self._ended.set()
        with self._connected:
            self._connected.notify_all()
        for member in self._members:
            member.close()
        super().close()

    def _is_gone(self, key: str) -> bool:
        n_gone = sum(member.has_seen_go(key) for member in self._members)
        return n_gone >= self._majority

    def _connect(self, key: str) -> None:
        """Be present on a majority of the members before etcd shows this agent alive.

        Raises:
            ControlStoreUnreachableError: They do not answer.
        """
        with self._connected:
            if not self._key:
                self._key = key
                for member in self._members:
                    threading.Thread(
                        target=self._announce, args=(member,), name="gpuops-presence", daemon=True
                    ).start()
            if not self._connected.wait_for(self._is_connected, self._presence_timeout_s):
                raise ControlStoreUnreachableError(
                    f"a majority of the members at {self.address} does not answer"
                )

    def _is_connected(self) -> bool:
        n_connected = sum(member.is_connected for member in self._members)
        return n_connected >= self._majority or self._ended.is_set()

    def _announce(self, member: MemberPresence) -> None:
        while not self._ended.is_set():
            reads = time.monotonic() - self._wanted_s <= READ_FOR_S
            try:
                member.announce(self._key, reads=reads)
            except ControlStoreError:
                self._ended.wait(RETRY_S)
                continue
            with self._connected:
                self._connected.notify_all()
