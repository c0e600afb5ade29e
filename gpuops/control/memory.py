"""The control store of a run on one node: in this process, without a port.

Several handles share one state, each for an agent of its own in simulations.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self
from uuid import uuid4

from gpuops.control.kv_map import KvMap, check_key, check_prefix
from gpuops.control.store import ControlStoreUnreachableError, Entry, HeartbeatReply
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S


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
            raise ControlStoreUnreachableError("this handle of the board is closed")

    def _notify(self, key: str) -> None:
        if key in self._shared.changed:
            self._shared.changed[key].notify_all()

    def _store_s(self) -> float:
        return (self._shared.clock.mono_ns() - self._shared.started_ns) / NS_PER_S
