"""Which agents are alive, and which get a place in the next roster.

An agent is judged by how long its heartbeat has not changed, on the reader's own clock. Wall clocks
of different hosts are never compared, so a skew or a jump declares nobody dead. A heartbeat is a
growing number; what counts is how long *this* reader has seen it stand still. Time in which the
reader could not read (frozen, cut off, a slow store) counts for little.

Rosters are formed by pure functions over the ready agents. Survivors keep their group rank, so that
their data, caches and checkpoints stay where they are; a new node takes the rank of the node that
it replaces.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpuops.control.client import ControlClient
from gpuops.control.record import (
    ENTRY_ERRORS,
    SLOW_FLAG,
    ControlKeys,
    ControlRecord,
    Member,
    RecordError,
    Roster,
    RunPhase,
    unpack,
)
from gpuops.control.store import ControlStore, ControlStoreError, Entry
from gpuops.incident.budget import allowed_nodes
from gpuops.incident.decision import NodeReport, OnExhausted, RestartPolicy
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)


def request_drain(client: ControlClient, signal_name: str, stop_step: int | None) -> bool:
    """Take a run that has workers from RUN to DRAIN; say whether that was done by this call.

    Ranks that ask whether to stop leave their loops after *stop_step*.
    """

    def change(current: ControlRecord) -> ControlRecord | None:
        if current.phase is not RunPhase.RUN:
            return None
        return replace(
            current,
            phase=RunPhase.DRAIN,
            drain_signal=signal_name,
            drain_step=stop_step,
            reason=f"{signal_name} on {client.me.node}",
            decided_by=client.me.node,
        )

    try:
        return client.update_record(change)
    except ControlStoreError as exc:
        log.debug("the drain is not in the control store yet: %s", exc)
        return False


def stop_without_workers(
    client: ControlClient, signal_name: str, exit_code: int
) -> ControlRecord | None:
    """End a run that has no workers now; return its record once it has ended."""

    def change(current: ControlRecord) -> ControlRecord | None:
        if current.phase not in {RunPhase.RENDEZVOUS, RunPhase.COLLECT}:
            return None
        return replace(
            current,
            phase=RunPhase.STOP,
            exit_code=exit_code,
            drain_signal=signal_name,
            reason=f"{signal_name} on {client.me.node}",
            decided_by=client.me.node,
        )

    try:
        client.update_record(change)
    except ControlStoreError as exc:
        log.debug("the run cannot be ended yet: %s", exc)
    record = client.record
    return record if record.phase is RunPhase.STOP else None


# So much of the time between two reads counts as observed: a peer sends one heartbeat in it.
OBSERVED_GAP_S_MAX = 3.0


class Liveness(StrEnum):
    """How a reader judges a peer."""

    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(slots=True)
class LivenessTracker:
    """One reader's view of its peers; *suspect_s* and *dead_s* count from the last change."""

    suspect_s: float
    dead_s: float
    _last_change: dict[str, tuple[int, int]] = field(default_factory=dict)
    _observed_ns: int | None = None
    _unobserved_ns: int = 0  # in which nothing was read, since the first read

    def observe(self, heartbeats: Mapping[str, int], now_ns: int) -> None:
        """Process the newest number of every peer that has a heartbeat."""
        previous_ns, self._observed_ns = self._observed_ns, now_ns
        if previous_ns is not None:
            self._unobserved_ns += max(
                0, now_ns - previous_ns - round(OBSERVED_GAP_S_MAX * NS_PER_S)
            )
        for peer, number in heartbeats.items():
            previous = self._last_change.get(peer)
            if previous is None or previous[0] != number:
                self._last_change[peer] = (number, now_ns - self._unobserved_ns)
        for peer in self._last_change.keys() - heartbeats.keys():
            del self._last_change[peer]

    def silence_s(self, peer: str, now_ns: int) -> float:
        """Return for how long *peer* has sent no heartbeat; infinite for one that never did."""
        last_change = self._last_change.get(peer)
        observed_ns = now_ns - self._unobserved_ns
        return float("inf") if last_change is None else (observed_ns - last_change[1]) / NS_PER_S

    def status_of(self, peer: str, now_ns: int) -> Liveness:
        """Return how *peer* is judged."""
        silence_s = self.silence_s(peer, now_ns)
        if silence_s >= self.dead_s:
            return Liveness.DEAD
        return Liveness.SUSPECT if silence_s >= self.suspect_s else Liveness.LIVE

    def not_dead(self, peers: Iterable[str], now_ns: int) -> list[str]:
        """Return those of *peers* that are live or suspect, in their order."""
        return [peer for peer in peers if self.status_of(peer, now_ns) is not Liveness.DEAD]


