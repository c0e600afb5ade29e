"""The contents of a control store in memory: versions, order and size, without threads or network.

Not safe between threads: whoever owns it takes turns.
"""

import re
from collections.abc import Iterator

from gpuops.control.store import (
    KEY_CHARS_MAX,
    NO_ENTRY,
    VALUE_BYTES_MAX,
    ControlStoreError,
    Entry,
)

# 4,096 agents leave some 16,000 keys (who they are, heartbeat, seat, report) in a generation.
KEYS_MAX = 400_000
TOTAL_BYTES_MAX = 256 * 2**20
# What an entry costs beside its value: the objects, two dictionaries' places, a long key.
ENTRY_OVERHEAD_BYTES = 500
_KEY_PATTERN = re.compile(rf"[!-~]{{1,{KEY_CHARS_MAX}}}")


def check_key(key: str) -> str:
    """Return *key*.

    Raises:
        ControlStoreError: Empty, too long, or not printable ASCII without spaces.
    """
    if not _KEY_PATTERN.fullmatch(key):
        raise ControlStoreError(
            f"{key[:40]!r} is no key: 1 to {KEY_CHARS_MAX} characters of ASCII without spaces"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return *prefix*, which may be empty.

    Raises:
        ControlStoreError: No key can begin with it.
    """
    return prefix and check_key(prefix)


def check_value(key: str, value: bytes) -> bytes:
    """Return *value*.

    Raises:
        ControlStoreError: Longer than `VALUE_BYTES_MAX`.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise ControlStoreError(
            f"the value of {key} has {len(value)} bytes; a board takes {VALUE_BYTES_MAX}"
        )
    return value


def is_own_write(current: Entry, value: bytes, version: int) -> bool:
    """Say whether *current* is what a swap of *version* for *value* would have left behind.

    It is then taken for the first try of a call whose answer was lost.
    """
    return current.version == version + 1 and current.value == value


class KvMap:
    """Entries by key, with the total of their bytes bounded.

    Keys lie in drawers by what stands before their last slash, so that listing one kind of thing
    does not read the others.
    """

    def __init__(self, *, bytes_max: int = TOTAL_BYTES_MAX, keys_max: int = KEYS_MAX) -> None:
        self._by_folder: dict[str, dict[str, Entry]] = {}
        self._bytes_max = bytes_max
        self._keys_max = keys_max
        self._last_order = 0
        self.n_keys = 0
        self.size_bytes = 0

    def get(self, key: str) -> Entry:
        """Return the entry of *key*, `NOTHING` where there is none."""
        entries = self._by_folder.get(key.rpartition("/")[0])
        return NO_ENTRY if entries is None else entries.get(key, NO_ENTRY)

    def list(self, prefix: str, after: int = 0) -> "list[tuple[str, Entry]]":
        """Return what begins with *prefix* and came after the order *after*, in that order."""
        found = [
            (key, entry)
            for _, entries in self._folders_under(prefix)
            for key, entry in entries.items()
            if entry.arrival > after and key.startswith(prefix)
        ]
        found.sort(key=lambda item: item[1].arrival)
        return found

    def put(self, key: str, value: bytes) -> Entry:
        """Write *value* whatever is there; return what is there now.

        Raises:
            ControlStoreError: Not a key, too large, or the shelf is full.
        """
        folder = check_key(key).rpartition("/")[0]
        check_value(key, value)
        previous = self.get(key)
        is_new = previous.version == 0
        added_bytes = len(value) - len(previous.value) + (ENTRY_OVERHEAD_BYTES if is_new else 0)
        self._check_capacity(added_bytes, is_new=is_new)
        self._last_order += is_new
        order = self._last_order if is_new else previous.arrival
        entry = Entry(value, previous.version + 1, order)
        self._by_folder.setdefault(folder, {})[key] = entry
        self.n_keys += is_new
        self.size_bytes += added_bytes
        return entry

    def compare_and_set(self, key: str, value: bytes, version: int) -> tuple[bool, Entry]:
        """Write *value* if *key* has *version*; see `ControlStore.compare_and_set`.

        Raises:
            ControlStoreError: See `put`.
        """
        current = self.get(check_key(key))
        if current.version == version:
            return True, self.put(key, value)
        return is_own_write(current, value, version), current

    def delete(self, prefix: str) -> tuple[str, ...]:
        """Remove what begins with *prefix*; return the keys."""
        deleted = []
        for folder, entries in list(self._folders_under(prefix)):
            keys = [key for key in entries if key.startswith(prefix)]
            for key in keys:
                self.size_bytes -= len(entries.pop(key).value) + ENTRY_OVERHEAD_BYTES
            if not entries:
                del self._by_folder[folder]
            deleted += keys
        self.n_keys -= len(deleted)
        return tuple(deleted)

    def _folders_under(self, prefix: str) -> Iterator[tuple[str, dict[str, Entry]]]:
        for folder, entries in self._by_folder.items():
            if folder.startswith(prefix) or prefix.startswith(f"{folder}/" if folder else ""):
                yield folder, entries

    def _check_capacity(self, added_bytes: int, *, is_new: bool) -> None:
        if is_new and self.n_keys >= self._keys_max:
            raise ControlStoreError(f"the board is full: it has {self.n_keys} keys")
        if added_bytes > 0 and self.size_bytes + added_bytes > self._bytes_max:
            raise ControlStoreError(
                f"the board is full: {added_bytes} more bytes after {self.size_bytes}"
            )
