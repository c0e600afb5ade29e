"""The current state of a run: one view, from the control store, an agent, its files or the store.

Pure: each function converts what was read into a `RunView`; values that a source does not know are
None. What other processes wrote is bounded and read by type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Any

from gpuops.control.record import ControlRecord, Member, Roster
from gpuops.detect.step_summary import slowdowns_of
from gpuops.model import Json
from gpuops.store.queries.run_queries import AttemptRow, DecisionRow, ExclusionRow, RunRow
from gpuops.units import US_PER_S

TEXT_CHARS_MAX = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNodeView:
    """One node. ``silent_s`` is since the last heartbeat of its ranks.

    ``step_s`` is the time from step to step, in the median of its last ones; ``slowdown`` how many
    times as long as its peers its slowest rank worked by itself, when that was last looked at.
    ``steps_counted``: the optimizer steps since its workers started, where their numbers are
    unknown.
    """

    node: str
    group_rank: int | None = None
    first_rank: int | None = None
    ranks: int | None = None
    step: int | None = None
    steps_counted: int | None = None
    silent_s: float | None = None
    step_s: float | None = None
    slowdown: float | None = None
    seq: int | None = None  # grows while its agent lives


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """The newest state that the job can resume from; with several nodes, the oldest of theirs.

    ``tier``: ``memory`` or ``persistent``. ``skipped`` saves found no free slot. ``copies``: the
    number of nodes that hold each node's part of it in memory, including its own.
    """

    step: int | None = None
    age_s: float | None = None
    tier: str = ""
    persisted_step: int | None = None
    verified_step: int | None = None
    skipped: int | None = None
    keeper: str = ""
    copies: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run. ``source``: ``board`` (the control store), ``agent``, ``file`` or ``store``.

    ``phase`` is that of the control record (``form``, ``run``, ``gather``, ``drain``, ``stop``), or
    of a file (``running``, ``restarting``, ``ended``). ``control_time_s``: when the control store
    was read.
    """

    run_id: str
    name: str
    source: str
    generation: int | None = None
    phase: str = "unknown"
    phase_s: float | None = None
    reason: str = ""
    exit_code: int | None = None
    world_size: int | None = None
    nodes: tuple[RunNodeView, ...] = ()
    spares: tuple[str, ...] = ()
    spare_seqs: Mapping[str, int] = field(default_factory=dict)  # grow while their agents live
    excluded: Mapping[str, str] = field(default_factory=dict)
    suspected: Mapping[str, str] = field(default_factory=dict)  # a restart excludes them
    restarts_used: int | None = None
    restarts_max: int | None = None
    decision: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    control_time_s: float | None = None
    checkpoint: CheckpointView | None = None

    @property
    def step(self) -> int | None:
        """Return the step that every node has made, None if one does not report it."""
        steps = [node.step for node in self.nodes]
        known = [step for step in steps if step is not None]
        return min(known) if known and len(known) == len(steps) else None

    @property
    def step_s(self) -> float | None:
        """Return the time of a step, in the median of the nodes that know theirs."""
        known = [node.step_s for node in self.nodes if node.step_s is not None]
        return median(known) if known else None

    def without_dead(self, silent_s: Mapping[str, float], dead_s: float) -> "RunView":
        """Return it without the spares that have been silent for *dead_s*; a note names them."""
        dead = [name for name in self.spares if silent_s.get(name, 0.0) >= dead_s]
        if not dead:
            return self
        return replace(
            self,
            spares=tuple(name for name in self.spares if name not in dead),
            notes=(*self.notes, f"not in the run, without heartbeats: {', '.join(dead)}"),
        )

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended."""
        return self.phase in ("stop", "ended", "completed", "failed", "cancelled")

    def to_json(self) -> Json:
        """Return the body of ``gpuops run status --json``."""
        return {
            "run": self.run_id,
            "name": self.name,
            "source": self.source,
            "generation": self.generation,
            "phase": self.phase,
            "phase_seconds": self.phase_s,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "world_size": self.world_size,
            "step": self.step,
            "step_seconds": self.step_s,
            "nodes": [_node_json(node) for node in self.nodes],
            "spares": list(self.spares),
            "excluded": dict(self.excluded),
            "doubted": dict(self.suspected),
            "restarts_used": self.restarts_used,
            "restarts_max": self.restarts_max,
            "decision": self.decision,
            "notes": list(self.notes),
            "checkpoint": None if self.checkpoint is None else _checkpoint_json(self.checkpoint),
        }


def from_control_store(
    record: ControlRecord,
    roster: Roster | None,
    agents: Mapping[str, Member],
    heartbeats: Mapping[str, Mapping[str, Any]],
    control_time_s: float,
    published: Mapping[str, object] = MappingProxyType({}),
) -> RunView:
    """Return the run by its control store; *agents*, *heartbeats* and others are by agent id.

    *published* is what the straggler monitors of this generation say.
    """
    slowdowns = slowdowns_of(published)
    members = () if roster is None else roster.members
    assigned = {member.agent for member in members}
    nodes = []
    for group_rank, member in enumerate(members):
        first_rank = None if roster is None else roster.first_rank(group_rank)
        heartbeat = heartbeats.get(member.agent, {})
        node = _node_from_heartbeat(member, group_rank, first_rank, heartbeat)
        nodes.append(replace(node, slowdown=slowdowns.get(member.agent)))
    unassigned = [m for agent, m in agents.items() if agent not in assigned and agent in heartbeats]
    return RunView(
        run_id=record.run_id,
        name=record.folder,
        source="board",
        generation=record.generation,
        phase=record.phase.value,
        phase_s=max(0.0, control_time_s - record.since_s),
        reason=record.reason,
        exit_code=record.exit_code,
        world_size=None if roster is None else roster.world_size,
        nodes=tuple(nodes),
        spares=tuple(sorted({member.node for member in unassigned} - record.excluded.keys())),
        spare_seqs={
            m.node: seq for m in unassigned if (seq := int_or_none(heartbeats[m.agent].get("seq")))
        },
        excluded=dict(record.excluded),
        suspected={n: why for n, why in record.suspected.items() if n not in record.excluded},
        restarts_used=sum(failure.is_counted for failure in record.history),
        decision=None if record.decision is None else record.decision.to_json(),
        control_time_s=control_time_s,
        checkpoint=_least_checkpoint(
            [
                checkpoint_of(heartbeats.get(member.agent, {}).get("checkpoint"))
                for member in members
            ]
        ),
    )


def from_agent(state: Mapping[str, Any]) -> RunView:
    """Return the run as one agent reports it over HTTP (``gpuops.agent-state/1``)."""
    ranks = [rank for rank in _as_list(state.get("ranks")) if isinstance(rank, Mapping)]
    numbers = [n for rank in ranks if (n := int_or_none(rank.get("rank"))) is not None]
    steps = [step for rank in ranks if (step := int_or_none(rank.get("step"))) is not None]
    counts = [n for rank in ranks if (n := int_or_none(rank.get("steps_counted"))) is not None]
    silent = [s for rank in ranks if (s := seconds_or_none(rank.get("silent_seconds"))) is not None]
    node = RunNodeView(
        node=text_or_empty(state.get("node")),
        group_rank=int_or_none(state.get("group_rank")),
        first_rank=min(numbers, default=None),
        ranks=len(ranks),
        step=min(steps) if steps and len(steps) == len(ranks) else None,
        steps_counted=min(counts) if counts and len(counts) == len(ranks) else None,
        silent_s=min(silent, default=None),
        step_s=seconds_or_none(state.get("step_seconds")),
        slowdown=seconds_or_none(state.get("slowdown")),
    )
    used, most = budget_of(state)
    return RunView(
        run_id=text_or_empty(state.get("run_id")),
        name=text_or_empty(state.get("name")),
        source="agent",
        generation=int_or_none(state.get("generation")),
        phase=text_or_empty(state.get("phase")) or "unknown",
        phase_s=seconds_or_none(state.get("phase_seconds")),
        reason=text_or_empty(state.get("reason")),
        world_size=int_or_none(state.get("world_size")),
        nodes=(node,),
        excluded=excluded_of(state),
        suspected=suspected_of(state),
        restarts_used=used,
        restarts_max=most,
        decision=_decision(state.get("decision")),
        checkpoint=checkpoint_of(state.get("checkpoint")),
    )


def from_files(states: Sequence[Mapping[str, Any]]) -> RunView:
    """Return the run by its state files (at least one): those of the newest generation."""
    newest = max(int_or_none(state.get("generation")) or 0 for state in states)
    current = [state for state in states if (int_or_none(state.get("generation")) or 0) == newest]
    first = current[0]
    nodes = [
        RunNodeView(
            node=text_or_empty(state.get("node")),
            ranks=len(pids) if isinstance(pids := state.get("pids"), Mapping) else None,
        )
        for state in current
    ]
    used, most = budget_of(first)
    return RunView(
        run_id=text_or_empty(first.get("run_id")),
        name=text_or_empty(first.get("name")),
        source="file",
        generation=newest,
        phase=text_or_empty(first.get("phase")) or "unknown",
        nodes=tuple(nodes),
        excluded=excluded_of(first),
        suspected=suspected_of(first),
        restarts_used=used,
        restarts_max=most,
    )


def from_store(
    run: RunRow,
    attempts: Sequence[AttemptRow],
    decisions: Sequence[DecisionRow],
    exclusions: Sequence[ExclusionRow],
    now_us: int,
) -> RunView:
    """Return the run by the incident store: as current as the events that its agents have sent."""
    view = RunView(
        run_id=run.id,
        name=run.name,
        source="store",
        phase=run.outcome or "unknown",
        phase_s=_age_s(run.ended_us, now_us),
        reason=run.reason or "",
        exit_code=run.exit_code,
        excluded={row.excluded: row.reason for row in exclusions},
        restarts_max=run.max_restarts,
    )
    if attempts:
        last = attempts[-1]
        nodes = tuple(RunNodeView(node=name, step=last.steps_last) for name in last.nodes)
        age_s = view.phase_s if view.phase_s is not None else _age_s(last.start_us, now_us)
        view = replace(
            view, generation=last.ordinal, world_size=last.world_size, nodes=nodes, phase_s=age_s
        )
    if decisions:
        last_decision = decisions[-1]
        decision = _decision(last_decision.body.get("decision"))
        view = replace(view, restarts_used=last_decision.restarts_used, decision=decision)
    return view


def _age_s(then_us: int | None, now_us: int) -> float | None:
    return None if then_us is None else max(0.0, (now_us - then_us) / US_PER_S)


def excluded_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the excluded nodes in *state*."""
    excluded = state.get("excluded")
    return (
        {text_or_empty(k): text_or_empty(v) for k, v in excluded.items()}
        if isinstance(excluded, Mapping)
        else {}
    )


