"""The leader's part in the agreement on checkpoints: it reads, judges and writes.

A failure here delays commits, and nothing else: see `gpuops.control.leader.ExtensionRunner`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuops.agent.checkpoint.generation_plan import newest_restorable, plan_generation
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
    why_overdue,
)
from gpuops.agent.checkpoint.sources import write_sources
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
    """Active while its agent leads. *replicas*: the number of nodes that have each state.

    *gave_up* is called with each state that was dropped as overdue, and with the reason.
    """

    def __init__(
        self,
        store: ControlStore,
        keys: ControlKeys,
        me: Member,
        clock: Clock,
        replicas: int,
        *,
        gave_up: Callable[[StateId, str], None] = lambda _state, _why: None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._clock = clock
        self._replicas = replicas
        self._gave_up = gave_up
        self._generation = -1
        self._plan: GenerationPlan | None = None
        self._restore: RestorePlan | None = None
        self._commit: tuple[int, CommitRecord] | None = None
        self._pacer = SavePacer()
        self._replica_check = ReplicaCheck()
        self._differ: list[ReplicaReport] = []  # not in the commit record yet

    def roster_metadata(
        self,
        record: ControlRecord,
        roster: Roster,
        previous: Roster | None,
        ready: Mapping[str, Entry],
    ) -> Json:
        """Return where copies are placed, and which state the ranks load if that is decided."""
        held = self._held(roster, ready)
        if not held:
            return {}
        plan = plan_generation(
            roster,
            held,
            None if previous is None else generation_plan_of(previous),
            replicas=self._replicas,
            excluded_step=record.excluded_checkpoint,
        )
        if plan.restore is not None:
            restore = write_sources(self._store, self._keys, roster.generation, plan.restore)
            plan = replace(plan, restore=restore)
        return {FIELD: plan.to_json()}

    def on_heartbeats(
        self, record: ControlRecord, roster: Roster, heartbeats: Mapping[str, Entry]
    ) -> None:
        """Judge the statuses in *heartbeats*; does nothing where none has any.

        Raises:
            ControlStoreError: The result could not be written.
        """
        statuses = _statuses(roster, heartbeats)
        if len(roster.members) < 2 or not statuses:
            return
        if self._generation != roster.generation:
            self._generation = roster.generation
            self._plan = generation_plan_of(roster)
            self._restore = None if self._plan is None else self._plan.restore
            self._commit = None  # another agent may have led meanwhile
            self._pacer = SavePacer()
            self._replica_check, self._differ = ReplicaCheck(), []
        plan = self._plan
        if plan is None or not plan.is_kept:
            return
        restore = self._restore or self._find_restore(record, roster, plan, statuses)
        if restore is not None:
            self._restore = restore
            self._judge(roster, plan, restore, statuses)

    def _judge(
        self,
        roster: Roster,
        plan: GenerationPlan,
        restore: RestorePlan,
        statuses: Mapping[str, NodeStatus],
    ) -> None:
        now_s = self._clock.mono_ns() / NS_PER_S
        self._pacer.observe(statuses, now_s, len(roster.members))
        version, before = self._commit or commit_record_of(
            self._store.get(self._keys.commit_record())
        )
        summary = StatusSummary(
            generation=roster.generation,
            epoch=restore.epoch,
            members=tuple(member.agent for member in roster.members),
            statuses=statuses,
            is_replicated=plan.placement is not None and plan.placement.replicas > 1,
            overdue=self._pacer.overdue(now_s),
            next_step=self._pacer.next_step(),
            resumed=restore.state if restore.world == roster.world_size else None,
            leader=self._me.node,
            nodes={member.agent: member.node for member in roster.members},
            equal_at=self._replica_check.equal_at,
        )
        self._replica_check.restore(before.differ, before.alike)
        self._differ = [
            *self._differ,
            *self._replica_check.observe(statuses.values(), restore.epoch),
        ][-NAMED_MAX:]
        after = judge(before, summary)
        if self._differ:
            after = replace(after, differ=(*before.differ, *self._differ)[-NAMED_MAX:])
        self._commit = (version, before)
        if after == before:
            return
        after = replace(after, alike=self._replica_check.last_equal)
        done, entry = self._store.compare_and_set(
            self._keys.commit_record(), pack(after.to_json()), version=version
        )
        self._commit = commit_record_of(entry)
        if done:
            self._differ = []
            self._pacer.learn(before, after, now_s)
            for state in sorted(set(after.dropped) - set(before.dropped)):
                if state in summary.overdue:
                    self._gave_up(state, why_overdue(summary, state))

    def _find_restore(
        self,
        record: ControlRecord,
        roster: Roster,
        plan: GenerationPlan,
        statuses: Mapping[str, NodeStatus],
    ) -> RestorePlan | None:
        """Return which state the ranks load, None until the first node has listed the directory."""
        first = statuses.get(roster.members[0].agent)
        if first is None or not first.wants or first.stored is None:
            return None
        key = self._keys.restore(roster.generation)
        existing = self._store.get(key)
        if existing.version:
            return restore_plan_in(existing)
        ready = self._store.list(self._keys.ready(roster.generation))
        found = newest_restorable(
            roster,
            self._held(roster, {key.rpartition("/")[2]: entry for key, entry in ready.items()}),
            first.stored,
            plan.epoch_max,
            record.excluded_checkpoint,
        )
        found = write_sources(self._store, self._keys, roster.generation, found)
        _done, entry = self._store.compare_and_set(key, pack(found.to_json()), version=0)
        return restore_plan_in(entry)

    def _held(self, roster: Roster, ready: Mapping[str, Entry]) -> dict[str, Inventory]:
        nodes = {m.agent: m.node for m in (*roster.members, *roster.spares)}
        found = {}
        for agent, entry in ready.items():
            body = _field(entry)
            if body is None or agent not in nodes:
                continue
            try:
                found[agent] = Inventory.from_json(body)
            except MessageFormatError as exc:
                log.warning("the inventory of %s cannot be read: %s", nodes[agent], exc)
        return found


def generation_plan_of(roster: Roster) -> GenerationPlan | None:
    """Return the plan in *roster*, None where there is none that can be read."""
    body = roster.metadata.get(FIELD)
    if body is None:
        return None
    try:
        return GenerationPlan.from_json(body)
    except MessageFormatError as exc:
        log.warning("the plan of generation %d cannot be read: %s", roster.generation, exc)
        return None


def commit_record_of(entry: Entry) -> tuple[int, CommitRecord]:
    """Return the version and the contents of the commit record; an empty one where none exists.

    Raises:
        MessageFormatError, RecordError: It cannot be read.
    """
    if not entry.version:
        return 0, CommitRecord()
    return entry.version, CommitRecord.from_json(unpack(entry.value))


def restore_plan_in(entry: Entry) -> RestorePlan:
    """Return the restore plan in *entry*.

    Raises:
        MessageFormatError, RecordError: It cannot be read.
    """
    return RestorePlan.from_json(unpack(entry.value))


def _statuses(roster: Roster, heartbeats: Mapping[str, Entry]) -> dict[str, NodeStatus]:
    found = {}
    for member in roster.members:
        entry = heartbeats.get(member.agent)
        body = None if entry is None else _field(entry)
        if body is None:
            continue
        try:
            status = NodeStatus.from_json(body)
        except MessageFormatError as exc:
            log.debug("the checkpoint status of %s cannot be read: %s", member.node, exc)
            continue
        if status.generation == roster.generation:
            found[member.agent] = status
    return found


def _field(entry: Entry) -> Json | None:
    try:
        body = unpack(entry.value).get(FIELD)
    except RecordError:
        return None
    return body if isinstance(body, dict) else None
