"""Which state is committed; pure, and called by the leader.

`judge` derives the next commit record from what all nodes report. A state is committed once every
node of the generation has as many copies of it as were asked for. A state that some node will
never have is dropped, which frees its memory on the others. Earlier decisions stand: the newest
record is the first argument, and the result replaces it by compare-and-swap.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuops.agent.checkpoint.messages import (
    BEHIND_MAX,
    DROPPED_MAX,
    WHY_CHARS_MAX,
    CommitRecord,
    FinalCommitRecord,
    FinalStatus,
    NodeStatus,
)
from gpuops.checkpoint.types import StateId
from gpuops.units import format_seconds

# From reading the heartbeats until all nodes have read the resulting decision: `LEAD_S` until it is
# measured. What is measured is bounded, since one node may have stood still for once.
LEAD_S, LEAD_MAX_S = 3.0, 60.0
MEASURED_S_MIN, MEASURED_S_MAX, N_MEASURED = 0.2, 10.0, 8
N_STEPS_SEEN = 32
CALMER = 0.8
OVERDUE_S = 60.0  # while a state is complete on some nodes only: one of them lost track of it
# Once it is complete on all nodes only copies are in transit. They take as long as the network
# takes, and keepers report holders that accept none as gone; this limit covers unreported cases.
COPIED_MAX_S = 3600.0
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSummary:
    """The last status of each agent of a generation; ``members`` are those that train.

    States of another ``epoch`` belong to former workers. ``overdue`` states have waited too long
    for a node. ``next_step`` is the first step that all can save once the present decision has
    reached them. ``resumed`` is the state that the generation loaded, None without one, or where
    another number of ranks saved it. ``equal_at`` returns the keys of the groups of ranks whose
    digests of a state are all known and equal. ``leader`` is the leader's node; ``nodes`` maps
    agents to nodes.
    """

    generation: int
    epoch: int
    members: tuple[str, ...]
    statuses: Mapping[str, NodeStatus]
    is_replicated: bool = True
    overdue: frozenset[StateId] = field(default_factory=frozenset)
    next_step: int | None = None
    resumed: StateId | None = None
    leader: str = ""
    nodes: Mapping[str, str] = field(default_factory=dict)
    equal_at: Callable[[StateId], tuple[str, ...]] = lambda _state: ()

    @property
    def last(self) -> frozenset[StateId]:
        """The final states that ranks requested: refused or dropped, they are still saved."""
        found = {status.final_state for status in self.statuses.values()}
        return frozenset(s for s in found if s is not None and s.epoch == self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSaveState:
    """One node's progress: the final states ``missing`` on it, and whether its part is written."""

    node: str
    status: FinalStatus
    missing: frozenset[StateId] = frozenset()
    has_written: bool = True


def judge_final(
    before: FinalCommitRecord, nodes: list[FinalSaveState], persist: StateId | None
) -> FinalCommitRecord:
    """Return the record after *before*. *persist* is the state being written, None without one."""
    missed, why = before.missed, before.why
    for node in nodes:
        gone = max(node.missing, default=None) if node.status.is_over else None
        if gone is not None and (missed is None or gone > missed):
            missed, why = gone, f"not all ranks of {node.node} saved it"
        is_stuck = persist is not None and node.status.is_stuck_at(persist)
        if is_stuck and persist is not None and (missed is None or persist > missed):
            missed, why = persist, f"{node.node}: {node.status.trouble}"
    found = FinalCommitRecord(missed=missed, why=why[:WHY_CHARS_MAX])
    if not any(node.status.waits for node in nodes):
        return found
    return replace(
        found,
        pieces=sum(node.status.pieces for node in nodes),
        behind=tuple(node.node for node in nodes if not node.has_written)[:BEHIND_MAX],
    )


def judge(before: CommitRecord, summary: StatusSummary) -> CommitRecord:
    """Return the commit record after *before*; *before* itself where nothing changes."""
    statuses = _current_statuses(summary)
    if summary.generation < before.generation or not statuses:
        return before
    still = tuple(state for state in before.dropped if state not in summary.last)
    before = replace(before, dropped=still) if still != before.dropped else before
    now = replace(before, generation=summary.generation)
    committed = _committed(before, summary, statuses)
    dropped = _dropped(now, summary, statuses, committed)
    persist = _persist(before, summary, statuses, committed)
    sealed = _sealed(before, summary, statuses)
    is_freed = committed != before.committed or set(dropped) - set(before.dropped)
    aim = before.aim
    if is_freed and summary.next_step is not None:
        aim = StateId(summary.epoch, summary.next_step)
    persisted = _newest([before.persisted, *(w.persisted for w in statuses)])
    is_left = sealed is not None and (persisted is None or persisted < sealed)
    found = replace(
        now,
        committed=committed,
        dropped=dropped,
        persist=persist,
        # Decided together with the state: all nodes go by the same keys.
        once=before.once if persist == before.persist else _equal_at(summary, persist),
        sealed=sealed,
        persisted=persisted,
        sealer=summary.leader if is_left else before.sealer,
        aim=aim if aim is None or before.aim is None else max(aim, before.aim),
        last=judge_final(
            before.last, _final_saves(summary, persist), _unwritten(persist, persisted)
        ),
    )
    return before if replace(found, generation=before.generation) == before else found


