"""A keeper in this process: its states end with the process, its answers are a real keeper's.

All ranks of a node share one
`InProcessNode`; it is safe from several threads, which take turns, also while something is hashed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpuops.checkpoint.hashed_image import HashedImage
from gpuops.checkpoint.image import ImageLayout
from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.jobs import JobKind, OnDone, Work
from gpuops.checkpoint.keeper.messages import CheckpointPolicy, Lease, RankInfo, Skipped
from gpuops.checkpoint.keeper.rank_client import KeeperParts, ReservedMemory
from gpuops.checkpoint.keeper.rank_group import PartsRead
from gpuops.checkpoint.memory.available import available_bytes
from gpuops.checkpoint.memory.node_memory import AvailableBytes, NodeMemory, duplicate_fd
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import ByteRange, PartialImage
from gpuops.checkpoint.storage.address import open_store as open_any_store
from gpuops.checkpoint.storage.persist_task import OpenStore
from gpuops.checkpoint.types import (
    CheckpointError,
    KeeperError,
    RestorePoint,
    RestoreUndecidedError,
    Shard,
    StateId,
)

A = TypeVar("A")
T = TypeVar("T")
_EVENTS_CHARS_MAX = 10**9


def duplicate(memory: SharedBuffer, *, writable: bool) -> SharedBuffer:
    """Return the same memory once more, with a descriptor of its own."""
    return SharedBuffer.attach(duplicate_fd(memory, writable=writable), writable=writable)


class _InlineJobs:
    """Does each job when `run_callbacks` is called, in the thread that calls it."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def start(self, _kind: JobKind, work: Work[T], on_done: OnDone[T]) -> None:
        def do() -> None:
            try:
                result = work()
            except CheckpointError as exc:
                on_done(None, exc)
            else:
                on_done(result, None)

        self._waiting.append(do)

    def post(self, run: Callable[[], None]) -> None:
        self._waiting.append(run)

    def map(self, function: Callable[[A], T], things: Iterable[A], /) -> Iterator[T]:
        return map(function, things)

    def run_callbacks(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


class InProcessNode:
    """The memory of one node, and the ranks that use it.

    A state is committed by the time that the last rank's `seal` returns, and persisted where the
    policy says so.
    """

    def __init__(
        self,
        *,
        available: AvailableBytes = available_bytes,
        open_store: OpenStore = open_any_store,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.jobs = _InlineJobs()
        self.core = KeeperCore(
            NodeMemory("memory", available), self.jobs, clock_s=clock_s, open_store=open_store
        )

    def connect(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        local_rank: int = 0,
        local_world: int = 1,
        generation: int = 0,
    ) -> "InProcessKeeper":
        """Return the keeper of one rank.

        A rank that was there before, or another number of ranks, are new workers: the handles of
        the old ones are of no use from then on, as if those had been killed.

        Raises:
            KeeperError: See `gpuops.checkpoint.keeper.rank_client.connect_rank`.
        """
        with self.lock:
            rank_info = RankInfo(Shard(rank, world), local_rank, local_world, generation)
            keeper = InProcessKeeper(self, rank_info)
            self.core.join(keeper, rank_info, may_wait=False)
            return keeper

    def kill(self) -> None:
        """End all ranks at once, as SIGKILL would."""
        with self.lock:
            crew = self.core.group
            for member in list(crew.connections.values()) if crew else []:
                member.close()

    def begin_generation(self, generation: int, excluded_step: int | None = None) -> None:
        """Do what an agent asks for before it starts workers anew."""
        with self.lock:
            self.core.begin_generation(generation, 1, excluded_step, "")

    def events(self) -> list[Mapping[str, object]]:
        """Return, and forget, what happened."""
        with self.lock:
            return self.core.events.take(_EVENTS_CHARS_MAX)

    def close(self) -> None:
        """Release all memory."""
        with self.lock:
            self.kill()
            self.core.memory.close()


class InProcessKeeper:
    """A `Keeper` of one rank; see `InProcessNode.connect`."""

    pid = 0

    def __init__(self, node: InProcessNode, rank_info: RankInfo) -> None:
        self.shard = rank_info.shard
        self._rank_info = rank_info
        self._node = node
        self._indexes: list[int] = []
        self._is_open = True

    def reserve(self, layout: ImageLayout, *, slots: int) -> ReservedMemory:
        def do(core: KeeperCore) -> ReservedMemory:
            pool = core.reserve(self._rank_info, layout.header_hash, layout.nbytes, slots)
            self._indexes = sorted(pool.slots)
            buffers = [duplicate(pool.slots[index], writable=True) for index in self._indexes]
            return ReservedMemory(buffers, duplicate(pool.stamp, writable=True))

        return self._run(do)

    def acquire(self, step: int, *, n_steps: int = 0, is_last: bool = False) -> Lease | Skipped:
        def do(core: KeeperCore) -> Lease | Skipped:
            answer = core.acquire(self._rank_info, step, n_steps=n_steps, is_last=is_last)
            if isinstance(answer, Skipped):
                return answer
            notice = core.notice_for(self._rank_info)
            slot = self._indexes.index(answer.slot.index)
            return Lease(slot, answer.state, answer.number, notice)

        return self._run(do)

    def mark_written(self, lease: Lease) -> None:
        self._run(lambda core: core.mark_written(self._rank_info, lease.state))

    def abandon(self, lease: Lease) -> None:
        self._run(lambda core: core.abandon(self._rank_info, lease.state))

    def restore_point(self, deadline_s: float) -> RestorePoint | None:
        def ask(core: KeeperCore) -> None:
            if core.group is not None:
                core.request_restore(core.group)

        def answer(core: KeeperCore) -> RestorePoint | None:
            assert core.group is not None
            if core.group.error:
                raise core.group.refusal()
            if core.group.result is None:
                raise KeeperError(f"offer was not done within {deadline_s:g} s")
            return core.group.result.restore_point

        self._run(ask)
        return self._run(answer)

    def open_shard(
        self, restore_point: RestorePoint, shard: Shard
    ) -> SharedBuffer | Path | KeeperParts:
        def do(core: KeeperCore) -> SharedBuffer | Path | KeeperParts:
            assert core.group is not None
            source = core.group.shard_location(restore_point.state, shard)
            if isinstance(source, PartialImage):
                return KeeperParts(
                    duplicate(source.memory, writable=False),
                    lambda ranges: self._read_parts(restore_point.state, shard, ranges),
                )
            if isinstance(source, Path):
                return source
            digest = core.group.shard_digest(shard)
            if digest is not None:
                return HashedImage.open(duplicate_fd(source, writable=False), digest)
            return duplicate(source, writable=False)

        return self._run(do)

    def reject(
        self, restore_point: RestorePoint | None, why: str, *, is_given_up: bool = False
    ) -> None:
        def do(core: KeeperCore) -> None:
            assert core.group is not None
            point = restore_point
            rejected = (point.state, point.is_verified) if point else (None, True)
            core.restore_finder.reject(
                core.group, core.instructions, rejected, why, is_given_up=is_given_up
            )

        self._run(do)

    def _read_parts(self, state: StateId, shard: Shard, ranges: Sequence[ByteRange]) -> None:
        def do(core: KeeperCore) -> PartsRead:
            assert core.group is not None
            return core.restore_finder.read_parts(core.group, (state, shard, tuple(ranges)))

        read = self._run(do)
        if read.error is not None:
            raise read.error

    def report_restored(self, restore_point: RestorePoint, seconds: float, nbytes: int) -> None:
        self._run(
            lambda core: core.on_restored(
                self._rank_info,
                restore_point.state,
                tier=restore_point.tier.value,
                seconds=seconds,
                nbytes=nbytes,
            )
        )

    def set_policy(self, policy: CheckpointPolicy) -> None:
        self._run(lambda core: core.set_policy(policy))

    def stats(self) -> Mapping[str, Any]:
        return self._run(lambda core: core.counts())

    def close(self) -> None:
        with self._node.lock:
            self._is_open = False
            self._node.core.disconnected(self)

    def _run(self, run: Callable[[KeeperCore], T]) -> T:
        """Do something and all that follows from it."""
        with self._node.lock:
            if not self._is_open:
                raise KeeperError("the line to the keeper is closed: newer workers run")
            core, jobs = self._node.core, self._node.jobs
            try:
                result = run(core)
            except KeeperError:
                raise
            except RestoreUndecidedError:
                raise
            except CheckpointError as exc:
                raise KeeperError(str(exc)) from exc
            finally:
                jobs.run_callbacks()
                core.tick()
                jobs.run_callbacks()
            return result