# Agents further back in the succession do not read all heartbeats: the load on the store for each
# agent must not grow with the number of agents.
N_STANDBYS = 8
# As many again watch less often: they take over where all standbys are lost at once.
N_WATCHING = 2 * N_STANDBYS


def succession_of(members: Sequence[Member]) -> list[str]:
    """Return the agents of *members*, in the order of their ranks, as they would lead.

    The first is rank 0. Those that watch share as few failure domains as possible; where none are
    known they are far apart in the order of the ranks, in which neighbours share a rack.
    """
    n, half = len(members), N_STANDBYS
    spread = [k * n // half for k in range(half)]
    spread += [(2 * k + 1) * n // N_WATCHING for k in range(half)]
    left = list(dict.fromkeys((*spread, *range(n)))) if n else []
    n_chosen: Counter[tuple[str, ...]] = Counter()

    def n_shared(at: int) -> tuple[int, ...]:
        path = members[at].domain or ("",)
        return tuple(n_chosen[path[:level]] for level in range(1, len(path) + 1))

    found = []
    for _ in range(min(N_WATCHING, n)):
        chosen = min(left, key=n_shared)
        left.remove(chosen)
        path = members[chosen].domain or ("",)
        n_chosen.update(path[:level] for level in range(1, len(path) + 1))
        found.append(chosen)
    return [members[at].agent for at in (*found, *sorted(left))]


class MembershipView:
    """The agents of the run, as read at the last `refresh`.

    ``roster`` is the newest one that was read, ``checkpoint_step`` the newest checkpoint that any
    agent has reported. ``heartbeats`` has the heartbeats, and ``ready_entries`` the ready agents of
    the generation of the last `read_ready`, by agent.
    """

    def __init__(self, store: ControlStore, keys: ControlKeys, liveness: LivenessTracker) -> None:
        self.roster: Roster | None = None
        self.checkpoint_step: int | None = None
        self.heartbeats: dict[str, Entry] = {}
        self.ready_entries: dict[str, Entry] = {}
        self._store = store
        self._keys = keys
        self._liveness = liveness
        self._agents: dict[str, Member] = {}
        self._arrivals: dict[str, int] = {}
        self._passed_over: frozenset[str] = frozenset()  # in the succession, while others live
        self._refreshed_ns: int | None = None
        self._members: list[str] = []  # of the roster, as they would lead

    def refresh(self, record: ControlRecord, now_ns: int) -> None:
        """Read the agents, their heartbeats and the newest roster.

        Raises:
            ControlStoreError, RecordError: Not all of it was read.
        """
        keys, store = self._keys, self._store
        self._refreshed_ns = now_ns
        heartbeats = store.list(keys.heartbeat())
        self.heartbeats = {key.rpartition("/")[2]: entry for key, entry in heartbeats.items()}
        alive = {agent: entry.version for agent, entry in self.heartbeats.items()}
        self._liveness.observe(alive, now_ns)
        payloads = {agent: _payload(entry) for agent, entry in self.heartbeats.items()}
        self.checkpoint_step = max(
            filter(None, map(_checkpoint_step, payloads.values())), default=self.checkpoint_step
        )
        if alive.keys() - self._agents.keys():
            for key, entry in store.list(keys.agent()).items():
                member = _read_member(entry)
                if member is not None:
                    self._agents[member.agent] = member
                    self._arrivals[key.rpartition("/")[2]] = entry.arrival
        slow = (a for a, payload in payloads.items() if payload.get(SLOW_FLAG) is True)
        excluded = (a for a, member in self._agents.items() if member.node in record.excluded)
        self._passed_over = frozenset((*slow, *excluded))
        generation = (
            record.generation if record.phase is not RunPhase.RENDEZVOUS else record.generation - 1
        )
        while (self.roster is None or self.roster.generation < generation) and generation >= 0:
            roster = _read_roster(
                store.get(keys.roster(generation)), is_current=generation == record.generation
            )
            if roster is not None:
                self.add_roster(roster)
                return
            generation -= 1  # a generation that was given up before it had a roster

    def add_roster(self, roster: Roster | None) -> None:
        """Take in a roster by which workers run, unless a newer one is known."""
        if roster and (self.roster is None or self.roster.generation < roster.generation):
            self.roster = roster
            self._members = succession_of(roster.members)

    def refreshed_within(self, seconds: float, now_ns: int) -> bool:
        """Say whether the last refresh is less than *seconds* ago."""
        return self._refreshed_ns is not None and now_ns - self._refreshed_ns < seconds * NS_PER_S

    def succession(self) -> list[str]:
        """Return all agents in the order in which they would lead."""
        return [*self._members, *self._others()]

    def _others(self) -> list[str]:
        """Return the agents that are not in the roster, as they came."""
        others = self._agents.keys() - set(self._members)
        return sorted(others, key=lambda agent: self._arrivals.get(agent, 0))

    def position(self, agent: str) -> int | None:
        """Return how many that lived at the last refresh would lead before *agent*.

        At most `N_WATCHING` are counted. None for an agent that is not known yet.
        """
        now_ns, n_ahead = self._refreshed_ns, 0
        if now_ns is None:
            return None
        for peers in (self._members, self._others()):
            for peer in peers:
                if peer == agent or n_ahead == N_WATCHING:
                    return n_ahead
                n_ahead += self._liveness.status_of(peer, now_ns) is not Liveness.DEAD
        return None

    def current_leader(self, now_ns: int) -> str | None:
        """Return the leader: the first in the succession that is not dead.

        An agent whose calls all take seconds, or whose node is excluded, comes after the standbys.
        """
        living = self._liveness.not_dead(self.succession(), now_ns)
        ahead = living[:N_STANDBYS]
        return next(
            (agent for agent in ahead if agent not in self._passed_over), next(iter(living), None)
        )

    @property
    def dead_agents(self) -> tuple[str, ...]:
        """Return the agents that were dead at the last refresh; none before the first."""
        now_ns = self._refreshed_ns
        if now_ns is None:
            return ()
        return tuple(
            a for a in self.succession() if self._liveness.status_of(a, now_ns) is Liveness.DEAD
        )

    def liveness_of(self, agent: str, now_ns: int) -> Liveness:
        """Return how *agent* is judged."""
        return self._liveness.status_of(agent, now_ns)

    def silence_s(self, agent: str, now_ns: int) -> float:
        """Return for how long *agent* has sent no heartbeat; infinite for one that never did."""
        return self._liveness.silence_s(agent, now_ns)

    def closed_agents(self, agents: Iterable[str], now_ns: int) -> frozenset[str]:
        """Return those of *agents* whose heartbeat is gone although they did not leave.

        The store removes it with their connection: their process has ended, or was cut off.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        gone = (a for a in agents if self.silence_s(a, now_ns) == float("inf"))
        return frozenset(a for a in gone if self._store.get(self._keys.agent(a)).version)

    def live_nodes(self, record: ControlRecord, now_ns: int) -> tuple[str, ...]:
        """Return the nodes of all agents that are not dead, without the excluded ones."""
        agents = self._liveness.not_dead(self.succession(), now_ns)
        nodes = dict.fromkeys(self._agents[a].node for a in agents if a in self._agents)
        return tuple(node for node in nodes if node not in record.excluded)

    def read_ready(self, generation: int, now_ns: int) -> list[Member]:
        """Return the agents that are ready for *generation* and not dead, in order of arrival.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        entries = self._store.list(self._keys.ready(generation))
        self.ready_entries = {key.rpartition("/")[2]: entry for key, entry in entries.items()}
        members = [member for entry in entries.values() if (member := _read_member(entry))]
        return [
            m for m in members if self._liveness.status_of(m.agent, now_ns) is not Liveness.DEAD
        ]

    def read_settled(self, generation: int) -> frozenset[str]:
        """Return the agents that have nothing more to do for *generation*.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        keys = self._store.list(self._keys.settled(generation))
        return frozenset(key.rpartition("/")[2] for key in keys)

    def read_reports(self, generation: int) -> dict[str, NodeReport]:
        """Return the reports on *generation* by agent, in order of arrival.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        found = {}
        for key, entry in self._store.list(self._keys.report(generation)).items():
            try:
                report = NodeReport.from_json(unpack(entry.value))
            except ENTRY_ERRORS as exc:
                log.warning("a report on generation %d cannot be read: %s", generation, exc)
                continue
            found[key.rpartition("/")[2]] = replace(report, arrival=entry.arrival)
        return found


def _payload(entry: Entry) -> Json:
    try:
        return unpack(entry.value)
    except ENTRY_ERRORS:
        return {}


def _checkpoint_step(payload: Json) -> int | None:
    step = payload.get("checkpoint_step")
    return step if isinstance(step, int) else None


def _read_roster(entry: Entry, *, is_current: bool) -> Roster | None:
    """Return the roster in *entry*, None where there is none, or one that never ran.

    Of an earlier generation nobody could have followed one that cannot be read: another was formed,
    and whoever did so may have died before it was deleted.

    Raises:
        RecordError: It cannot be read, and workers run by it (*is_current*).
    """
    if not entry.version:
        return None
    try:
        return Roster.from_bytes(entry.value)
    except RecordError:
        if is_current:
            raise
        return None


def _read_member(entry: Entry) -> Member | None:
    try:
        return Member.from_json(unpack(entry.value))
    except ENTRY_ERRORS as exc:
        log.warning("an agent's entry cannot be read: %s", exc)
        return None


def trainable_count(n_ready: int, policy: RestartPolicy) -> int:
    """Return how many nodes may train when *n_ready* are ready: 0 where they are too few."""
    allowed = allowed_nodes(n_ready, policy)
    must_be_full = policy.on_exhausted is OnExhausted.REQUEUE
    return 0 if must_be_full and allowed < allowed_nodes(policy.nodes_max, policy) else allowed


def form_roster(
    generation: int,
    ready: Sequence[Member],
    previous: Roster | None,
    policy: RestartPolicy,
    excluded: Collection[str] = (),
) -> Roster | None:
    """Return the roster of *generation*, None where too few are ready.

    Args:
        generation: Its number.
        ready: The agents that can join, in order of arrival.
        previous: The last generation's roster: its members come first, with their old ranks.
        policy: How many nodes, and in what units.
        excluded: Nodes that do not join.
    """
    candidates = _newest_per_node([member for member in ready if member.node not in excluded])
    size = trainable_count(len(candidates), policy)
    if size == 0:
        return None
    ordered = (
        _by_hint(candidates) if previous is None else _keep_group_ranks(candidates, previous, size)
    )
    return Roster(generation=generation, members=ordered[:size], spares=ordered[size:])


def _newest_per_node(ready: Sequence[Member]) -> list[Member]:
    """Return the newest agent of each node: an older one is dead or has been replaced."""
    newest = {member.node: member for member in ready}
    return [member for member in ready if newest[member.node] is member]


def _by_hint(candidates: Sequence[Member]) -> tuple[Member, ...]:
    """Return *candidates* by the launcher's rank; those without one follow in order of arrival."""
    hinted = [member for member in candidates if member.node_rank_hint is not None]
    return (
        *sorted(hinted, key=lambda member: member.node_rank_hint or 0),
        *(member for member in candidates if member.node_rank_hint is None),
    )


def _keep_group_ranks(
    candidates: Sequence[Member], previous: Roster, size: int
) -> tuple[Member, ...]:
    old_rank = {member.node: group_rank for group_rank, member in enumerate(previous.members)}
    survivors = sorted(
        (member for member in candidates if member.node in old_rank),
        key=lambda member: old_rank[member.node],
    )
    newcomers = [member for member in _by_hint(candidates) if member.node not in old_rank]
    placed: dict[int, Member] = {}
    moved = []
    for member in survivors:
        group_rank = old_rank[member.node]
        if group_rank < size:
            placed[group_rank] = member
        else:
            moved.append(member)
    remaining = iter([*moved, *newcomers])
    for group_rank in range(size):
        if group_rank not in placed:
            placed[group_rank] = next(remaining)
    return (*(placed[group_rank] for group_rank in range(size)), *remaining)
