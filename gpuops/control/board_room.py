"""What all connections of one board's server share: the shelf, who waits for what, how many."""

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from gpuops.control import board_wire as wire
from gpuops.control import seal
from gpuops.control.board import Entry
from gpuops.control.shelf import Shelf

STRANGER_S = 5.0  # to prove the job's token
CONNECTIONS_MAX = 16_384  # two for each of 8,192 agents
# Of one address, without proof: enough for the agents of one machine that all start now.
STRANGERS_PER_ADDRESS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server takes."""

    connections_max: int = CONNECTIONS_MAX
    strangers_per_address_max: int = STRANGERS_PER_ADDRESS_MAX
    stranger_s: float = STRANGER_S


@dataclass(slots=True)
class Figures:
    """What the server did so far; for the benchmark and the log."""

    requests: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    turned_away: int = 0


class Line(Protocol):
    """What the others see of one connection."""

    def wake(self, entry: Entry, packed: bytes) -> None:
        """Answer the heartbeat that is held, if *entry* (*packed*: its bytes) is awaited."""
        ...

    def cut(self) -> None:
        """Close the connection; nothing more of it is read."""
        ...


@dataclass(slots=True)
class Room:
    """What all connections of one server share."""

    run_key: str
    token: str = field(repr=False)
    limits: Limits = field(default_factory=Limits)
    shelf: Shelf = field(default_factory=Shelf)
    figures: Figures = field(default_factory=Figures)
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(wire.ID_BYTES))
    key: bytes = field(init=False, repr=False)
    run: bytes = field(init=False)
    started_s: float = field(init=False, default_factory=time.monotonic)
    heard_s: float = field(init=False, default_factory=time.monotonic)
    connections: int = field(init=False, default=0)
    strangers: Counter[str] = field(init=False, default_factory=Counter)
    clients: dict[tuple[bytes, int], Line] = field(init=False, default_factory=dict)
    waiting: dict[str, set[Line]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.key = seal.token_key(self.token)
        self.run = seal.run_digest(self.run_key)

    @property
    def board_s(self) -> float:
        """Return the board's time: seconds since this server began."""
        return time.monotonic() - self.started_s

    def tell(self, key: str) -> None:
        """Answer those who wait for *key*."""
        peers = self.waiting.pop(key, None)
        if not peers:
            return
        entry = self.shelf.get(key)
        packed = wire.entry_bytes(entry)
        for peer in tuple(peers):
            peer.wake(entry, packed)
