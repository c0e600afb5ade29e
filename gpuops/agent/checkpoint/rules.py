"""Which state is committed, and which one a generation loads; pure, and called by the leader.

`judge` derives the next commit record from what all nodes report. A state is committed once every
node of the generation has as many copies of it as were asked for. A state that some node will
never have is dropped, which frees its memory on the others. Earlier decisions stand: the newest
record is the first argument, and the result replaces it by compare-and-swap.

`notes_for` and `restore_of` derive the plan of a generation from what the agents hold when it
forms: which state it loads, and who holds whose copies.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuops.agent.checkpoint.messages import (
    BEHIND_MAX,
    DROPPED_MAX,
    WHY_CHARS_MAX,
    CommitRecord,
    FinalCommitRecord,
    FinalStatus,
    GenerationPlan,
    Inventory,
    NodeStatus,
    StoredStates,
)
from gpuops.checkpoint.agreement.recovery import RestoreInputs, RestorePlan, plan_restore
from gpuops.checkpoint.placement.domains import DomainPath, align_paths
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement, place, rebalance
from gpuops.checkpoint.placement.survival import n_colocated
from gpuops.checkpoint.types import (
    CheckpointError,
    Digest,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.control.record import Roster
from gpuops.units import format_seconds

LEAD_S = 3.0  # from a look at the heartbeats until all nodes have read what follows from them
LEAD_MAX_S = 60.0
CALMER = 0.8
OVERDUE_S = 60.0  # while some have it whole and some do not: somebody lost count of it
# Where all have it whole only copies are under way. They take as long as the network takes, and
# whoever takes none of them counts as gone by the word of each keeper; this is for what nobody saw.
COPIED_MAX_S = 3600.0
_NAMED_MAX = 4
# Of what a directory has: more than one only where the newest failed after it was loaded.
STORED_LOOKED_AT = 3
DIRECTORY = "the directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSummary:
    """The last status of all agents of a generation; ``seated`` are those that train.

    States of another ``epoch`` are of former workers. ``overdue`` have waited for too long for some
    node. ``aim`` is the first step that all can save after what is now decided has reached them.
    ``leader`` is the node of who judges; ``nodes`` names those of the agents.
    """

    generation: int
    epoch: int
    seated: tuple[str, ...]
    said: Mapping[str, NodeStatus]
    is_replicated: bool = True
    overdue: frozenset[StateId] = field(default_factory=frozenset)
    aim: int | None = None
    leader: str = ""
    nodes: Mapping[str, str] = field(default_factory=dict)

    @property
    def last(self) -> frozenset[StateId]:
        """The states that ranks asked for as the last ones: refused or dropped, they come yet."""
        found = {word.final_state for word in self.said.values()}
        return frozenset(s for s in found if s is not None and s.epoch == self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSaveState:
    """How far one node is: ``lacks`` of the last states, and whether its part is written."""

    node: str
    word: FinalStatus
    lacks: frozenset[StateId] = frozenset()
    has_written: bool = True


def judge_last(
    before: FinalCommitRecord, parts: list[FinalSaveState], persist: StateId | None
) -> FinalCommitRecord:
    """Return the mark after *before*. *persist* is being written by all, None where none is."""
    missed, why = before.missed, before.why
    for part in parts:
        gone = max(part.lacks, default=None) if part.word.is_over else None
        if gone is not None and (missed is None or gone > missed):
            missed, why = gone, f"not all ranks of {part.node} saved it"
        is_stuck = persist is not None and part.word.is_stuck_at(persist)
        if is_stuck and persist is not None and (missed is None or persist > missed):
            missed, why = persist, f"{part.node}: {part.word.trouble}"
    if not any(part.word.waits for part in parts):
        return FinalCommitRecord(missed=missed, why=why[:WHY_CHARS_MAX])
    return FinalCommitRecord(
        missed=missed,
        why=why[:WHY_CHARS_MAX],
        pieces=sum(part.word.pieces for part in parts),
        behind=tuple(part.node for part in parts if not part.has_written)[:BEHIND_MAX],
    )


def judge(before: CommitRecord, heard: StatusSummary) -> CommitRecord:
    """Return the watermark after *before*; *before* itself where nothing follows."""
    said = [heard.said.get(agent) for agent in heard.seated]
    words = [one for one in said if one is not None and one.generation == heard.generation]
    if heard.generation < before.generation or not words:
        return before
    still = tuple(state for state in before.dropped if state not in heard.last)
    before = replace(before, dropped=still) if still != before.dropped else before
    now = replace(before, generation=heard.generation)
    committed = _committed(before, heard, words)
    dropped = _dropped(now, heard, words, committed)
    persist = _persist(before, heard, words, committed)
    sealed = _sealed(before, heard, words)
    is_freed = committed != before.committed or set(dropped) - set(before.dropped)
    aim = before.aim
    if is_freed and heard.aim is not None:
        aim = StateId(heard.epoch, heard.aim)
    there = [w.persisted for w in words if w.persisted is not None]
    persisted = max([*there, *([before.persisted] if before.persisted else [])], default=None)
    is_left = sealed is not None and (persisted is None or persisted < sealed)
    found = replace(
        now,
        committed=committed,
        dropped=dropped,
        persist=persist,
        sealed=sealed,
        persisted=persisted,
        sealer=heard.leader if is_left else before.sealer,
        aim=aim if aim is None or before.aim is None else max(aim, before.aim),
        last=judge_last(before.last, _parts(heard, persist), _unwritten(persist, persisted)),
    )
    return before if replace(found, generation=before.generation) == before else found


def _unwritten(persist: StateId | None, persisted: StateId | None) -> StateId | None:
    is_there = persist is None or (persisted is not None and persisted >= persist)
    return None if is_there else persist


def _parts(heard: StatusSummary, persist: StateId | None) -> list[FinalSaveState]:
    """Return how far each node of the generation is with what is last."""
    found = []
    for agent in heard.seated:
        word = heard.said.get(agent)
        if word is None or word.generation != heard.generation:
            continue
        is_written = persist is None or persist in word.parts
        if persist is not None and word.persisted is not None:
            is_written = is_written or word.persisted >= persist
        found.append(
            FinalSaveState(
                node=heard.nodes.get(agent, agent),
                word=word.last,
                lacks=frozenset(state for state in heard.last if not _has(word, state)),
                has_written=is_written,
            )
        )
    return found


def _is_complete(heard: StatusSummary, words: list[NodeStatus]) -> bool:
    return bool(heard.seated) and len(words) == len(heard.seated)


def _committed(
    before: CommitRecord, heard: StatusSummary, words: list[NodeStatus]
) -> StateId | None:
    if not _is_complete(heard, words):
        return before.committed
    had = [set(w.replicated) if heard.is_replicated else {*w.whole, *w.replicated} for w in words]
    dropped = set(before.dropped)
    common = {
        state
        for state in set.intersection(*had)
        if state.epoch == heard.epoch and state not in dropped
    }
    return max([*common, *([before.committed] if before.committed else [])], default=None)


def _dropped(
    before: CommitRecord, heard: StatusSummary, words: list[NodeStatus], committed: StateId | None
) -> tuple[StateId, ...]:
    held = {s for w in words for s in (*w.whole, *w.replicated) if s.epoch == heard.epoch}
    overdue = heard.overdue - heard.last
    lost = {s for s in held if s in overdue or any(_will_lack(w, s, heard.last) for w in words)}
    both = (lost | set(before.dropped)) - {committed}
    newest = sorted((s for s in both if committed is None or s > committed), reverse=True)
    return tuple(newest[:DROPPED_MAX])


def _has(word: NodeStatus, state: StateId) -> bool:
    """Say whether a node has *state*, or is making it, or a newer one that was agreed on."""
    return state == word.in_flight or _has_whole(word, state)


def _has_whole(word: NodeStatus, state: StateId) -> bool:
    if state in word.whole or state in word.replicated:
        return True
    return word.newest is not None and word.newest >= state


def why_overdue(heard: StatusSummary, state: StateId) -> str:
    """Return which nodes *state*, which is overdue, has waited for."""
    words = [(heard.nodes.get(agent, agent), heard.said.get(agent)) for agent in heard.seated]
    lacking = [node for node, word in words if word is None or not _has_whole(word, state)]
    if lacking:
        return (
            f"{_named(lacking)} did not have it {format_seconds(OVERDUE_S)} after other nodes had"
        )
    slow = [node for node, word in words if word is not None and state not in word.replicated]
    limit = format_seconds(COPIED_MAX_S)
    return f"the copies of what {_named(slow)} saved were not at their holders after {limit}"


def _named(nodes: list[str]) -> str:
    more = "" if len(nodes) <= _NAMED_MAX else f" and {len(nodes) - _NAMED_MAX} more"
    return f"{', '.join(nodes[:_NAMED_MAX])}{more}"


def _will_lack(word: NodeStatus, state: StateId, last: frozenset[StateId]) -> bool:
    """Say whether a node does not have *state*, and is past its step."""
    if _has(word, state):
        return False
    if state in last:
        return word.last.is_over  # until then its ranks may ask for it once more
    is_past = word.decided is not None and word.decided.step >= state.step
    return state in word.refused or is_past


def _persist(
    before: CommitRecord, heard: StatusSummary, words: list[NodeStatus], committed: StateId | None
) -> StateId | None:
    """Return what is to be persisted: the newest, once all know of the one before."""
    is_ours = committed is not None and committed.epoch == heard.epoch
    if not is_ours or committed == before.persist or not any(w.is_due for w in words):
        return before.persist
    last = before.persist
    if last is not None and last.epoch == heard.epoch and any(w.told != last for w in words):
        return last
    return committed


def _sealed(before: CommitRecord, heard: StatusSummary, words: list[NodeStatus]) -> StateId | None:
    if not _is_complete(heard, words):
        return before.sealed
    common = set.intersection(*(set(w.parts) for w in words))
    ours = [state for state in common if state.epoch == heard.epoch]
    return max([*ours, *([before.sealed] if before.sealed else [])], default=None)


class SavePacer:
    """Finds the step by which all nodes have a decision, from the steps that they ask for.

    Nodes receive a decision at different times, and each would take the next step it is asked for:
    never the same. So a step is named that none has come to yet.
    """

    def __init__(self) -> None:
        self._lead_s = LEAD_S
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._whole_since_s: dict[StateId, float] = {}
        self._lacking_since_s: dict[StateId, float] = {}  # some node, as far as it said

    def hear(self, words: Mapping[str, NodeStatus], now_s: float, n_nodes: int) -> None:
        """Take in what those of *n_nodes* that say anything said at *now_s*."""
        asked = max((w.decided.step for w in words.values() if w.decided), default=None)
        if asked is not None and (self._last is None or asked != self._last[0]):
            if self._last is not None and asked < self._last[0]:
                self._first = None  # they went back
            self._first = self._first or (asked, now_s)
            self._last = (asked, now_s)
        held = {state for w in words.values() for state in (*w.whole, *w.replicated)}
        self._whole_since_s = {s: self._whole_since_s.get(s, now_s) for s in held}
        all_have = {s for s in held if all(_has_whole(word, s) for word in words.values())}
        had_s = dict.fromkeys(all_have if len(words) >= n_nodes else (), now_s)
        self._lacking_since_s = {s: had_s.get(s, self._lacking_since_s.get(s, now_s)) for s in held}

    def overdue(self, now_s: float) -> frozenset[StateId]:
        """Return what has been whole somewhere for so long that it will not be committed."""
        return frozenset(
            state
            for state, since_s in self._whole_since_s.items()
            if now_s - self._lacking_since_s[state] >= OVERDUE_S or now_s - since_s >= COPIED_MAX_S
        )

    def aim(self) -> int | None:
        """Return the step, None where nobody has said a step yet."""
        if self._first is None or self._last is None:
            return None
        (first, first_s), (last, last_s) = self._first, self._last
        rate = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        return last + 1 + math.ceil(rate * self._lead_s)

    def went(self, before: CommitRecord, after: CommitRecord) -> None:
        """Learn from what was decided: a state that some missed was aimed at too early."""
        if set(after.dropped) - set(before.dropped):
            self._lead_s = min(2 * self._lead_s, LEAD_MAX_S)
        elif after.committed != before.committed:
            self._lead_s = max(CALMER * self._lead_s, LEAD_S)


def notes_for(
    roster: Roster,
    held: Mapping[str, Inventory],
    before: GenerationPlan | None,
    *,
    replicas: int,
    excluded_step: int | None,
) -> GenerationPlan:
    """Return what all members of *roster* know alike.

    Args:
        roster: Who trains, and who waits.
        held: What each agent that has a keeper holds, by agent.
        before: The notes of the generation before, None where there was none.
        replicas: How many nodes are to have each state, its own among them.
        excluded_step: The step of the state that is not to be loaded.
    """
    missing = tuple(m.node for m in roster.members if m.agent not in held)
    epochs = [-1 if before is None else before.epoch_max]
    stored_max = max((h.stored_max for h in held.values()), default=-1)
    epochs += [stored_max, *(h.epoch_max for h in held.values())]
    epochs += [copy.state.epoch for h in held.values() for copy in h.copies]
    if before is not None and before.restore is not None:
        epochs.append(before.restore.epoch)
    notes = GenerationPlan(is_kept=not missing, missing=missing, epoch_max=max(epochs))
    if missing:
        return notes
    everybody = (*roster.members, *roster.spares)
    domains = align_paths({m.node: held[m.agent].domain for m in roster.members})
    placement = _placed([m.node for m in roster.members], before, replicas, domains)
    notes = replace(
        notes,
        placement=placement,
        n_domains=len(set(domains.values())) or None,
        together=n_colocated(placement, domains),
        peers={m.node: (m.address, held[m.agent].port) for m in everybody if m.agent in held},
    )
    if before is None:
        # Whether the directory has something newer, of a former run, is known only to the ranks.
        return notes
    found = restore_of(roster, held, None, notes.epoch_max, excluded_step)
    if found.state is None or found.state.epoch < stored_max:
        return notes  # the directory may have a newer one: the first node's ranks have it looked at
    return replace(notes, restore=found)


def restore_of(
    roster: Roster,
    held: Mapping[str, Inventory],
    stored: StoredStates | None,
    epoch_max: int,
    excluded_step: int | None,
) -> RestorePlan:
    """Return the newest state of which every shard can be had, and from whom.

    *stored* is what the directory has, as far as it was listed; *epoch_max* the greatest epoch
    that any node reported.
    """
    agents = {m.agent: m.node for m in (*roster.members, *roster.spares)}
    copies = {agents[agent]: list(it.copies) for agent, it in held.items() if agent in agents}
    ranks: dict[str, tuple[int, ...]] = {m.node: () for m in roster.spares if m.agent in held}
    for position, member in enumerate(roster.members):
        first = roster.first_rank(position)
        ranks[member.node] = tuple(range(first, first + member.n_workers))
    copies, persistent = _with_stored(copies, stored)
    return plan_restore(
        RestoreInputs(
            inventories=copies,
            ranks=ranks,
            persistent=persistent,
            excluded_steps=() if excluded_step is None else (excluded_step,),
            epoch_max=max(epoch_max, -1 if stored is None else stored.epoch_max),
        )
    )


def _placed(
    nodes: list[str],
    before: GenerationPlan | None,
    replicas: int,
    domains: Mapping[str, DomainPath],
) -> ReplicaPlacement:
    old = None if before is None else before.placement
    if old is not None and old.requested_replicas == replicas:
        try:
            return rebalance(old, nodes, domains or None)
        except CheckpointError:
            pass  # another program wrote it, and it need not be one of ours
    return place(nodes, replicas, domains or None)


def _with_stored(
    copies: Mapping[str, list[ShardCopy]], stored: StoredStates | None
) -> tuple[dict[str, list[ShardCopy]], list[ShardCopy]]:
    """Return *copies*, and the directory's of the newest states it has whole.

    Which bytes the directory has is in its manifest and compared by who loads them. Here its copy
    counts as equal to those in memory; where these differ among themselves, only it can be loaded.
    """
    newest = () if stored is None else stored.states[:STORED_LOOKED_AT]
    contents: dict[tuple[StateId, Shard], set[tuple[str, Digest]]] = {}
    for copy in _all(copies.values()):
        contents.setdefault((copy.state, copy.shard), set()).add((copy.layout, copy.digest))
    persistent, in_doubt = [], set()
    for state, world in newest:
        for rank in range(world):
            shard = Shard(rank, world)
            known = contents.get((state, shard), set())
            if len(known) > 1:
                in_doubt.add((state, shard))
            layout, digest = min(known, key=str) if len(known) == 1 else ("", Digest(0, b"", ""))
            persistent.append(ShardCopy(state, shard, layout, digest, Tier.PERSISTENT, DIRECTORY))
    kept = {
        node: [copy for copy in of_node if (copy.state, copy.shard) not in in_doubt]
        for node, of_node in copies.items()
    }
    return kept, persistent


def _all(lists: Iterable[list[ShardCopy]]) -> Iterable[ShardCopy]:
    return (copy for of_node in lists for copy in of_node)
