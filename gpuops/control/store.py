"""The board: a small store that every agent of a run can reach, with compare-and-swap.

Implementations pass one contract suite: in memory (a run on one node, and simulations), a TCP
server in a process of its own, a table in Postgres. Values are bytes of at most `VALUE_BYTES_MAX`;
keys are ASCII paths (``alive/3f2a``). All times are the board's own, so agents need no common
clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gpuops.errors import GpuopsError

VALUE_BYTES_MAX = 4 * 2**20
KEY_CHARS_MAX = 200


class ControlStoreError(GpuopsError):
    """The board refuses, and would again: a wrong token, too large a value, a strange answer."""


class ControlStoreUnreachableError(ControlStoreError):
    """No answer within the deadline; it may be there again in a moment."""


class ControlStoreResetError(ControlStoreError):
    """The board was started anew and knows nothing of before; a handle opened now would be of it.

    Raised by every call of a handle that had met the one before.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, the version it has (1 when first written, 0 where there is none), its order.

    ``arrival`` is the place of the key's first writing among all first writings on this board: the
    order of arrival.
    """

    value: bytes
    version: int
    arrival: int = 0


NO_ENTRY = Entry(b"", 0)


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """What a heartbeat brings back: the watched entry if it is newer, and the board's time."""

    watched: Entry | None
    store_s: float


class ControlStore(Protocol):
    """Every call returns within the implementation's deadline, or raises.

    Raises (all of them):
        ControlStoreUnreachableError: No answer in time.
        ControlStoreError: See there.
    """

    def get(self, key: str) -> Entry:
        """Return the entry of *key*, `NOTHING` where there is none."""
        ...

    def list(self, prefix: str) -> Mapping[str, Entry]:
        """Return every entry whose key begins with *prefix*, in order of arrival."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Write *value* whatever is there."""
        ...

    def compare_and_set(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        """Write *value* if *key* still has *version* (0: is not there yet).

        Returns:
            Whether it was written, and what is there now. Where the answer was lost and the call
            repeated, an entry with *value* itself counts as written.
        """
        ...

    def heartbeat(
        self, key: str, value: bytes, *, watch: str, seen_version: int, hold_s: float
    ) -> HeartbeatReply:
        """Write the heartbeat *key*, then wait until *watch* has a version above *seen_version*.

        It answers at once where it has one already, and after *hold_s* with None otherwise.
        """
        ...

    def delete(self, prefix: str) -> None:
        """Remove every entry whose key begins with *prefix*."""
        ...

    def close(self) -> None:
        """Let go of connections. Other calls afterwards raise `ControlStoreUnreachableError`."""
        ...