def suspected_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the suspected nodes in *state* that are not excluded."""
    excluded = excluded_of(state)
    suspected = excluded_of({"excluded": state.get("doubted")})
    return {node: why for node, why in suspected.items() if node not in excluded}


def budget_of(state: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the restarts used, and their maximum, in *state*."""
    budget = state.get("budget")
    if not isinstance(budget, Mapping):
        return None, None
    return int_or_none(budget.get("used")), int_or_none(budget.get("max"))


def int_or_none(value: object) -> int | None:
    """Return *value* if it is a whole number."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return value if is_one and isinstance(value, int) else None


def seconds_or_none(value: object) -> float | None:
    """Return *value* if it is a duration below 4e9 s."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 4e9:
        return None
    return float(value)


def text_or_empty(value: object) -> str:
    """Return *value* truncated if it is text, else ""."""
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else ""


def _node_from_heartbeat(
    member: Member, group_rank: int, first_rank: int | None, heartbeat: Mapping[str, Any]
) -> RunNodeView:
    return RunNodeView(
        node=member.node,
        group_rank=group_rank,
        first_rank=first_rank,
        ranks=member.n_workers,
        step=int_or_none(heartbeat.get("step")),
        steps_counted=int_or_none(heartbeat.get("steps_counted")),
        silent_s=seconds_or_none(heartbeat.get("silent_s")),
        step_s=seconds_or_none(heartbeat.get("step_seconds")),
        seq=int_or_none(heartbeat.get("seq")),
    )


