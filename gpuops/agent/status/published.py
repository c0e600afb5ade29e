"""What an agent lets others know of its workers: on the control store, and in the run's folder."""

import time
from collections.abc import Mapping

from gpuops.agent.checkpoint.messages import FIELD
from gpuops.agent.elastic.attempt import Attempt
from gpuops.agent.launch.services import Services
from gpuops.agent.monitors.straggler.fleet import StragglerFleetMonitor
from gpuops.agent.status.state import AgentState, RankStatus, checkpoint_json, run_state
from gpuops.control.record import RecordError, unpack
from gpuops.control.store import Entry
from gpuops.detect.step_summary import slowdowns_of
from gpuops.incident.budget import count_failures
from gpuops.model import Json
from gpuops.units import NS_PER_S


def progress_of(parts: Services) -> Json:
    """Return what goes with every heartbeat; called in the control thread."""
    attempt = parts.current.attempt
    if attempt is None:
        return {}
    ranks = [worker.rank for worker in attempt.workers.all]
    known = [parts.session.journal.rank_progress(rank) for rank in ranks]
    steps = [progress.last_step for progress in known if progress.last_step is not None]
    counted = [progress.counted for progress in known if progress.counted is not None]
    beats_ns = [p.last_mono_ns for p in known if p.last_mono_ns is not None]
    silent_s = (parts.clock.mono_ns() - max(beats_ns)) / 1e9 if beats_ns else None
    step_s, saved = parts.step_tracker.step_s(), parts.checkpoints.node_status()
    return {
        **({} if saved is None else {FIELD: saved}),
        "generation": attempt.generation,
        "ranks": len(ranks),
        "first_rank": min(ranks, default=None),
        "step": min(steps, default=None),
        "steps_counted": min(counted, default=None),
        "rate": None if not step_s else round(1 / step_s, 3),
        "step_seconds": None if not step_s else round(step_s, 6),
        "silent_s": None if silent_s is None else round(silent_s, 1),
        "checkpoint_step": parts.step_tracker.checkpoint_step,
        "checkpoint": checkpoint_json(parts.checkpoints.state(), parts.clock.mono_ns()),
        "busy_for_s": 0.0 if parts.hang is None else round(parts.hang.busy_for_s(), 1),
    }


def busy_for_s(beats: Mapping[str, Entry], me: str, generation: int | None) -> float:
    """Return for how long the busiest of the other agents' workers may still be at it.

    Those of *generation*: the last heartbeat of a killed agent stays in the store, unchanged.
    """
    longest_s = 0.0
    for key, entry in beats.items():
        if key.rpartition("/")[2] == me:
            continue
        try:
            beat = unpack(entry.value)
            if beat.get("generation") == generation:
                longest_s = max(longest_s, float(beat.get("busy_for_s") or 0.0))
        except (RecordError, TypeError, ValueError):
            continue
    return longest_s


class PublishedSnapshot:
    """This agent's state, built on request in the thread of the caller."""

    def __init__(self, parts: Services, board: Mapping[str, str | int]) -> None:
        self._parts = parts
        self._board = dict(board)
        self._phase: tuple[str, int, int] = ("", -1, parts.clock.mono_ns())
        self.http_port: int | None = None

    def take(self) -> AgentState:
        """Return the state as it is now."""
        parts, record = self._parts, self._parts.control.record
        attempt = parts.current.attempt
        assignment = None if attempt is None else attempt.assignment
        terms, now_ns = parts.plan.restart_policy, parts.clock.mono_ns()
        if self._phase[:2] != (record.phase.value, record.generation):
            self._phase = (record.phase.value, record.generation, now_ns)
        journal = parts.session.journal
        return AgentState(
            run_id=parts.session.identity.run_id,
            name=parts.session.identity.folder,
            node=parts.node,
            agent_pid=parts.agent_pid,
            main_ns=parts.current.loop_ns,
            control_ns=now_ns - round(parts.control.since_reply_s * NS_PER_S),
            generation=record.generation,
            phase=record.phase.value,
            phase_ns=self._phase[2],
            reason=record.reason,
            group_rank=None if assignment is None else assignment.group_rank,
            world_size=None if assignment is None else assignment.roster.world_size,
            ranks=() if attempt is None else self._ranks(attempt),
            step_s=parts.step_tracker.step_s(),
            slowdown=slowdowns_of(
                {parts.node: parts.monitors.published.get(StragglerFleetMonitor.name)}
            ).get(parts.node),
            excluded=record.excluded,
            doubted=record.suspected,
            decision=record.decision,
            restarts_used=count_failures(record.history, terms, parts.control.store_now_s),
            restarts_max=terms.restarts_max,
            restarts_window_s=terms.restarts_window_s,
            restarts_by_class=journal.restarts,
            badput_s=journal.badput_s,
            round_trip_s=parts.control.round_trip_s,
            fences=parts.current.fences,
            cpu_s=time.process_time(),
            board=self._board,
            http_port=self.http_port,
            checkpoint=parts.checkpoints.state(),
        )

    def _ranks(self, attempt: Attempt) -> tuple[RankStatus, ...]:
        journal = self._parts.session.journal
        found = []
        for worker in attempt.workers.all:
            progress = journal.rank_progress(worker.rank)
            found.append(
                RankStatus(
                    rank=worker.rank,
                    pid=worker.pid,
                    step=progress.last_step,
                    steps_counted=progress.counted,
                    phase="stepping" if progress.beats else "starting",
                    beat_ns=progress.last_mono_ns,
                )
            )
        return tuple(found)


def state_of(parts: Services, snapshot: PublishedSnapshot, phase: str) -> Json:
    """Return the contents of ``state.json``: of this agent, and where to ask for more."""
    session, attempt = parts.session, parts.current.attempt
    generation = -1 if attempt is None else attempt.generation
    return {
        **run_state(snapshot.take()),
        "run_id": session.identity.run_id,
        "name": session.identity.folder,
        "node": parts.node,
        "generation": generation,
        "phase": phase,
        "agent_pid": parts.agent_pid,
        "pids": {} if attempt is None else {str(r): p for r, p in attempt.workers.pids.items()},
        "ring_dir": str(session.directory.rings / f"generation-{generation}"),
    }
