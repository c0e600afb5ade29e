"""The control store: a small key-value store with compare-and-set that every agent can reach.

Four implementations pass one contract suite: in memory (a run on one node, and simulations), a TCP
server in its own process, a Postgres table, and keys in etcd. Values are bytes of at most
`VALUE_BYTES_MAX`; keys are ASCII paths (``alive/3f2a``). All times are the store's, so agents need
no common clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gpuops.errors import GpuopsError

# An agent whose connection was closed, and that has no new one after this time, is dead: its host's
# kernel closes it when the process ends. The agent sees the same, and ends its workers before.
CLOSED_DEAD_S = 2.0
CLOSED_FENCE_S = 1.5
VALUE_BYTES_MAX = 4 * 2**20
KEY_CHARS_MAX = 200


class ControlStoreError(GpuopsError):
    """The store refuses, and would again: a wrong token, too large a value, an invalid answer."""


class OtherTokenError(ControlStoreError):
    """The store, or an agent that wrote into it, has another token than this agent."""


class ControlStoreUnreachableError(ControlStoreError):
    """No answer within the deadline; a retry may succeed."""


class ControlStoreResetError(ControlStoreError):
    """The store was restarted and has lost its entries.

    Every call of a handle that was opened before the restart raises it.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, its version (1 when first written, 0 where there is none) and its order.

    ``arrival`` numbers keys in the order in which they were first written to this store.
    """

    value: bytes
    version: int
    arrival: int = 0


NO_ENTRY = Entry(b"", 0)


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The reply to a heartbeat: the watched entry if it is newer, and the store's time."""

    watched: Entry | None
    store_s: float


class ControlStore(Protocol):
    """Every call returns within the implementation's deadline, or raises.

    Raises (all of them):
        ControlStoreUnreachableError: No answer in time.
        ControlStoreError: See there.
    """

    def get(self, key: str) -> Entry:
        """Return the entry of *key*, `NO_ENTRY` where there is none."""
        ...

    def list(self, prefix: str) -> Mapping[str, Entry]:
        """Return every entry whose key begins with *prefix*, in order of arrival."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Write *value* whatever the entry is."""
        ...

    def compare_and_set(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        """Write *value* if *key* still has *version* (0: is not there yet).

        Returns:
            Whether it was written, and the entry now. Where an answer was lost and the call was
            repeated, an entry that has *value* counts as written.
        """
        ...

    def heartbeat(
        self, key: str, value: bytes, *, watch: str, seen_version: int, hold_s: float
    ) -> HeartbeatReply:
        """Write the heartbeat *key*, then wait until *watch* has a version above *seen_version*.

        It returns at once where *watch* has one already, and after *hold_s* with None otherwise.
        """
        ...

    def delete(self, prefix: str) -> None:
        """Remove every entry whose key begins with *prefix*."""
        ...

    def disconnected_s(self) -> float:
        """Return for how long the connection of heartbeats was closed, 0 while it is open.

        An outage that is over counts until the next heartbeat. Silence is none: only a store that
        removes the heartbeats of closed connections (after `CLOSED_DEAD_S`) returns more than 0.
        """
        ...

    def close(self) -> None:
        """Close the connections. Other calls afterwards raise `ControlStoreUnreachableError`."""
        ...