def _node_json(node: RunNodeView) -> Json:
    return {
        "node": node.node,
        "group_rank": node.group_rank,
        "first_rank": node.first_rank,
        "ranks": node.ranks,
        "step": node.step,
        "steps_counted": node.steps_counted,
        "silent_seconds": node.silent_s,
        "step_seconds": node.step_s,
        "slowdown": None if node.slowdown is None else round(node.slowdown, 3),
    }


def checkpoint_of(value: object) -> CheckpointView | None:
    """Return an agent's view of its node's checkpoints, None if it keeps none."""
    if not isinstance(value, Mapping):
        return None
    return CheckpointView(
        step=int_or_none(value.get("step")),
        age_s=seconds_or_none(value.get("age_seconds")),
        tier=text_or_empty(value.get("tier")),
        persisted_step=int_or_none(value.get("persisted_step")),
        verified_step=int_or_none(value.get("verified_step")),
        skipped=int_or_none(value.get("skipped")),
        keeper=text_or_empty(value.get("keeper")),
        copies=int_or_none(value.get("copies")),
    )


def _least_checkpoint(found: Sequence[CheckpointView | None]) -> CheckpointView | None:
    """Return the oldest of the nodes' checkpoints: a resume needs the parts of all nodes."""
    known = [view for view in found if view is not None]
    if not known:
        return None
    least = min(known, key=lambda view: -1 if view.step is None else view.step)
    skipped = [view.skipped for view in known if view.skipped is not None]
    verified = [view.verified_step for view in known if view.verified_step is not None]
    keeper = next((view.keeper for view in known if view.keeper != "running"), least.keeper)
    copies = min((view.copies for view in known if view.copies is not None), default=None)
    return replace(
        least,
        verified_step=max(verified, default=None),  # the last node that read its part knows it
        skipped=max(skipped, default=None),
        keeper=keeper,
        copies=copies,
    )


def _checkpoint_json(view: CheckpointView) -> Json:
    return {
        "step": view.step,
        "age_seconds": view.age_s,
        "tier": view.tier or None,
        "persisted_step": view.persisted_step,
        "verified_step": view.verified_step,
        "skipped": view.skipped,
        "keeper": view.keeper or None,
        "copies": view.copies,
    }


def _decision(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
