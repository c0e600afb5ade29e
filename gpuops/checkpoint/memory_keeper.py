"""A keeper in this very process: what it holds is gone with it, its answers are the same.

For tests, and for a job that wants no process beside it. All ranks of a node share one
`MemoryNode`; it is safe from several threads, which take turns, also while something is hashed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.crew import Post
from gpuops.checkpoint.image import ImageLayout
from gpuops.checkpoint.keeper import Grant, Policy, Skipped
from gpuops.checkpoint.keeper_core import Core
from gpuops.checkpoint.keeper_jobs import Then, Work
from gpuops.checkpoint.memory_room import available_bytes
from gpuops.checkpoint.node_memory import Available, NodeMemory, share
from gpuops.checkpoint.offering import CannotTellError
from gpuops.checkpoint.persisting import OpenStore
from gpuops.checkpoint.states import CheckpointError, KeeperError, Offer, Shard
from gpuops.checkpoint.stores import open_store as open_any_store

A = TypeVar("A")
T = TypeVar("T")
_EVENTS_CHARS_MAX = 10**9


class _NowJobs:
    """Does each job when `deliver` is called, in the thread that calls it."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def hash(self, work: Work[T], then: Then[T]) -> None:
        self._add(work, then)

    def populate(self, work: Work[T], then: Then[T]) -> None:
        self._add(work, then)

    def look(self, work: Work[T], then: Then[T]) -> None:
        self._add(work, then)

    def persist(self, work: Work[T], then: Then[T]) -> None:
        self._add(work, then)

    def vote(self, work: Work[T], then: Then[T]) -> None:
        self._add(work, then)

    def push(self, work: Work[T], then: Then[T]) -> None:
        self._add(work, then)

    def fetch(self, work: Work[T], then: Then[T]) -> None:
        self._add(work, then)

    def post(self, do: Callable[[], None]) -> None:
        self._waiting.append(do)

    def map(self, function: Callable[[A], T], things: Iterable[A], /) -> Iterator[T]:
        return map(function, things)

    def deliver(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _add(self, work: Work[T], then: Then[T]) -> None:
        def do() -> None:
            try:
                result = work()
            except CheckpointError as exc:
                then(None, exc)
            else:
                then(result, None)

        self._waiting.append(do)


class MemoryNode:
    """The memory of one node, and the ranks that use it.

    A state is committed by the time that the last rank's `seal` returns, and persisted where the
    policy says so.
    """

    def __init__(
        self,
        *,
        available: Available = available_bytes,
        open_store: OpenStore = open_any_store,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.jobs = _NowJobs()
        self.core = Core(
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
    ) -> "MemoryKeeper":
        """Return the keeper of one rank.

        A rank that was there before, or another number of ranks, are new workers: the handles of
        the old ones are of no use from then on, as if those had been killed.

        Raises:
            KeeperError: See `gpuops.checkpoint.client.connect`.
        """
        with self.lock:
            post = Post(Shard(rank, world), local_rank, local_world, generation)
            keeper = MemoryKeeper(self, post)
            self.core.join(keeper, post, is_patient=False)
            return keeper

    def kill(self) -> None:
        """End all ranks at once, as SIGKILL would."""
        with self.lock:
            crew = self.core.crew
            for member in list(crew.members.values()) if crew else []:
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
        """Give all memory back."""
        with self.lock:
            self.kill()
            self.core.memory.close()


class MemoryKeeper:
    """A `Keeper` of one rank; see `MemoryNode.connect`."""

    pid = 0

    def __init__(self, node: MemoryNode, post: Post) -> None:
        self.shard = post.shard
        self._post = post
        self._node = node
        self._indexes: list[int] = []
        self._is_open = True

    def reserve(self, layout: ImageLayout, *, slots: int) -> Sequence[SlotMemory]:
        def do(core: Core) -> Sequence[SlotMemory]:
            arena = core.reserve(self._post, layout.hash, layout.nbytes, slots)
            self._indexes = sorted(arena.slots)
            return [share(arena.slots[index], writable=True) for index in self._indexes]

        return self._done(do)

    def begin(self, step: int, *, is_last: bool = False) -> Grant | Skipped:
        def do(core: Core) -> Grant | Skipped:
            answer = core.begin(self._post, step, is_last=is_last)
            if isinstance(answer, Skipped):
                return answer
            notice = core.notice_for(self._post)
            return Grant(self._indexes.index(answer.slot.index), answer.state, notice)

        return self._done(do)

    def seal(self, grant: Grant) -> None:
        self._done(lambda core: core.seal(self._post, grant.state))

    def abandon(self, grant: Grant) -> None:
        self._done(lambda core: core.abandon(self._post, grant.state))

    def offer(self, deadline_s: float) -> Offer | None:
        def ask(core: Core) -> None:
            if core.crew is not None:
                core.want(core.crew)

        def answer(core: Core) -> Offer | None:
            assert core.crew is not None
            if core.crew.trouble:
                error = CannotTellError if core.crew.cannot_tell else KeeperError
                raise error(core.crew.trouble)
            if core.crew.found is None:
                raise KeeperError(f"offer was not done within {deadline_s:g} s")
            return core.crew.found.offer

        self._done(ask)
        return self._done(answer)

    def open_shard(self, offer: Offer, shard: Shard) -> SlotMemory | Path:
        def do(core: Core) -> SlotMemory | Path:
            source = core.source(offer.state, shard)
            return source if isinstance(source, Path) else share(source, writable=False)

        return self._done(do)

    def restored(self, offer: Offer, seconds: float, nbytes: int) -> None:
        self._done(
            lambda core: core.restored(
                self._post, offer.state, tier=offer.tier.value, seconds=seconds, nbytes=nbytes
            )
        )

    def settings(self, policy: Policy) -> None:
        self._done(lambda core: core.set_policy(policy))

    def stats(self) -> Mapping[str, Any]:
        return self._done(lambda core: core.counts())

    def close(self) -> None:
        with self._node.lock:
            self._is_open = False
            self._node.core.lost(self)

    def _done(self, do: Callable[[Core], T]) -> T:
        """Do something and all that follows from it."""
        with self._node.lock:
            if not self._is_open:
                raise KeeperError("the line to the keeper is closed: newer workers run")
            core, jobs = self._node.core, self._node.jobs
            try:
                result = do(core)
            except KeeperError:
                raise
            except CannotTellError:
                raise
            except CheckpointError as exc:
                raise KeeperError(str(exc)) from exc
            finally:
                jobs.deliver()
                core.tick()
                jobs.deliver()
            return result
