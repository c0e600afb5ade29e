"""Background work of the keeper, in threads, each kind at its own priority; and the event queue.

Results return to the thread that serves messages: only it changes the keeper's state.
"""

import ctypes
import json
import os
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from gpuops.checkpoint.types import Shard, StateId
from gpuops.wire.messages import plain

EVENTS_MAX = 1000
_TEXT_CHARS_MAX = 500
_ITEM_CHARS_MAX = 200
_ITEMS_MAX = 8
# There may be one of these each step: consecutive ones are merged, with a count.
_COUNTED = ("committed", "skipped", "given_up", "whole", "replicated")
# With several nodes each save adds these, alternating.
_PER_SAVE = ("whole", "replicated", "committed")


@dataclass(slots=True)
class EventQueue:
    """Events with a ``kind``, oldest first; *on_event* gets each that was not merged."""

    on_event: Callable[[Mapping[str, object]], None] = lambda _event: None
    dropped: int = 0
    _waiting: deque[dict[str, object]] = field(default_factory=deque)

    def add(self, kind: str, **fields: object) -> None:
        """Add an event; its texts are truncated."""
        event: dict[str, object] = {"kind": kind}
        event |= {name: _bounded(value) for name, value in fields.items()}
        if kind in _COUNTED:
            event["n"] = 1
            last = self._find_mergeable(kind, event.get("holder"))
            if last is not None:
                n = last["n"]
                assert isinstance(n, int)
                event["n"] = n + 1
                self._waiting.remove(last)
        else:
            self.on_event(event)
        if len(self._waiting) >= EVENTS_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(event)

    def _find_mergeable(self, kind: str, holder: object) -> dict[str, object] | None:
        """Return the event that another one of *kind* is merged into."""
        for event in reversed(self._waiting):
            if event["kind"] == kind and event.get("holder") == holder:
                return event
            if not {kind, event["kind"]} <= set(_PER_SAVE):
                return None
        return None

    def take(self, chars_max: int) -> list[dict[str, object]]:
        """Remove and return the oldest: at least one, at most *chars_max* characters of JSON.

        The first one has the number of dropped events, if any.
        """
        found: list[dict[str, object]] = []
        if self.dropped:
            found.append({"kind": "events_lost", "n": self.dropped})
            self.dropped = 0
        n_chars = 0
        while self._waiting:
            n_chars += len(json.dumps(self._waiting[0]))
            if found and n_chars > chars_max:
                break
            found.append(self._waiting.popleft())
        return found

    def __len__(self) -> int:
        return len(self._waiting)


def _bounded(value: object) -> object:
    if isinstance(value, StateId | Shard):
        return plain(value)
    if isinstance(value, str):
        return value[:_TEXT_CHARS_MAX]
    if isinstance(value, list | tuple):
        items = value[:_ITEMS_MAX]
        return [item[:_ITEM_CHARS_MAX] if isinstance(item, str) else plain(item) for item in items]
    return value


A = TypeVar("A")
T = TypeVar("T")
Work = Callable[[], T]
# Called in the thread of the messages with the result or the exception.
OnDone = Callable[[T | None, BaseException | None], None]
Task = Coroutine[Callable[[OnDone[Any]], None], Any, None]


# Hashing follows each save and is short; it yields to the training.
NICE_HASH = 5
NICE_POPULATE = 10
NICE_PERSIST = 19
NICE_CHECK_REPLICAS = 19
NICE_PUSH = 10
_HASH_THREADS_MAX = 8
_POPULATE_THREADS_MAX = 4
_FETCH_THREADS = 4
# One for each holder, so that one that hangs does not block the others.
PUSHES_MAX = 16

# ioprio_set(2), linux/ioprio.h: I/O only while the disk is idle.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13


class JobKind(StrEnum):
    """Kinds of background work; each has its own threads."""

    HASH = "hash"  # read memory: a few at a time
    POPULATE = "populate"  # allocate memory
    SEARCH = "search"  # read a directory, which may block for long: one at a time
    PERSIST = "persist"  # write to a directory, at idle priority: one at a time
    READ_BACK = "read_back"  # verify what was written, at idle priority: one at a time
    CHECK_REPLICAS = "check_replicas"  # read memory, at idle priority: one at a time
    PUSH = "push"  # send to another node, below the training's priority: `PUSHES_MAX` at a time
    FETCH = "fetch"  # get from another node what ranks wait for: a few at a time