def _newest(states: Iterable[StateId | None]) -> StateId | None:
    return max((state for state in states if state is not None), default=None)


def _unwritten(persist: StateId | None, persisted: StateId | None) -> StateId | None:
    is_written = persist is None or (persisted is not None and persisted >= persist)
    return None if is_written else persist


def _current_statuses(summary: StatusSummary) -> list[NodeStatus]:
    """Return the statuses of members, without those of another generation."""
    found = [summary.statuses.get(agent) for agent in summary.members]
    return [one for one in found if one is not None and one.generation == summary.generation]


def _final_saves(summary: StatusSummary, persist: StateId | None) -> list[FinalSaveState]:
    """Return the progress of each node of the generation with the final states."""
    found = []
    for agent in summary.members:
        status = summary.statuses.get(agent)
        if status is None or status.generation != summary.generation:
            continue
        is_written = persist in status.parts or _unwritten(persist, status.persisted) is None
        found.append(
            FinalSaveState(
                node=summary.nodes.get(agent, agent),
                status=status.last,
                missing=frozenset(state for state in summary.last if not _has(status, state)),
                has_written=is_written,
            )
        )
    return found


def _is_complete(summary: StatusSummary, statuses: list[NodeStatus]) -> bool:
    return bool(summary.members) and len(statuses) == len(summary.members)


def _committed(
    before: CommitRecord, summary: StatusSummary, statuses: list[NodeStatus]
) -> StateId | None:
    if not _is_complete(summary, statuses):
        return before.committed
    had = [
        set(w.replicated) if summary.is_replicated else {*w.whole, *w.replicated} for w in statuses
    ]
    common = set.intersection(*had) - set(before.dropped)
    return _newest([before.committed, *(s for s in common if s.epoch == summary.epoch)])


def _dropped(
    before: CommitRecord,
    summary: StatusSummary,
    statuses: list[NodeStatus],
    committed: StateId | None,
) -> tuple[StateId, ...]:
    held = {s for w in statuses for s in (*w.whole, *w.replicated) if s.epoch == summary.epoch}
    overdue = summary.overdue - summary.last
    lost = {
        s for s in held if s in overdue or any(_will_miss(w, s, summary.last) for w in statuses)
    }
    both = (lost | set(before.dropped)) - {committed}
    newest = sorted((s for s in both if committed is None or s > committed), reverse=True)
    return tuple(newest[:DROPPED_MAX])


def _has(status: NodeStatus, state: StateId) -> bool:
    """Return whether a node has *state*, or is saving it, or has a newer committed one."""
    return state == status.in_flight or _has_complete(status, state)


def _has_complete(status: NodeStatus, state: StateId) -> bool:
    if state in status.whole or state in status.replicated:
        return True
    return status.newest is not None and status.newest >= state


def why_overdue(summary: StatusSummary, state: StateId) -> str:
    """Return which nodes the overdue *state* has waited for."""
    statuses = [
        (summary.nodes.get(agent, agent), summary.statuses.get(agent)) for agent in summary.members
    ]
    lacking = [
        node for node, status in statuses if status is None or not _has_complete(status, state)
    ]
    if lacking:
        return (
            f"{_named(lacking)} did not have it {format_seconds(OVERDUE_S)} after other nodes had"
        )
    slow = [
        node for node, status in statuses if status is not None and state not in status.replicated
    ]
    limit = format_seconds(COPIED_MAX_S)
    return f"the copies of what {_named(slow)} saved were not at their holders after {limit}"


def _named(nodes: list[str]) -> str:
    more = "" if len(nodes) <= _NAMED_MAX else f" and {len(nodes) - _NAMED_MAX} more"
    return f"{', '.join(nodes[:_NAMED_MAX])}{more}"


def _will_miss(status: NodeStatus, state: StateId, last: frozenset[StateId]) -> bool:
    """Return whether a node does not have *state*, and is past its step."""
    if _has(status, state):
        return False
    if state in last:
        return status.last.is_over  # until then its ranks may request it again
    is_past = status.decided is not None and status.decided.step >= state.step
    return state in status.refused or is_past


