"""What a board in memory holds: the rules of versions, order and size, without threads or network.

Not safe between threads: whoever owns it takes turns.
"""

import re
from collections.abc import Iterator

from gpuops.control.board import (
    KEY_CHARS_MAX,
    NOTHING,
    VALUE_BYTES_MAX,
    BoardError,
    Entry,
)

# 4,096 agents leave some 16,000 keys (who they are, heartbeat, seat, report) in a generation.
KEYS_MAX = 400_000
BYTES_MAX = 256 * 2**20
# What an entry costs beside its value: the objects, two dictionaries' places, a long key.
ENTRY_BYTES = 500
_PATH = re.compile(rf"[!-~]{{1,{KEY_CHARS_MAX}}}")


def check_key(key: str) -> str:
    """Return *key*.

    Raises:
        BoardError: Empty, too long, or not printable ASCII without spaces.
    """
    if not _PATH.fullmatch(key):
        raise BoardError(
            f"{key[:40]!r} is no key: 1 to {KEY_CHARS_MAX} characters of ASCII without spaces"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return *prefix*, which may be empty.

    Raises:
        BoardError: No key can begin with it.
    """
    return prefix and check_key(prefix)


def check_value(key: str, value: bytes) -> bytes:
    """Return *value*.

    Raises:
        BoardError: Longer than `VALUE_BYTES_MAX`.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise BoardError(
            f"the value of {key} has {len(value)} bytes; a board takes {VALUE_BYTES_MAX}"
        )
    return value


def is_ours(there: Entry, value: bytes, version: int) -> bool:
    """Say whether *there* is what a swap of *version* for *value* would have left behind.

    It is then taken for the first try of a call whose answer was lost.
    """
    return there.version == version + 1 and there.value == value


class Shelf:
    """Entries by key, with the total of their bytes bounded.

    Keys lie in drawers by what stands before their last slash, so that listing one kind of thing
    does not read the others.
    """

    def __init__(self, *, bytes_max: int = BYTES_MAX, keys_max: int = KEYS_MAX) -> None:
        self._drawers: dict[str, dict[str, Entry]] = {}
        self._bytes_max = bytes_max
        self._keys_max = keys_max
        self._last_order = 0
        self.keys = 0
        self.bytes = 0

    def get(self, key: str) -> Entry:
        """Return the entry of *key*, `NOTHING` where there is none."""
        drawer = self._drawers.get(key.rpartition("/")[0])
        return NOTHING if drawer is None else drawer.get(key, NOTHING)

    def list(self, prefix: str, after: int = 0) -> "list[tuple[str, Entry]]":
        """Return what begins with *prefix* and came after the order *after*, in that order."""
        found = [
            (key, entry)
            for _, drawer in self._drawers_of(prefix)
            for key, entry in drawer.items()
            if entry.order > after and key.startswith(prefix)
        ]
        found.sort(key=lambda item: item[1].order)
        return found

    def put(self, key: str, value: bytes) -> Entry:
        """Write *value* whatever is there; return what is there now.

        Raises:
            BoardError: Not a key, too large, or the shelf is full.
        """
        folder = check_key(key).rpartition("/")[0]
        check_value(key, value)
        before = self.get(key)
        is_new = before.version == 0
        more = len(value) - len(before.value) + (ENTRY_BYTES if is_new else 0)
        self._check_room(more, is_new=is_new)
        self._last_order += is_new
        order = self._last_order if is_new else before.order
        entry = Entry(value, before.version + 1, order)
        self._drawers.setdefault(folder, {})[key] = entry
        self.keys += is_new
        self.bytes += more
        return entry

    def swap(self, key: str, value: bytes, version: int) -> tuple[bool, Entry]:
        """Write *value* if *key* has *version*; see `Board.swap`.

        Raises:
            BoardError: See `put`.
        """
        there = self.get(check_key(key))
        if there.version == version:
            return True, self.put(key, value)
        return is_ours(there, value, version), there

    def delete(self, prefix: str) -> tuple[str, ...]:
        """Remove what begins with *prefix*; return the keys."""
        gone = []
        for folder, drawer in list(self._drawers_of(prefix)):
            keys = [key for key in drawer if key.startswith(prefix)]
            for key in keys:
                self.bytes -= len(drawer.pop(key).value) + ENTRY_BYTES
            if not drawer:
                del self._drawers[folder]
            gone += keys
        self.keys -= len(gone)
        return tuple(gone)

    def _drawers_of(self, prefix: str) -> Iterator[tuple[str, dict[str, Entry]]]:
        for folder, drawer in self._drawers.items():
            if folder.startswith(prefix) or prefix.startswith(f"{folder}/" if folder else ""):
                yield folder, drawer

    def _check_room(self, more: int, *, is_new: bool) -> None:
        if is_new and self.keys >= self._keys_max:
            raise BoardError(f"the board is full: it has {self.keys} keys")
        if more > 0 and self.bytes + more > self._bytes_max:
            raise BoardError(f"the board is full: {more} more bytes after {self.bytes}")