class JobResult(Generic[T]):
    """``await JobResult(jobs, kind, work)``: what *work* returns in a thread, or its exception."""

    def __init__(self, jobs: "Jobs", kind: JobKind, work: Work[T]) -> None:
        self._start = partial(jobs.start, kind, work)

    def __await__(self) -> Generator[Callable[[OnDone[T]], None], T, T]:
        return (yield self._start)


def run_task(task: Task) -> None:
    """Run *task* until it ends or awaits; it continues in the thread of the messages."""
    _resume(task, partial(task.send, None))


def _resume(task: Task, resume: Callable[[], Callable[[OnDone[Any]], None]]) -> None:
    with suppress(StopIteration):
        start = resume()
        start(
            lambda result, error: _resume(
                task, partial(task.send, result) if error is None else partial(task.throw, error)
            )
        )


class Waker:
    """Wakes a thread that selects on it; `wake` is safe from any thread and signal handler."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when woken."""
        return self._read.fileno()

    def wake(self) -> None:
        with suppress(OSError):
            self._write.send(b"\0")

    def drain(self) -> None:
        """Clear the wake-up."""
        with suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        """Ignore later wake-ups."""
        self._read.close()
        self._write.close()


class Jobs:
    """Runs work in threads; its callbacks are called by `run_callbacks`.

    *wake* is called from these threads when a result is ready for `run_callbacks`.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        n_cpus = len(os.sched_getaffinity(0))
        n_hash = max(2, min(n_cpus // 2, _HASH_THREADS_MAX))
        n_populate = max(1, min(n_cpus // 4, _POPULATE_THREADS_MAX))
        self._pools = {
            JobKind.HASH: _pool(n_hash, "hash", NICE_HASH),
            JobKind.POPULATE: _pool(n_populate, "populate", NICE_POPULATE),
            JobKind.SEARCH: _pool(1, "search", 0),
            JobKind.PERSIST: _pool(1, "persist", NICE_PERSIST, is_idle=True),
            JobKind.READ_BACK: _pool(1, "read-back", NICE_PERSIST, is_idle=True),
            JobKind.CHECK_REPLICAS: _pool(1, "check", NICE_CHECK_REPLICAS),
            JobKind.PUSH: _pool(PUSHES_MAX, "push", NICE_PUSH),
            JobKind.FETCH: _pool(_FETCH_THREADS, "fetch", 0),
        }
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def start(self, kind: JobKind, work: Work[T], on_done: OnDone[T]) -> None:
        """Run *work* in a thread of *kind*."""

        def over(future: Future[T]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            result = None if error is not None else future.result()
            self.post(lambda: on_done(result, error))

        self._pools[kind].submit(work).add_done_callback(over)

    def post(self, do: Callable[[], None]) -> None:
        """Have *do* called soon in the thread of the messages; thread-safe."""
        self._done.put(do)
        self._wake()

    def map(self, function: Callable[[A], T], things: Iterable[A], /) -> Iterator[T]:
        """Call *function* for each item in the hashing threads; for the search."""
        return self._pools[JobKind.HASH].map(function, things)

    def run_callbacks(self) -> None:
        """Call the ``on_done`` of all finished work."""
        with suppress(Empty):
            while True:
                self._done.get_nowait()()

    def close(self) -> None:
        """Start nothing new; running work is not awaited."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def lower_priority(nice: int, *, is_idle: bool = False) -> None:
    """Lower the priority of this thread; with *is_idle*, its disk priority, too.

    Where the kernel refuses, the thread keeps its priority; only performance is affected.
    """
    thread_id = threading.get_native_id()
    with suppress(OSError):
        # Never raise it: root could, where the keeper was started with a higher nice value.
        nice = max(nice, os.getpriority(os.PRIO_PROCESS, thread_id))
        os.setpriority(os.PRIO_PROCESS, thread_id, nice)
    number = _IOPRIO_SET.get(platform.machine())
    if is_idle and number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


def _pool(n_threads: int, name: str, nice: int, *, is_idle: bool = False) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        n_threads,
        thread_name_prefix=f"gpuops-{name}",
        initializer=lambda: lower_priority(nice, is_idle=is_idle),
    )
