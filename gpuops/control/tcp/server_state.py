"""State shared by the connections of one server: the map, who waits for what, how many."""

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from gpuops.control import signing
from gpuops.control.kv_map import KvMap
from gpuops.control.store import Entry
from gpuops.control.tcp import wire

HANDSHAKE_TIMEOUT_S = 5.0  # to prove the job's token
CONNECTIONS_MAX = 16_384  # two for each of 8,192 agents
# Of one address, without proof: enough for the agents of one machine that all start now.
UNAUTHENTICATED_PER_ADDRESS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one server takes."""

    connections_max: int = CONNECTIONS_MAX
    unauthenticated_per_address_max: int = UNAUTHENTICATED_PER_ADDRESS_MAX
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S


@dataclass(slots=True)
class ServerCounters:
    """What the server did so far; for the benchmark and the log."""

    n_requests: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    n_rejected: int = 0


class HeartbeatWaiter(Protocol):
    """What the others see of one connection."""

    def wake(self, entry: Entry, packed: bytes) -> None:
        """Answer the heartbeat that is held, if *entry* (*packed*: its bytes) is awaited."""
        ...

    def abort(self) -> None:
        """Close the connection; nothing more of it is read."""
        ...


@dataclass(slots=True)
class ServerState:
    """What all connections of one server share."""

    run_key: str
    token: str = field(repr=False)
    limits: ServerLimits = field(default_factory=ServerLimits)
    kv_map: KvMap = field(default_factory=KvMap)
    counters: ServerCounters = field(default_factory=ServerCounters)
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(wire.ID_BYTES))
    key: bytes = field(init=False, repr=False)
    run: bytes = field(init=False)
    started_s: float = field(init=False, default_factory=time.monotonic)
    last_request_s: float = field(init=False, default_factory=time.monotonic)
    connections: int = field(init=False, default=0)
    unauthenticated: Counter[str] = field(init=False, default_factory=Counter)
    clients: dict[tuple[bytes, int], HeartbeatWaiter] = field(init=False, default_factory=dict)
    waiting: dict[str, set[HeartbeatWaiter]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.key = signing.token_key(self.token)
        self.run = signing.run_digest(self.run_key)

    @property
    def store_s(self) -> float:
        """Return the control store's time: seconds since this server began."""
        return time.monotonic() - self.started_s

    def notify(self, key: str) -> None:
        """Answer those who wait for *key*."""
        connections = self.waiting.pop(key, None)
        if not connections:
            return
        entry = self.kv_map.get(key)
        packed = wire.pack_entry(entry)
        for connection in tuple(connections):
            connection.wake(entry, packed)
