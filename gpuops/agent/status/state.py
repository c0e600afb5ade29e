"""The state of one agent's run at one moment: an immutable snapshot.

The agent replaces it atomically; readers in other threads see one state or the next. Times are this
host's monotonic nanoseconds, so that a reader can compute ages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuops.incident.decision import RestartDecision
from gpuops.model import Json
from gpuops.units import NS_PER_S

SCHEMA = "gpuops.agent-state/1"
RANKS_MAX = 64
SKIP_REASONS_MAX = 16
# The main loop runs ten times a second and may stop workers for seconds; the control thread waits
# for a slow control store. Beyond these limits the agent itself is faulty.
MAIN_SILENT_S = 60.0
CONTROL_SILENT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One worker of this node. ``phase`` is the heartbeat's; ``beat_ns`` None: no beat yet.

    ``steps_counted``: the calls of its optimizer, where its step is unknown.
    """

    rank: int
    pid: int
    step: int | None = None
    steps_counted: int | None = None
    phase: str = "starting"
    beat_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """This node's checkpoints. ``step`` is that of the newest committed state, None without one.

    ``tier``: where that state is stored: ``memory``, or ``persistent`` where only that is left.
    ``persisted_step`` is that of the newest state in the persistent directory, ``verified_step``
    that of the newest one that was read back from it. ``skipped`` counts the saves that found no
    free buffer, by reason; a training step never waits for one. ``copies``: the number of live
    nodes that have this node's part. ``is_used`` False: some other node has no keeper, so that
    nothing is saved.
    """

    step: int | None = None
    epoch: int | None = None
    since_ns: int | None = None  # when this agent first knew of it
    tier: str | None = None
    persisted_step: int | None = None
    verified_step: int | None = None
    committed: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    is_alive: bool = True
    copies: int = 1
    is_used: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """One agent's view. ``phase`` is the control record's, ``phase_ns`` when it was first seen.

    ``main_ns`` and ``control_ns`` are when the agent's main loop and control thread were last
    active. ``group_rank`` None: not a member of this generation. ``board`` is the endpoint of the
    control store, without secrets: ``kind`` (`EndpointKind`), ``host``, ``port``, ``run_key``.
    """

    run_id: str
    name: str
    node: str
    agent_pid: int
    main_ns: int
    control_ns: int
    generation: int = -1
    phase: str = "form"
    phase_ns: int = 0
    reason: str = ""
    group_rank: int | None = None
    world_size: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    step_s: float | None = None  # of this node's last steps, in the median
    slowdown: float | None = None  # of its slowest rank beside its peers here
    excluded: Mapping[str, str] = field(default_factory=dict)
    doubted: Mapping[str, str] = field(default_factory=dict)
    decision: RestartDecision | None = None
    restarts_used: int = 0
    restarts_max: int = 0
    restarts_window_s: float | None = None
    restarts_by_class: Mapping[str, int] = field(default_factory=dict)
    badput_s: Mapping[str, float] = field(default_factory=dict)
    round_trip_s: float = 0.0
    fences: int = 0
    cpu_s: float = 0.0
    board: Mapping[str, str | int] = field(default_factory=dict)
    http_port: int | None = None
    checkpoint: CheckpointState | None = None  # None: none is kept in memory here


def why_unhealthy(state: AgentState, now_ns: int) -> list[str]:
    """Return the agent's problems at *now_ns*; none while both its threads are active."""
    found = []
    for what, seen_ns, limit_s in (
        ("main loop", state.main_ns, MAIN_SILENT_S),
        ("control thread", state.control_ns, CONTROL_SILENT_S),
    ):
        silent_s = (now_ns - seen_ns) / NS_PER_S
        if silent_s > limit_s:
            found.append(f"the {what} is silent for {silent_s:.0f} s (limit {limit_s:g} s)")
    return found


def state_json(state: AgentState, now_ns: int) -> Json:
    """Return the body of ``/state`` (`SCHEMA`); unknown values are null."""
    return {
        "run_id": state.run_id,
        "name": state.name,
        "node": state.node,
        "agent_pid": state.agent_pid,
        "generation": state.generation,
        "phase": state.phase,
        "phase_seconds": _since(state.phase_ns, now_ns),
        "reason": state.reason,
        "group_rank": state.group_rank,
        "world_size": state.world_size,
        "ranks": [_rank(rank, now_ns) for rank in state.ranks[:RANKS_MAX]],
        "step_seconds": None if state.step_s is None else round(state.step_s, 6),
        "slowdown": None if state.slowdown is None else round(state.slowdown, 3),
        "excluded": dict(state.excluded),
        "doubted": dict(state.doubted),
        "decision": state.decision and state.decision.to_json(),
        "budget": {
            "used": state.restarts_used,
            "max": state.restarts_max,
            "window_seconds": state.restarts_window_s,
        },
        "restarts_by_class": dict(state.restarts_by_class),
        "lost_seconds_by_phase": {phase: round(s, 6) for phase, s in state.badput_s.items()},
        "control": {
            "round_trip_seconds": round(state.round_trip_s, 6),
            "silent_seconds": _since(state.control_ns, now_ns),
            "fences": state.fences,
        },
        "cpu_seconds": round(state.cpu_s, 3),
        "board": dict(state.board),
        "checkpoint": checkpoint_json(state.checkpoint, now_ns),
    }


def checkpoint_json(state: CheckpointState | None, now_ns: int) -> Json | None:
    """Return a node's checkpoints for `gpuops run status`; None without a keeper."""
    if state is None:
        return None
    return {
        "step": state.step,
        "epoch": state.epoch,
        "age_seconds": None if state.since_ns is None else _since(state.since_ns, now_ns),
        "tier": state.tier,
        "persisted_step": state.persisted_step,
        "verified_step": state.verified_step,
        "committed": state.committed,
        "skipped": sum(state.skipped.values()),
        "skipped_by_reason": dict(sorted(state.skipped.items())[:SKIP_REASONS_MAX]),
        "copies": state.copies,
        "keeper": ("running" if state.is_used else "unused") if state.is_alive else "gone",
    }


def run_state(state: AgentState) -> Json:
    """Return the part of the run folder's state file that comes from the snapshot.

    `gpuops run status` reads the endpoint of the control store, or of this agent's HTTP, from it.
    """
    return {
        "board": dict(state.board),
        "http_port": state.http_port,
        "control_phase": state.phase,
        "excluded": dict(state.excluded),
        "doubted": dict(state.doubted),
        "budget": {"used": state.restarts_used, "max": state.restarts_max},
    }


def _rank(rank: RankStatus, now_ns: int) -> Json:
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "step": rank.step,
        "steps_counted": rank.steps_counted,
        "phase": rank.phase,
        "silent_seconds": None if rank.beat_ns is None else _since(rank.beat_ns, now_ns),
    }


def _since(then_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - then_ns) / NS_PER_S, 3)
