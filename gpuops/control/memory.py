"""The control store of a run on one node: in this process, without a port.

Several handles share one state, each for an agent of its own in simulations.
"""

import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self
from uuid import uuid4

from gpuops.control.store import (
    KEY_CHARS_MAX,
    NO_ENTRY,
    VALUE_BYTES_MAX,
    ControlStoreError,
    ControlStoreUnreachableError,
    Entry,
    HeartbeatReply,
)
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S

# 4,096 agents leave some 16,000 keys (member, heartbeat, place, report) in a generation.
KEYS_MAX = 400_000
TOTAL_BYTES_MAX = 256 * 2**20
# What an entry costs besides its value: the objects, two dictionaries' places, a long key.
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
            f"the value of {key} has {len(value)} bytes; a control store takes {VALUE_BYTES_MAX}"
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
            raise ControlStoreError(f"the control store is full: it has {self.n_keys} keys")
        if added_bytes > 0 and self.size_bytes + added_bytes > self._bytes_max:
            raise ControlStoreError(
                f"the control store is full: {added_bytes} more bytes after {self.size_bytes}"
            )


class _SharedState:
    def __init__(self, clock: Clock, kv_map: KvMap) -> None:
        self.clock = clock
        self.kv_map = kv_map
        self.lock = threading.Lock()
        self.started_ns = clock.mono_ns()
        self.instance = uuid4().hex
        # By watched key: a heartbeat wakes nobody who waits for the record.
        self.changed: dict[str, threading.Condition] = defaultdict(self._condition)

    def _condition(self) -> threading.Condition:
        return threading.Condition(self.lock)


class MemoryControlStore:
    """A `ControlStore` in this process; `heartbeat` waits in real time, *clock* is the store's.

    Thread-safe. ``another()`` returns a handle on the same state.
    """

    def __init__(
        self, clock: Clock, kv_map: KvMap | None = None, *, shared: _SharedState | None = None
    ) -> None:
        self._shared = shared or _SharedState(clock, kv_map or KvMap())
        self._closed = threading.Event()

    @property
    def instance(self) -> str:
        """Return the name of this state; one that is made anew has another."""
        return self._shared.instance

    def new_handle(self) -> Self:
        """Return a handle on the same state, to be closed on its own."""
        return type(self)(self._shared.clock, shared=self._shared)

    def get(self, key: str) -> Entry:
        with self._locked_map() as kv_map:
            return kv_map.get(check_key(key))

    def list(self, prefix: str) -> Mapping[str, Entry]:
        with self._locked_map() as kv_map:
            return dict(kv_map.list(check_prefix(prefix)))

    def put(self, key: str, value: bytes) -> None:
        with self._locked_map() as kv_map:
            kv_map.put(key, bytes(value))
            self._notify(key)

    def compare_and_set(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        with self._locked_map() as kv_map:
            written, entry = kv_map.compare_and_set(key, bytes(value), version)
            self._notify(key)
            return written, entry

    def heartbeat(
        self, key: str, value: bytes, *, watch: str, seen_version: int, hold_s: float
    ) -> HeartbeatReply:
        check_key(watch)
        with self._locked_map() as kv_map:
            kv_map.put(key, bytes(value))
            self._notify(key)

            def is_over() -> bool:
                return self._closed.is_set() or kv_map.get(watch).version > seen_version

            if hold_s > 0 and not is_over():
                self._shared.changed[watch].wait_for(is_over, hold_s)
            self._check_open()
            entry = kv_map.get(watch)
            return HeartbeatReply(entry if entry.version > seen_version else None, self._store_s())

    def delete(self, prefix: str) -> None:
        with self._locked_map() as kv_map:
            kv_map.delete(check_prefix(prefix))

    def disconnected_s(self) -> float:
        return 0.0

    def close(self) -> None:
        with self._shared.lock:
            self._closed.set()
            for condition in self._shared.changed.values():
                condition.notify_all()

    @contextmanager
    def _locked_map(self) -> Iterator[KvMap]:
        with self._shared.lock:
            self._check_open()
            yield self._shared.kv_map

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ControlStoreUnreachableError("this handle of the control store is closed")

    def _notify(self, key: str) -> None:
        if key in self._shared.changed:
            self._shared.changed[key].notify_all()

    def _store_s(self) -> float:
        return (self._shared.clock.mono_ns() - self._shared.started_ns) / NS_PER_S