def _persist(
    before: CommitRecord,
    summary: StatusSummary,
    statuses: list[NodeStatus],
    committed: StateId | None,
) -> StateId | None:
    """Return the state to persist: the newest, once all nodes know of the previous one."""
    is_ours = committed is not None and committed.epoch == summary.epoch
    if not is_ours or committed == before.persist or not any(w.is_due for w in statuses):
        return before.persist
    last = before.persist
    if last is not None and last.epoch == summary.epoch and any(w.told != last for w in statuses):
        return last
    return committed


def _equal_at(summary: StatusSummary, state: StateId | None) -> tuple[str, ...]:
    return () if state is None else summary.equal_at(state)


def _sealed(
    before: CommitRecord, summary: StatusSummary, statuses: list[NodeStatus]
) -> StateId | None:
    if not _is_complete(summary, statuses):
        return before.sealed
    common = set.intersection(*(set(w.parts) for w in statuses))
    # A restart may come between the writing of a state and its commit in the directory.
    epochs = {summary.epoch} | ({summary.resumed.epoch} if summary.resumed is not None else set())
    return _newest([before.sealed, *(s for s in common if s.epoch in epochs)])


class SavePacer:
    """Estimates a step that no node has reached by the time all have received a decision.

    Nodes receive a decision at different times; if each saved its next step, they would save
    different ones. So the leader names a step ahead of all of them: by how long it last took, at
    most, until all nodes had reported a commit. That is the way there and back, and as old may be
    the steps that they report.
    """

    def __init__(self) -> None:
        self._measured_s: deque[float] = deque(maxlen=N_MEASURED)
        self._unreported: tuple[StateId, float] | None = None  # the newest commit, and since when
        self._factor = 1.0
        self._raised_at = -1  # the step that was named last, when the factor was raised
        self._steps: deque[tuple[int, float]] = deque(maxlen=N_STEPS_SEEN)
        self._complete_since_s: dict[StateId, float] = {}
        self._missing_since_s: dict[StateId, float] = {}  # on at least one node

    def observe(self, statuses: Mapping[str, NodeStatus], now_s: float, n_nodes: int) -> None:
        """Take in the statuses at *now_s* of those of *n_nodes* that report one."""
        asked = max((w.decided.step for w in statuses.values() if w.decided), default=None)
        if asked is not None and (not self._steps or asked != self._steps[-1][0]):
            if self._steps and asked < self._steps[-1][0]:
                self._steps.clear()  # the job was restarted from an older step
            self._steps.append((asked, now_s))
        held = {state for w in statuses.values() for state in (*w.whole, *w.replicated)}
        self._complete_since_s = {s: self._complete_since_s.get(s, now_s) for s in held}
        all_have = {
            s for s in held if all(_has_complete(status, s) for status in statuses.values())
        }
        if self._unreported is not None and len(statuses) >= n_nodes:
            state, since_s = self._unreported
            if all(w.newest is not None and w.newest >= state for w in statuses.values()):
                self._measured_s.append(now_s - since_s)
                self._unreported = None
        had_s = dict.fromkeys(all_have if len(statuses) >= n_nodes else (), now_s)
        self._missing_since_s = {s: had_s.get(s, self._missing_since_s.get(s, now_s)) for s in held}

    def overdue(self, now_s: float) -> frozenset[StateId]:
        """Return states that have been complete on a node for too long without a commit."""
        return frozenset(
            state
            for state, since_s in self._complete_since_s.items()
            if now_s - self._missing_since_s[state] >= OVERDUE_S or now_s - since_s >= COPIED_MAX_S
        )

    def next_step(self) -> int | None:
        """Return the step, None where no node has reported one yet."""
        if not self._steps:
            return None
        (first, first_s), (last, last_s) = self._steps[0], self._steps[-1]
        rate = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        return last + 1 + math.ceil(rate * self._lead_s)

    @property
    def _lead_s(self) -> float:
        measured_s = min(max(self._measured_s, default=LEAD_S), MEASURED_S_MAX)
        return min(self._factor * max(measured_s, MEASURED_S_MIN), LEAD_MAX_S)

    def learn(self, before: CommitRecord, after: CommitRecord, now_s: float) -> None:
        """Adjust the lead: after a dropped state the named step was too early.

        Steps that had been named by then may be too early as well, and tell nothing new.
        """
        dropped = set(after.dropped) - set(before.dropped)
        if any(state.step > self._raised_at for state in dropped):
            self._factor = min(2 * self._factor, LEAD_MAX_S / MEASURED_S_MIN)
            self._raised_at = -1 if after.aim is None else after.aim.step
        elif after.committed is not None and after.committed != before.committed:
            self._factor = max(CALMER * self._factor, 1.0)
            self._unreported = (after.committed, now_s)
