"""A keeper in this very process: what it holds is gone with it, its answers are the same.

For tests, and for a job that wants no process beside it. All ranks of a node share one
`MemoryNode`; it is safe from several threads.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.image import ImageLayout
from gpuops.checkpoint.keeper import Grant, Policy, Skipped
from gpuops.checkpoint.memory_room import available_bytes
from gpuops.checkpoint.node_memory import Available, Held, NodeMemory, SealedSlot, share
from gpuops.checkpoint.offering import Chosen, Wanted, choose
from gpuops.checkpoint.slots import GateError, Granted, Reason
from gpuops.checkpoint.state_store import CheckpointStore
from gpuops.checkpoint.states import (
    CheckpointError,
    Digest,
    KeeperError,
    Offer,
    Shard,
    StateId,
)

OpenStore = Callable[[str], CheckpointStore]


def no_store(directory: str) -> CheckpointStore:
    """Refuse every directory."""
    raise CheckpointError(f"nothing is kept in {directory}: this keeper has only memory")


class MemoryNode:
    """The memory of one node, and the ranks that use it.

    ``excluded_step`` is passed over by the next offer.
    """

    def __init__(
        self,
        *,
        available: Available = available_bytes,
        open_store: OpenStore = no_store,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.memory = NodeMemory("memory", available)
        self.excluded_step: int | None = None
        self.events: list[Mapping[str, object]] = []
        self.clock_s = clock_s
        self.policy: Policy | None = None
        self.n_ranks = 0
        self._open_store = open_store
        self._crew: dict[int, MemoryKeeper] = {}
        self._epoch_max = -1
        self._chosen: Chosen | None = None
        self._offer: Offer | None = None

    def connect(
        self, *, rank: int, world: int, local_rank: int = 0, local_world: int = 1
    ) -> "MemoryKeeper":
        """Return the keeper of one rank.

        A rank that was there before, or another number of ranks, are new workers: the handles of
        the old ones are of no use from then on, as if they had been killed.
        """
        with self.lock:
            of_old = next(iter(self._crew.values()), None)
            is_other = of_old is not None and (of_old.shard.world, self.n_ranks) != (
                world,
                local_world,
            )
            if not self._crew or is_other or local_rank in self._crew:
                self._begin(world, local_world)
            keeper = MemoryKeeper(self, Shard(rank, world), local_rank)
            self._crew[local_rank] = keeper
            return keeper

    def kill(self) -> None:
        """End all ranks at once, as SIGKILL would."""
        with self.lock:
            self._begin(1, 0)

    def fence(self, keeper: "MemoryKeeper") -> None:
        """Raise KeeperError where *keeper* is of workers that are gone."""
        if self._crew.get(keeper.local_rank) is not keeper:
            raise KeeperError("the keeper does not know this rank any more: newer workers run")

    def decide(self) -> Offer | None:
        """Return what the ranks go on from; found out once for all of them."""
        gate = self.memory.gate
        if gate.epoch is None:
            held: dict[StateId, dict[Shard, Held]] = {
                state: self.memory.held(state) for state in self.memory.states()
            }
            directory = self.policy.directory if self.policy else None
            store = self._open_store(directory) if directory else None
            choice = choose(held, store, Wanted(excluded_step=self.excluded_step))
            self.events += [
                {"kind": "corrupt", "state": p.state, "rank": p.shard.rank, "why": p.why}
                for p in choice.problems
            ]
            self._epoch_max = max(self._epoch_max, choice.epoch_max) + 1
            self._chosen = chosen = choice.chosen
            gate.resume(chosen.state if chosen else None, self._epoch_max)
            if chosen is not None:
                self._offer = Offer(
                    chosen.state, chosen.world, chosen.tier, self._epoch_max, tuple(choice.why)
                )
                if chosen.state in gate.whole():
                    for local_rank in self._crew:
                        gate.pin(chosen.state, f"restore-{local_rank}")
        return self._offer

    def source(self, offer: Offer, shard: Shard) -> SlotMemory | Path:
        """Return where *shard* is read.

        Raises:
            KeeperError: It is not what was offered.
        """
        chosen = self._chosen
        if chosen is None or offer != self._offer or shard not in chosen.sources:
            raise KeeperError(f"the shard of rank {shard.rank} of {offer.state} is not on offer")
        return chosen.sources[shard]

    def leave(self, keeper: "MemoryKeeper") -> None:
        """Take a rank off."""
        if self._crew.get(keeper.local_rank) is keeper:
            self.memory.gate.lost(keeper.local_rank)
            self.memory.gate.unpin(f"restore-{keeper.local_rank}")

    def _begin(self, world: int, n_ranks: int) -> None:
        for local_rank in self._crew:
            self.memory.gate.unpin(f"restore-{local_rank}")
        for memory in self._chosen.fetched if self._chosen else ():
            memory.close()
        self._crew.clear()
        self._chosen = self._offer = None
        self.n_ranks = n_ranks
        self.memory.gate.begin_epoch(n_ranks, is_alone=world == n_ranks)


class MemoryKeeper:
    """A `Keeper` of one rank; see `MemoryNode.connect`."""

    def __init__(self, node: MemoryNode, shard: Shard, local_rank: int) -> None:
        self.shard = shard
        self.local_rank = local_rank
        self._node = node
        self._indexes: list[int] = []

    def reserve(self, layout: ImageLayout, *, slots: int) -> Sequence[SlotMemory]:
        with self._node.lock:
            self._node.fence(self)
            memory = self._node.memory
            if layout.shard != self.shard:
                raise KeeperError(f"this is rank {self.shard.rank}, not {layout.shard.rank}")
            arena = memory.reserve(self.local_rank, self.shard, layout.hash, layout.nbytes, slots)
            self._indexes = sorted(arena.slots)
            return [share(arena.slots[index], writable=True) for index in self._indexes]

    def begin(self, step: int) -> Grant | Skipped:
        with self._node.lock:
            self._node.fence(self)
            gate = self._node.memory.gate
            gate.every_s = self._node.policy.every_s if self._node.policy else 0.0
            if gate.epoch is None:
                self._node.decide()
            answer = gate.begin(self.local_rank, step, self._node.clock_s())
            if isinstance(answer, Granted):
                return Grant(self._indexes.index(answer.slot.index), answer.state)
            return Skipped(answer.why, answer.reason is not Reason.NOT_DUE)

    def seal(self, grant: Grant) -> None:
        with self._node.lock:
            self._node.fence(self)
            try:
                sealed = self._node.memory.seal(self.local_rank, grant.state)
            except GateError as exc:
                raise KeeperError(str(exc)) from exc
            if sealed is not None:
                self._hash(sealed)

    def abandon(self, grant: Grant) -> None:
        with self._node.lock:
            self._node.fence(self)
            try:
                self._node.memory.gate.abandon(self.local_rank, grant.state)
            except GateError as exc:
                raise KeeperError(str(exc)) from exc

    def offer(self, deadline_s: float) -> Offer | None:  # noqa: ARG002 it never waits
        with self._node.lock:
            self._node.fence(self)
            return self._node.decide()

    def open_shard(self, offer: Offer, shard: Shard) -> SlotMemory | Path:
        with self._node.lock:
            self._node.fence(self)
            source = self._node.source(offer, shard)
            return source if isinstance(source, Path) else share(source, writable=False)

    def restored(self, offer: Offer, seconds: float, nbytes: int) -> None:
        with self._node.lock:
            self._node.fence(self)
            self._node.memory.gate.unpin(f"restore-{self.local_rank}")
            self._node.events.append(
                {"kind": "restored", "state": offer.state, "seconds": seconds, "bytes": nbytes}
            )

    def settings(self, policy: Policy) -> None:
        with self._node.lock:
            self._node.fence(self)
            self._node.policy = policy

    def stats(self) -> Mapping[str, Any]:
        with self._node.lock:
            self._node.fence(self)
            return self._node.memory.counts()

    def close(self) -> None:
        with self._node.lock:
            self._node.leave(self)

    def _hash(self, sealed: SealedSlot) -> None:
        try:
            digest: Digest = sealed.hash()
        except CheckpointError as exc:
            self._node.memory.gate.give_up(sealed.state)
            self._node.events.append({"kind": "refused", "state": sealed.state, "why": str(exc)})
        else:
            self._node.memory.hashed(sealed, digest)
