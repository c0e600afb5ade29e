"""Push what this node saved to its holders, and track what has arrived there.

Nothing is queued: an idle holder gets the next shard that it lacks, first of the state that waits
for its commit, then of the newest committed one. There is one push to a holder at a time, so that
a holder that hangs does not block the others. A holder without progress counts as gone: commits do
not wait for it, and it is retried with a growing backoff.

Used by the thread of the messages; the pushes themselves are jobs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.memory.node_memory import MemoryShard, NodeMemory
from gpuops.checkpoint.peers.alike import ComposedImage, PiecePlans
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import PushResult, push
from gpuops.checkpoint.transfer.connection import TransferLimits
from gpuops.checkpoint.transfer.pacing import GapPace, SendPace
from gpuops.checkpoint.transfer.parallel import TransferOptions
from gpuops.checkpoint.transfer.wire import (
    JobCredentials,
    PushOffer,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import (
    CorruptError,
    KeeperAddress,
    Shard,
    StateId,
)
from gpuops.host.clock import SystemClock

HOLDERS_MAX = 16
HOLDER_GONE_S = 10.0
# A push to a holder that was gone pins a slot, so it must be short.
PROBE_S = 2.0
RETRY_S = 0.5
BACKOFF_MIN_S = 10.0
BACKOFF_MAX_S = 120.0
_DEADLINE_S = 86_400.0  # progress is what is limited
_LIMITS = TransferLimits(stall_s=5.0)
_N_CONNECTIONS = 2
# Replicas may take this part of the time between two states before they ignore the training.
WITHIN_SHARE = 0.8
WITHIN_MIN_S = 1.0  # about the time in which nodes agree on a commit
WITHIN_MAX_S = 60.0
WITHIN_FIRST_S = 2.0
_INTERVALS_KEPT = 9
# Consecutive pushes that failed without progress at the end: the holder accepts some bytes and
# never all.
BROKEN_PUSHES_MAX = 5
# Refusals that the holder does not change within seconds.
_PERMANENT = (TransferRefusal.NO_ROOM, TransferRefusal.DIFFERENT)


class _ObservedPace(SendPace):
    """A shared send rate; *on_moved* is called each time before bytes are sent."""

    def __init__(self, pace: SendPace, on_moved: Callable[[], None]) -> None:
        super().__init__(None, SystemClock())
        self._pace = pace
        self._on_moved = on_moved

    @property
    def bytes_per_s(self) -> float | None:
        return self._pace.bytes_per_s

    def enqueue(self, nbytes: int) -> float:
        self._on_moved()
        return self._pace.enqueue(nbytes)

    def wait_s(self, position: float) -> float:
        return self._pace.wait_s(position)


@dataclass(eq=False, slots=True)
class _PushTask:
    """One push. ``moved_s``: the time of its last progress."""

    state: StateId
    shard: Shard
    nbytes: int
    began_s: float
    moved_s: float
    has_moved: bool = False
    is_cancelled: bool = False  # its result is ignored
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False, slots=True)
class _Holder:
    """``is_gone``: commits do not wait for it. ``retry_at_s``: nothing is pushed to it before.

    ``ranks``: those that run there. ``n_broken``: the number of consecutive pushes that sent
    something and failed.
    """

    peer: KeeperAddress
    ranks: range = range(0)
    task: _PushTask | None = None
    failing_since_s: float | None = None
    is_gone: bool = False
    n_failures: int = 0
    n_broken: int = 0
    retry_at_s: float = 0.0
    why: str = ""

    @property
    def stall_s(self) -> float:
        return PROBE_S if self.is_gone else HOLDER_GONE_S


@dataclass(slots=True)
class SaveCadence:
    """How often the ranks ask for a save, granted or not.

    ``within_s``: the part of the time between saves in which replicas have to reach their holders.
    """

    within_s: float = WITHIN_FIRST_S
    _last_asked: tuple[StateId, float] | None = None
    _intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS_KEPT))

    def observe(self, now_s: float, asked_state: StateId | None) -> None:
        """Record *asked_state*, the newest state that was asked for so far."""
        last = self._last_asked
        if asked_state is None or (last is not None and asked_state == last[0]):
            return
        self._last_asked = (asked_state, now_s)
        if last is None or asked_state.epoch != last[0].epoch:
            self._intervals_s.clear()
            self.within_s = WITHIN_FIRST_S
            return
        self._intervals_s.append(now_s - last[1])
        share_s = WITHIN_SHARE * median(self._intervals_s)
        self.within_s = min(max(share_s, WITHIN_MIN_S), WITHIN_MAX_S)


@dataclass(slots=True)
class ReplicaPusher:
    """The pushes of one node. ``job`` None: this keeper serves no peers yet.

    *own_shards* are the shards of the ranks that run here now. States of older ranks are not
    pushed: they had other holders.
    """

    memory: NodeMemory
    jobs: Jobs
    events: EventQueue
    pace: GapPace
    own_shards: Callable[[], Collection[Shard]]
    clock_s: Callable[[], float] = time.monotonic
    job: JobCredentials | None = None
    on_damage: Callable[[StateId, Shard, int], None] = lambda _state, _shard, _number: None
    n_pushed: int = 0
    n_failed: int = 0
    pushed_bytes: int = 0
    _holders: dict[KeeperAddress, _Holder] = field(default_factory=dict)
    _n_pins: int = 0
    _plans: PiecePlans = field(default_factory=PiecePlans)
    _cadence: SaveCadence = field(default_factory=SaveCadence)

    def set_holders(self, holders: Mapping[KeeperAddress, range]) -> None:
        """Push to *holders* from now on, and to no other; the values are the ranks of each."""
        for peer in self._holders.keys() - holders.keys():
            self._cancel(self._holders.pop(peer))
            for saved in self.memory.buffer_table.complete.values():
                # It may drop its replicas; if it becomes a holder again, it is asked.
                saved.arrived = {pair for pair in saved.arrived if pair[1] != peer}
        for peer, ranks in holders.items():
            self._holders.setdefault(peer, _Holder(peer)).ranks = ranks
        self.push_next()

    def stop(self) -> None:
        """Cancel all pushes: the job may resume from another state."""
        for holder in self._holders.values():
            self._cancel(holder)
            holder.failing_since_s = None
            holder.retry_at_s = 0.0

    def is_replicated(self, state: StateId) -> bool:
        """Return whether every live holder has all that this node saved of *state*, verified."""
        shards = self.memory.complete_shards(state)
        arrived = self._arrived(state)
        return bool(shards) and all(
            holder.is_gone or (shard, holder.peer) in arrived
            for holder in self._holders.values()
            for shard in set(shards).intersection(self.own_shards())
        )

    def push_next(self) -> None:
        """Start the possible pushes; cancel those that are not needed or make no progress."""
        now_s, pushable = self.clock_s(), self._wanted()
        self._cadence.observe(now_s, self.memory.buffer_table.decided)
        for state in pushable:
            saved = self.memory.buffer_table.find(state)
            if saved is not None and saved.due_s is None:
                saved.due_s = now_s + self._cadence.within_s
        for holder in self._holders.values():
            task = holder.task
            if task is None:
                if now_s >= holder.retry_at_s and self.job is not None:
                    self._push_missing(holder, self.job, pushable, now_s)
            elif task.state not in pushable:
                task.is_cancelled = True
                task.stop.set()
            elif not task.is_cancelled and now_s - task.moved_s > holder.stall_s:
                task.is_cancelled = True
                task.stop.set()
                why = f"{holder.peer} has received nothing for {now_s - task.moved_s:.0f} s"
                self._mark_gone(holder, task, f"{why}: {holder.why}" if holder.why else why)

    def n_holders(self) -> tuple[int, int]:
        """Return the number of holders, and how many of them are gone."""
        return len(self._holders), sum(holder.is_gone for holder in self._holders.values())

    def counts(self) -> dict[str, object]:
        return {
            "replicas_pushed": self.n_pushed,
            "replicas_failed": self.n_failed,
            "replica_bytes": self.pushed_bytes,
            "replicas_yielded_s": round(self.pace.yielded_s, 3),
            "holders": [holder.peer.name for holder in self._holders.values()],
            "holders_gone": [h.peer.name for h in self._holders.values() if h.is_gone],
        }

    def _arrived(self, state: StateId) -> set[tuple[Shard, KeeperAddress]]:
        """Return which shards of *state* are at which holders."""
        saved = self.memory.buffer_table.find(state)
        return set() if saved is None else saved.arrived

    def _wanted(self) -> list[StateId]:
        table = self.memory.buffer_table
        if table.epoch is None:
            return []
        complete = table.complete_states()
        return [
            s for s in (table.in_flight, table.last_committed) if s is not None and s in complete
        ]

    def _push_missing(
        self, holder: _Holder, job: JobCredentials, pushable: Sequence[StateId], now_s: float
    ) -> None:
        own_shards = self.own_shards()
        for state in pushable:
            arrived = self._arrived(state)
            shards = self.memory.complete_shards(state)
            for shard in sorted(set(shards).intersection(own_shards)):
                if (shard, holder.peer) not in arrived:
                    self._push(holder, job, shards[shard], now_s)
                    return

    def _push(self, holder: _Holder, job: JobCredentials, entry: MemoryShard, now_s: float) -> None:
        copy, table = entry.copy, self.memory.buffer_table
        since_s = now_s if holder.failing_since_s is None else holder.failing_since_s
        is_probe = holder.is_gone
        nbytes = self._plans.known_remainder_bytes(entry, holder.ranks)
        task = _PushTask(copy.state, copy.shard, nbytes, now_s, now_s if is_probe else since_s)
        holder.task = task
        self._n_pins += 1
        owner = f"push-{self._n_pins}"
        table.pin(copy.state, owner)
        self._update_deadline(now_s)
        digest = copy.digest
        offer = PushOffer(
            copy.state, copy.shard, copy.layout, digest.nbytes, digest.root, table.last_committed
        )
        pinned = PinnedCopy(
            entry.memory.fd,
            digest,
            on_damage=lambda number: self.jobs.post(
                lambda: self.on_damage(copy.state, copy.shard, number)
            ),
            view=entry.memory.view,
        )
        terms = TransferOptions(
            _DEADLINE_S,
            holder.stall_s,
            n_connections=_N_CONNECTIONS,
            limits=_LIMITS,
            stop=task.stop,
        )

        def moved() -> None:
            task.moved_s, task.has_moved = self.clock_s(), True

        pace = _ObservedPace(self.pace, moved)
        transfer = partial(push, holder.peer, job, options=terms, pace=pace)
        work = partial(self._push_image, entry, holder.ranks, offer, pinned, transfer)
        run_task(self._run(holder, task, owner, work))

    def _push_image(
        self,
        entry: MemoryShard,
        ranks: range,
        offer: PushOffer,
        image: PinnedCopy,
        transfer: Callable[..., PushResult],
    ) -> PushResult:
        """Push what *ranks* of the holder do not hold alike, or all if they have other bytes."""
        if pieces := self._plans.remainder(entry, ranks):
            part = ComposedImage(pieces, {offer.shard: entry.memory.view})
            digest = part.digest(chunk_bytes=_LIMITS.chunk_bytes)
            part_offer = replace(
                offer,
                nbytes=digest.nbytes,
                root=digest.root,
                image_nbytes=offer.nbytes,
                image_root=offer.root,
            )
            try:
                return transfer(
                    part_offer, PinnedCopy(-1, digest, read=part.read), image=image.digest
                )
            except TransferRefusedError as exc:
                if exc.code is not TransferRefusal.NOT_ALIKE:
                    raise
        return transfer(offer, image)

    async def _run(
        self, holder: _Holder, task: _PushTask, owner: str, work: Callable[[], PushResult]
    ) -> None:
        done, error = None, None
        try:
            done = await JobResult(self.jobs, JobKind.PUSH, work)
        except Exception as exc:  # noqa: BLE001 boundary: after any error the holder has no copy
            error = exc
        self.memory.buffer_table.unpin(owner)
        self.memory.release()
        if holder.task is task:
            holder.task = None
        if done is not None:
            self._on_arrived(holder, task, done)
        elif not task.is_cancelled:
            self._on_failed(holder, task, error)
        self.push_next()

    def _update_deadline(self, now_s: float) -> None:
        """Set how many bytes are still to be sent, and by when."""
        wanted = [self.memory.buffer_table.find(state) for state in self._wanted()]
        left = [(self._left_bytes(it.state), it.due_s or now_s) for it in wanted if it is not None]
        due_s = min((due_s for nbytes, due_s in left if nbytes), default=now_s)
        self.pace.set_deadline(sum(nbytes for nbytes, _ in left), max(due_s - now_s, 0.0))

    def _left_bytes(self, state: StateId) -> int:
        """Return how many bytes of *state* are still to be sent to live holders."""
        own_shards, arrived = self.own_shards(), self._arrived(state)
        return sum(
            self._plans.known_remainder_bytes(entry, holder.ranks)
            for shard, entry in self.memory.complete_shards(state).items()
            if shard in own_shards
            for holder in self._holders.values()
            if not holder.is_gone and (shard, holder.peer) not in arrived
        )

    def _on_arrived(self, holder: _Holder, task: _PushTask, done: PushResult) -> None:
        if holder.peer not in self._holders:
            return
        self._arrived(task.state).add((task.shard, holder.peer))
        holder.failing_since_s, holder.is_gone, holder.n_failures = None, False, 0
        holder.retry_at_s, holder.why, holder.n_broken = 0.0, "", 0
        self.n_pushed += 1
        self.pushed_bytes += done.sent_bytes
        self._report("replicated", holder, task, seconds=done.seconds, bytes=done.sent_bytes)

    def _on_failed(self, holder: _Holder, task: _PushTask, error: BaseException | None) -> None:
        now_s = self.clock_s()
        if isinstance(error, TransferRefusedError) and error.code is TransferRefusal.NOT_SAVED:
            holder.retry_at_s = now_s + RETRY_S
            return
        is_permanent = isinstance(error, CorruptError) or (
            isinstance(error, TransferRefusedError) and error.code in _PERMANENT
        )
        holder.n_broken += task.has_moved
        is_permanent = is_permanent or holder.n_broken >= BROKEN_PUSHES_MAX
        if is_permanent or holder.is_gone or now_s - task.moved_s >= HOLDER_GONE_S:
            self._mark_gone(holder, task, str(error) or repr(error))
            return
        holder.failing_since_s, holder.why = task.moved_s, str(error)
        holder.retry_at_s = now_s + RETRY_S

    def _mark_gone(self, holder: _Holder, task: _PushTask, why: str) -> None:
        """Stop waiting for *holder*; that is reported once, and it is retried later."""
        now_s = self.clock_s()
        is_first = not holder.is_gone
        holder.is_gone, holder.why, holder.failing_since_s = True, why, None
        holder.n_broken = 0
        wait_s = min(BACKOFF_MIN_S * 2.0 ** min(holder.n_failures, 10), BACKOFF_MAX_S)
        holder.n_failures += 1
        holder.retry_at_s = now_s + wait_s
        self.n_failed += 1
        if is_first:
            seconds = now_s - task.began_s
            details = {"why": why, "again_s": wait_s}
            self._report(
                "replica_failed", holder, task, seconds=seconds, bytes=task.nbytes, **details
            )

    def _report(self, kind: str, holder: _Holder, task: _PushTask, **fields: object) -> None:
        self.events.add(
            kind,
            state=task.state,
            shard=task.shard,
            holder=holder.peer.name,
            **fields,
        )

    def _cancel(self, holder: _Holder) -> None:
        if holder.task is not None:
            holder.task.is_cancelled = True
            holder.task.stop.set()
