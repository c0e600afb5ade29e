"""The leader's part in the agreement on checkpoints: it reads all, judges, and writes.

What fails in here delays commits, and nothing else: see `gpuops.control.leader.ExtensionRunner`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuops.agent.checkpoint.messages import (
    FIELD,
    CommitRecord,
    GenerationPlan,
    Inventory,
    NodeStatus,
)
from gpuops.agent.checkpoint.replica_check import ReplicaCheck
from gpuops.agent.checkpoint.rules import (
    SavePacer,
    StatusSummary,
    judge,
    notes_for,
    restore_of,
    why_overdue,
)
from gpuops.checkpoint.agreement.recovery import RestorePlan
from gpuops.checkpoint.agreement.replica_check import NAMED_MAX, ReplicaReport
from gpuops.checkpoint.types import StateId
from gpuops.control.leader import LeaderExtension
from gpuops.control.record import (
    ControlKeys,
    ControlRecord,
    Member,
    RecordError,
    Roster,
    pack,
    unpack,
)
from gpuops.control.store import ControlStore, Entry
from gpuops.host.clock import Clock
from gpuops.model import Json
from gpuops.units import NS_PER_S
from gpuops.wire.messages import MessageFormatError

log = logging.getLogger(__name__)


class CommitLeader(LeaderExtension):
    """One agent's; it acts while that agent leads. *replicas*: how many nodes have each state.

    *gave_up* is called with each state that all gave up, as some took too long, and why.
    """

    def __init__(
        self,
        board: ControlStore,
        keys: ControlKeys,
        me: Member,
        clock: Clock,
        replicas: int,
        *,
        gave_up: Callable[[StateId, str], None] = lambda _state, _why: None,
    ) -> None:
        self._board = board
        self._keys = keys
        self._me = me
        self._clock = clock
        self._replicas = replicas
        self._gave_up = gave_up
        self._generation = -1
        self._notes: GenerationPlan | None = None
        self._restore: RestorePlan | None = None
        self._mark: tuple[int, CommitRecord] | None = None
        self._pacer = SavePacer()
        self._polls = ReplicaCheck()
        self._differ: list[ReplicaReport] = []  # not written down yet

    def roster_metadata(
        self,
        record: ControlRecord,
        roster: Roster,
        previous: Roster | None,
        ready: Mapping[str, Entry],
    ) -> Json:
        """Return who keeps whose states, and where the ranks go on from if that is known."""
        held = self._held(roster, ready)
        if not held:
            return {}
        notes = notes_for(
            roster,
            held,
            None if previous is None else notes_of(previous),
            replicas=self._replicas,
            excluded_step=record.excluded_checkpoint,
        )
        return {FIELD: notes.to_json()}

    def on_heartbeats(
        self, record: ControlRecord, roster: Roster, heartbeats: Mapping[str, Entry]
    ) -> None:
        """Judge what all say of their states; costs nothing where nobody says anything.

        Raises:
            ControlStoreError: It is not written down.
        """
        said = _said(roster, heartbeats)
        if len(roster.members) < 2 or not said:
            return
        if self._generation != roster.generation:
            self._generation = roster.generation
            self._notes = notes_of(roster)
            self._restore = None if self._notes is None else self._notes.restore
            self._mark = None  # others may have led meanwhile
            self._pacer = SavePacer()
            self._polls, self._differ = ReplicaCheck(), []
        notes = self._notes
        if notes is None or not notes.is_kept:
            return
        restore = self._restore or self._find_restore(record, roster, notes, said)
        if restore is not None:
            self._restore = restore
            self._judge(roster, notes, restore, said)

    def _judge(
        self,
        roster: Roster,
        notes: GenerationPlan,
        restore: RestorePlan,
        said: Mapping[str, NodeStatus],
    ) -> None:
        now_s = self._clock.mono_ns() / NS_PER_S
        self._pacer.hear(said, now_s, len(roster.members))
        version, before = self._mark or watermark_of(self._board.get(self._keys.commit_record()))
        heard = StatusSummary(
            generation=roster.generation,
            epoch=restore.epoch,
            seated=tuple(member.agent for member in roster.members),
            said=said,
            is_replicated=notes.placement is not None and notes.placement.replicas > 1,
            overdue=self._pacer.overdue(now_s),
            aim=self._pacer.aim(),
            leader=self._me.node,
            nodes={member.agent: member.node for member in roster.members},
        )
        after = judge(before, heard)
        self._polls.know(before.differ, before.alike)
        self._differ = [*self._differ, *self._polls.hear(said.values(), restore.epoch)][-NAMED_MAX:]
        if self._differ:
            told = tuple(self._differ)
            after = replace(after, differ=(*before.differ, *told)[-NAMED_MAX:])
        self._mark = (version, before)
        if after == before:
            return
        after = replace(after, alike=self._polls.alike)
        done, entry = self._board.compare_and_set(
            self._keys.commit_record(), pack(after.to_json()), version=version
        )
        self._mark = watermark_of(entry)
        if done:
            self._differ = []
            self._pacer.went(before, after)
            for state in sorted(set(after.dropped) - set(before.dropped)):
                if state in heard.overdue:
                    self._gave_up(state, why_overdue(heard, state))

    def _find_restore(
        self,
        record: ControlRecord,
        roster: Roster,
        notes: GenerationPlan,
        said: Mapping[str, NodeStatus],
    ) -> RestorePlan | None:
        """Return which state the ranks load, once the first node has listed the directory."""
        first = said.get(roster.members[0].agent)
        if first is None or not first.wants or first.stored is None:
            return None
        key = self._keys.restore(roster.generation)
        there = self._board.get(key)
        if there.version:
            return restore_in(there)
        found = restore_of(
            roster,
            self._held(roster, _by_agent(self._board.list(self._keys.ready(roster.generation)))),
            first.stored,
            notes.epoch_max,
            record.excluded_checkpoint,
        )
        _done, entry = self._board.compare_and_set(key, pack(found.to_json()), version=0)
        return restore_in(entry)

    def _held(self, roster: Roster, ready: Mapping[str, Entry]) -> dict[str, Inventory]:
        nodes = {m.agent: m.node for m in (*roster.members, *roster.spares)}
        found = {}
        for agent, entry in ready.items():
            word = _field(entry)
            if word is None or agent not in nodes:
                continue
            try:
                found[agent] = Inventory.from_json(word)
            except MessageFormatError as exc:
                log.warning("what %s holds cannot be read: %s", nodes[agent], exc)
        return found


def notes_of(roster: Roster) -> GenerationPlan | None:
    """Return the notes of *roster* on checkpoints, None where there are none to be read."""
    word = roster.metadata.get(FIELD)
    if word is None:
        return None
    try:
        return GenerationPlan.from_json(word)
    except MessageFormatError as exc:
        log.warning("the notes of generation %d cannot be read: %s", roster.generation, exc)
        return None


def watermark_of(entry: Entry) -> tuple[int, CommitRecord]:
    """Return the version of the watermark and what it says; an empty one where there is none.

    Raises:
        MessageFormatError, RecordError: It is none.
    """
    if not entry.version:
        return 0, CommitRecord()
    return entry.version, CommitRecord.from_json(unpack(entry.value))


def restore_in(entry: Entry) -> RestorePlan:
    """Return the decision in *entry*.

    Raises:
        MessageFormatError, RecordError: It is none.
    """
    return RestorePlan.from_json(unpack(entry.value))


def _said(roster: Roster, beats: Mapping[str, Entry]) -> dict[str, NodeStatus]:
    found = {}
    for member in roster.members:
        entry = beats.get(member.agent)
        word = None if entry is None else _field(entry)
        if word is None:
            continue
        try:
            said = NodeStatus.from_json(word)
        except MessageFormatError as exc:
            log.debug("what %s says of its states cannot be read: %s", member.node, exc)
            continue
        if said.generation == roster.generation:
            found[member.agent] = said
    return found


def _field(entry: Entry) -> Json | None:
    try:
        word = unpack(entry.value).get(FIELD)
    except RecordError:
        return None
    return word if isinstance(word, dict) else None


def _by_agent(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    return {key.rpartition("/")[2]: entry for key, entry in entries.items()}
