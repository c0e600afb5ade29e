"""Pushes what this node saved to its holders, and knows what has arrived there.

Nothing is queued: whenever a holder is idle, the next shard that it lacks is looked for, of the
state that waits for its commit first, then of the newest committed one. One push to a holder at a
time, so that a holder that hangs keeps no other waiting; one that has taken nothing for a while
counts as gone, so that no commit waits for the dead, and is tried again ever more rarely.

Used by the thread of the messages; the pushes themselves are jobs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.messages import shard_to_json, state_to_json
from gpuops.checkpoint.node_memory import Held, NodeMemory
from gpuops.checkpoint.states import CorruptError, Shard, StateId
from gpuops.checkpoint.transfer_auth import JobPass
from gpuops.checkpoint.transfer_client import Pushed, push
from gpuops.checkpoint.transfer_gaps import GapPace
from gpuops.checkpoint.transfer_line import Limits
from gpuops.checkpoint.transfer_pace import Pace
from gpuops.checkpoint.transfer_team import Peer, Terms
from gpuops.checkpoint.transfer_turns import PinnedCopy
from gpuops.checkpoint.transfer_wire import Push, Refusal, RefusedError
from gpuops.host.clock import SystemClock

HOLDERS_MAX = 16
GONE_S = 10.0
# A push to a holder that was gone pins a slot, so it has to be brief.
PROBE_S = 2.0
AGAIN_S = 0.5
BACKOFF_MIN_S = 10.0
BACKOFF_MAX_S = 120.0
_DEADLINE_S = 86_400.0  # what counts is whether something moves
_LIMITS = Limits(stall_s=5.0)
_N_CONNECTIONS = 2
# Of the time between two states, replicas have this part before they take no heed of the training.
WITHIN_SHARE = 0.8
WITHIN_MIN_S = 1.0  # nodes agree on a commit about as often
WITHIN_MAX_S = 60.0
WITHIN_FIRST_S = 2.0
_GAPS_KEPT = 9
# Of pushes in a row that broke off with nothing coming through any more: the holder takes some and
# never has all.
BROKEN_MAX = 5
# That the holder will not change its mind about within seconds.
_FOR_GOOD = (Refusal.NO_ROOM, Refusal.DIFFERENT)


class _Watched(Pace):
    """A pace that others have, too; *moved* is called each time that bytes are about to be sent."""

    def __init__(self, pace: Pace, moved: Callable[[], None]) -> None:
        super().__init__(None, SystemClock())
        self._pace = pace
        self._moved = moved

    @property
    def bytes_per_s(self) -> float | None:
        return self._pace.bytes_per_s

    def turn(self, nbytes: int) -> float:
        self._moved()
        return self._pace.turn(nbytes)

    def wait_s(self, turn: float) -> float:
        return self._pace.wait_s(turn)


@dataclass(eq=False, slots=True)
class _Task:
    """One push. ``moved_s``: when some of it was last sent, or since when nothing comes through."""

    state: StateId
    shard: Shard
    nbytes: int
    began_s: float
    moved_s: float
    has_moved: bool = False
    is_over: bool = False  # what becomes of it is of no interest any more
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False, slots=True)
class _Holder:
    """``is_gone``: no commit waits for it. ``again_s``: nothing is pushed to it before.

    ``broken``: so many pushes in a row have sent some and not come to an end.
    """

    peer: Peer
    task: _Task | None = None
    failing_since_s: float | None = None
    is_gone: bool = False
    failures: int = 0
    broken: int = 0
    again_s: float = 0.0
    why: str = ""

    @property
    def limit_s(self) -> float:
        return PROBE_S if self.is_gone else GONE_S


@dataclass(slots=True)
class AskedFor:
    """How often the ranks ask for a state to be saved, whether it is or not.

    ``within_s``: in so much of the time until the next one replicas have to be at their holders.
    """

    within_s: float = WITHIN_FIRST_S
    _last: tuple[StateId, float] | None = None
    _gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS_KEPT))

    def look(self, now_s: float, asked: StateId | None) -> None:
        """Take note of the newest state that was *asked* for by now."""
        last = self._last
        if asked is None or (last is not None and asked == last[0]):
            return
        self._last = (asked, now_s)
        if last is None or asked.epoch != last[0].epoch:
            self._gaps_s.clear()
            self.within_s = WITHIN_FIRST_S
            return
        self._gaps_s.append(now_s - last[1])
        part = WITHIN_SHARE * median(self._gaps_s)
        self.within_s = min(max(part, WITHIN_MIN_S), WITHIN_MAX_S)


@dataclass(slots=True)
class Replication:
    """The pushes of one node. ``job`` None: this keeper is not among peers yet.

    *mine* are the shards of the ranks that run here now: what older ones left is not pushed, since
    the holders of now are not those of then.
    """

    memory: NodeMemory
    jobs: Jobs
    events: Events
    pace: GapPace
    mine: Callable[[], Collection[Shard]]
    clock_s: Callable[[], float] = time.monotonic
    job: JobPass | None = None
    damaged: Callable[[StateId, Shard, int], None] = lambda _state, _shard, _number: None
    pushed: int = 0
    failed: int = 0
    pushed_bytes: int = 0
    _holders: dict[Peer, _Holder] = field(default_factory=dict)
    _arrived: dict[StateId, set[tuple[Shard, Peer]]] = field(default_factory=dict)
    _n_pins: int = 0
    _asked: AskedFor = field(default_factory=AskedFor)
    _due_s: dict[StateId, float] = field(default_factory=dict)

    def to(self, holders: Sequence[Peer]) -> None:
        """Push to *holders* from now on, and to no other."""
        for peer in set(self._holders) - set(holders):
            self._drop(self._holders.pop(peer))
            for arrived in self._arrived.values():
                # It may let go of it; should it be a holder again, it is asked.
                arrived.difference_update([pair for pair in arrived if pair[1] == peer])
        for peer in holders:
            self._holders.setdefault(peer, _Holder(peer))
        self.pump()

    def stop(self) -> None:
        """End all pushes: what they are of may not be what the job goes on from."""
        for holder in self._holders.values():
            self._drop(holder)
            holder.failing_since_s = None
            holder.again_s = 0.0

    def is_replicated(self, state: StateId) -> bool:
        """Say whether every holder that lives has all that this node saved of *state*, verified."""
        held = self.memory.held(state)
        arrived = self._arrived.get(state, set())
        return bool(held) and all(
            holder.is_gone or (shard, holder.peer) in arrived
            for holder in self._holders.values()
            for shard in set(held).intersection(self.mine())
        )

    def pump(self) -> None:
        """Begin what can be begun, end what is not wanted any more or does not move."""
        now_s, wanted = self.clock_s(), self._wanted()
        self._asked.look(now_s, self.memory.gate.decided)
        for state in [s for s in self._arrived if s not in self.memory.gate.whole()]:
            del self._arrived[state]
        self._due_s = {s: self._due_s.get(s, now_s + self._asked.within_s) for s in wanted}
        for holder in self._holders.values():
            task = holder.task
            if task is None:
                if now_s >= holder.again_s and self.job is not None:
                    self._push_next(holder, self.job, wanted, now_s)
            elif task.state not in wanted:
                task.is_over = True
                task.stop.set()
            elif not task.is_over and now_s - task.moved_s > holder.limit_s:
                task.is_over = True
                task.stop.set()
                why = f"{holder.peer} has taken nothing for {now_s - task.moved_s:.0f} s"
                self._give_up(holder, task, f"{why}: {holder.why}" if holder.why else why)

    def counts(self) -> dict[str, object]:
        """Return what was counted so far, by name, and who is gone and why."""
        return {
            "replicas_pushed": self.pushed,
            "replicas_failed": self.failed,
            "replica_bytes": self.pushed_bytes,
            "replicas_yielded_s": round(self.pace.yielded_s, 3),
            "holders": [holder.peer.name for holder in self._holders.values()],
            "holders_gone": [h.peer.name for h in self._holders.values() if h.is_gone],
        }

    def _wanted(self) -> list[StateId]:
        gate = self.memory.gate
        if gate.epoch is None:
            return []
        whole = gate.whole()
        return [s for s in (gate.in_flight, gate.newest) if s is not None and s in whole]

    def _push_next(
        self, holder: _Holder, job: JobPass, wanted: Sequence[StateId], now_s: float
    ) -> None:
        mine = self.mine()
        for state in wanted:
            arrived = self._arrived.get(state, set())
            held = self.memory.held(state)
            for shard in sorted(set(held).intersection(mine)):
                if (shard, holder.peer) not in arrived:
                    self._push(holder, job, held[shard], now_s)
                    return

    def _push(self, holder: _Holder, job: JobPass, held: Held, now_s: float) -> None:
        copy, gate = held.copy, self.memory.gate
        since_s = now_s if holder.failing_since_s is None else holder.failing_since_s
        is_probe = holder.is_gone
        task = _Task(
            copy.state, copy.shard, copy.digest.nbytes, now_s, now_s if is_probe else since_s
        )
        holder.task = task
        self._n_pins += 1
        who = f"push-{self._n_pins}"
        gate.pin(copy.state, who)
        self._owe(now_s)
        digest = copy.digest
        offer = Push(copy.state, copy.shard, copy.layout, digest.nbytes, digest.root, gate.newest)
        pinned = PinnedCopy(
            held.memory.fd,
            digest,
            damaged=lambda number: self.jobs.post(
                lambda: self.damaged(copy.state, copy.shard, number)
            ),
            view=held.memory.view,
        )
        terms = Terms(
            _DEADLINE_S,
            holder.limit_s,
            n_connections=_N_CONNECTIONS,
            limits=_LIMITS,
            stop=task.stop,
        )

        def moved() -> None:
            task.moved_s, task.has_moved = self.clock_s(), True

        def work() -> Pushed:
            return push(holder.peer, job, offer, pinned, terms, _Watched(self.pace, moved))

        def then(done: Pushed | None, error: BaseException | None) -> None:
            gate.unpin(who)
            self.memory.release()
            if holder.task is task:
                holder.task = None
            if done is not None:
                self._has_arrived(holder, task, done)
            elif not task.is_over:
                self._has_failed(holder, task, error)
            self.pump()

        self.jobs.push(work, then)

    def _owe(self, now_s: float) -> None:
        """Tell the pace what is still to be sent, and by when."""
        left = {state: self._left_bytes(state) for state in self._due_s}
        due_s = min((self._due_s[state] for state, nbytes in left.items() if nbytes), default=now_s)
        self.pace.owe(sum(left.values()), max(due_s - now_s, 0.0))

    def _left_bytes(self, state: StateId) -> int:
        """Return how much of *state* is still to be sent to holders that live."""
        mine, arrived = self.mine(), self._arrived.get(state, set())
        return sum(
            held.copy.digest.nbytes
            for shard, held in self.memory.held(state).items()
            if shard in mine
            for holder in self._holders.values()
            if not holder.is_gone and (shard, holder.peer) not in arrived
        )

    def _has_arrived(self, holder: _Holder, task: _Task, done: Pushed) -> None:
        if holder.peer not in self._holders:
            return
        self._arrived.setdefault(task.state, set()).add((task.shard, holder.peer))
        holder.failing_since_s, holder.is_gone, holder.failures = None, False, 0
        holder.again_s, holder.why, holder.broken = 0.0, "", 0
        self.pushed += 1
        self.pushed_bytes += done.sent_bytes
        self._tell("replicated", holder, task, seconds=done.seconds, bytes=done.sent_bytes)

    def _has_failed(self, holder: _Holder, task: _Task, error: BaseException | None) -> None:
        now_s = self.clock_s()
        is_for_good = isinstance(error, CorruptError) or (
            isinstance(error, RefusedError) and error.code in _FOR_GOOD
        )
        holder.broken += task.has_moved
        is_for_good = is_for_good or holder.broken >= BROKEN_MAX
        if is_for_good or holder.is_gone or now_s - task.moved_s >= GONE_S:
            self._give_up(holder, task, str(error) or repr(error))
            return
        holder.failing_since_s, holder.why = task.moved_s, str(error)
        holder.again_s = now_s + AGAIN_S

    def _give_up(self, holder: _Holder, task: _Task, why: str) -> None:
        """Wait no more for *holder*; it is told once, and tried again later."""
        now_s = self.clock_s()
        is_news = not holder.is_gone
        holder.is_gone, holder.why, holder.failing_since_s = True, why, None
        holder.broken = 0
        wait_s = min(BACKOFF_MIN_S * 2.0 ** min(holder.failures, 10), BACKOFF_MAX_S)
        holder.failures += 1
        holder.again_s = now_s + wait_s
        self.failed += 1
        if is_news:
            seconds = now_s - task.began_s
            more = {"why": why, "again_s": wait_s}
            self._tell("replica_failed", holder, task, seconds=seconds, bytes=task.nbytes, **more)

    def _tell(self, kind: str, holder: _Holder, task: _Task, **fields: object) -> None:
        self.events.add(
            kind,
            state=state_to_json(task.state),
            shard=shard_to_json(task.shard),
            holder=holder.peer.name,
            **fields,
        )

    def _drop(self, holder: _Holder) -> None:
        if holder.task is not None:
            holder.task.is_over = True
            holder.task.stop.set()
