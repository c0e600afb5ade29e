"""The board of a run on one node: in this process, without a port.

Several handles share one state, each for an agent of its own in simulations.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self
from uuid import uuid4

from gpuops.control.board import Beaten, BoardUnreachableError, Entry
from gpuops.control.shelf import Shelf, check_key, check_prefix
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S


class _Shared:
    def __init__(self, clock: Clock, shelf: Shelf) -> None:
        self.clock = clock
        self.shelf = shelf
        self.lock = threading.Lock()
        self.started_ns = clock.mono_ns()
        self.instance = uuid4().hex
        # By watched key: a heartbeat wakes nobody who waits for the record.
        self.changed: dict[str, threading.Condition] = defaultdict(self._condition)

    def _condition(self) -> threading.Condition:
        return threading.Condition(self.lock)


class MemoryBoard:
    """A `Board` in this process; `beat` waits in real time, and *clock* tells the board's time.

    Thread-safe. ``another()`` returns a handle on the same state.
    """

    def __init__(
        self, clock: Clock, shelf: Shelf | None = None, *, shared: _Shared | None = None
    ) -> None:
        self._shared = shared or _Shared(clock, shelf or Shelf())
        self._closed = threading.Event()

    @property
    def instance(self) -> str:
        """Return the name of this state; one that is made anew has another."""
        return self._shared.instance

    def another(self) -> Self:
        """Return a handle on the same state, to be closed on its own."""
        return type(self)(self._shared.clock, shared=self._shared)

    def get(self, key: str) -> Entry:
        with self._open() as shelf:
            return shelf.get(check_key(key))

    def list(self, prefix: str) -> Mapping[str, Entry]:
        with self._open() as shelf:
            return dict(shelf.list(check_prefix(prefix)))

    def put(self, key: str, value: bytes) -> None:
        with self._open() as shelf:
            shelf.put(key, bytes(value))
            self._tell(key)

    def swap(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        with self._open() as shelf:
            written, entry = shelf.swap(key, bytes(value), version)
            self._tell(key)
            return written, entry

    def beat(self, key: str, value: bytes, *, watch: str, seen: int, hold_s: float) -> Beaten:
        check_key(watch)
        with self._open() as shelf:
            shelf.put(key, bytes(value))
            self._tell(key)

            def is_over() -> bool:
                return self._closed.is_set() or shelf.get(watch).version > seen

            if hold_s > 0 and not is_over():
                self._shared.changed[watch].wait_for(is_over, hold_s)
            self._check_open()
            entry = shelf.get(watch)
            return Beaten(entry if entry.version > seen else None, self._board_s())

    def delete(self, prefix: str) -> None:
        with self._open() as shelf:
            shelf.delete(check_prefix(prefix))

    def close(self) -> None:
        with self._shared.lock:
            self._closed.set()
            for condition in self._shared.changed.values():
                condition.notify_all()

    @contextmanager
    def _open(self) -> Iterator[Shelf]:
        with self._shared.lock:
            self._check_open()
            yield self._shared.shelf

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise BoardUnreachableError("this handle of the board is closed")

    def _tell(self, key: str) -> None:
        if key in self._shared.changed:
            self._shared.changed[key].notify_all()

    def _board_s(self) -> float:
        return (self._shared.clock.mono_ns() - self._shared.started_ns) / NS_PER_S
