"""One agent put together: its tie to the others, its eyes, its memory."""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals
from uuid import uuid4

from torch.distributed.launcher.api import LaunchConfig

from gpuops.agent.checkpoint.api import CheckpointService
from gpuops.agent.checkpoint.failure_history import FailureRecord, failures_on_record
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.agent.checkpoint.follower import KeeperLocation as PeerPlace
from gpuops.agent.checkpoint.leader import CommitLeader
from gpuops.agent.checkpoint.messages import FIELD, StoredStates
from gpuops.agent.checkpoint.record import CheckpointRecord, OverdueReporter
from gpuops.agent.checkpoint.start import CheckpointJob, checkpoints_of, domain_of
from gpuops.agent.elastic.decider import decider
from gpuops.agent.elastic.logs import GenerationLogs
from gpuops.agent.elastic.rendezvous import ControlRendezvous
from gpuops.agent.elastic.signals import Cancellation
from gpuops.agent.elastic.teardown import KILL_WAIT_S
from gpuops.agent.journal.decision_log import DecisionLog
from gpuops.agent.journal.payloads import slurm_job
from gpuops.agent.journal.session import NodeContext, RunSession
from gpuops.agent.launch.collectives import collective_env
from gpuops.agent.launch.control_store import ControlEndpoint
from gpuops.agent.launch.identity import RunIdentity, fingerprint
from gpuops.agent.launch.options import RunRequest
from gpuops.agent.launch.services import Services
from gpuops.agent.launch.slurm import drain_grace
from gpuops.agent.monitors.evidence import EVIDENCE_S
from gpuops.agent.monitors.gpu import GpuMonitor, GpuMonitorContext, open_gpu_monitor
from gpuops.agent.monitors.gpu_memory import open_memory
from gpuops.agent.monitors.hang.monitor import HangMonitor
from gpuops.agent.monitors.plugins import open_detectors
from gpuops.agent.monitors.preflight import (
    HealthPreflight,
    NoPreflight,
    PreflightCheck,
    PreflightGate,
    PreflightPlan,
)
from gpuops.agent.monitors.progress import StepTracker
from gpuops.agent.status.published import busy_for_s
from gpuops.config.resolve import Settings
from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.leader import Leader, LeaderTimeouts
from gpuops.control.record import ControlRecord, Member, RecordView, RunPhase
from gpuops.host.clock import Clock
from gpuops.log import log_notice
from gpuops.model import Json
from gpuops.units import US_PER_S

log = logging.getLogger(__name__)

END_MARGIN_S = 2.0  # to read the logs of workers that have ended, and to say so


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """A launch whose values have all been checked; nothing has been started."""

    request: RunRequest
    config: LaunchConfig
    entry: tuple[str, tuple[str, ...]]
    clock: Clock
    cancellation: Cancellation
    failure_grace_s: float
    cancel_grace_s: float
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledAgent:
    """An agent's parts before there is an agent."""

    prepared: LaunchContext
    met: ControlEndpoint
    session: RunSession
    parts: Services
    seats: ControlRendezvous

    def close(self) -> None:
        """Let go of the sentries and the gate."""
        self.session.safely("ending the gate", self.parts.gate.close)
        for sentry in self.parts.sentries:
            self.session.safely("ending a watch", sentry.close)


def assemble(
    prepared: LaunchContext,
    met: ControlEndpoint,
    around: NodeContext,
    settings: Settings,
    logs: GenerationLogs,
    mine: RunIdentity,
) -> AssembledAgent:
    """Enter the run and return all that its agent here needs.

    Raises:
        RunIsOverError, UsageError, ControlStoreError: See `gpuops.control.join.join`.
    """
    clock, plan = prepared.clock, prepared.request.plan
    me, view = _enter(prepared, met, around.node, mine)
    is_first = view.record.run_id == mine.run_id
    session = RunSession(
        around, RunIdentity(view.record.run_id, view.record.folder), leads=is_first
    )
    hang = HangMonitor(clock, plan.hang_timeout_s, prepared.env)
    place = GpuMonitorContext(
        node=around.node, env=prepared.env, root=settings.root, site_dir=settings.site_dir
    )
    gpus = open_gpu_monitor(place, clock)
    detectors = open_detectors(prepared.env)
    link = _link(prepared, met, me, view, session, hang)
    leader = Leader(link, clock, plan.terms, _timing(prepared), decider(plan.decide, prepared.env))
    link.coordinator = leader
    if met.is_shared:
        leader.extension.extension = _witness(prepared, met, session, link)
    job, restarts = slurm_job(prepared.env)
    pace = StepTracker()
    failures = _failures(settings, clock)
    parts = Services(
        clock=clock,
        node=around.node,
        plan=plan,
        link=link,
        leader=leader,
        rulings=DecisionLog(leader, session.chronicle),
        session=session,
        logs=logs,
        cancellation=prepared.cancellation,
        gate=_gate(prepared, gpus),
        say=log.warning,
        agent_pid=os.getpid(),
        slurm_job_id=job,
        slurm_restart_count=restarts,
        failure_grace_s=prepared.failure_grace_s,
        cancel_grace_s=prepared.cancel_grace_s,
        drain_grace_s=partial(_drain_grace_s, prepared),
        sentries=(hang, gpus, detectors),
        hang=hang,
        pace=pace,
        checkpoints=_checkpoints(prepared, met, session, pace, link),
        gpu_uuids=lambda: gpus.rank_gpus(range(me.n_workers)),
        gpu_signs=gpus.recent,
        job_xids=gpus.job_xids,
        doubts=lambda: (*gpus.doubts(), *detectors.doubts()),
        worker_env=lambda folder: {
            **collective_env(prepared.env, folder, hang_timeout_s=plan.hang_timeout_s),
            **failures.env(),
        },
    )
    seats = ControlRendezvous(link, plan.meeting.run_key)
    seats.wish = lambda: _wish(parts.checkpoints)
    return AssembledAgent(prepared=prepared, met=met, session=session, parts=parts, seats=seats)


def _failures(settings: Settings, clock: Clock) -> FailureRecord:
    store, root = settings.store_url, settings.root
    return FailureRecord(partial(failures_on_record, store, settings.cluster, root, clock), clock)


def _link(
    prepared: LaunchContext,
    met: ControlEndpoint,
    me: Member,
    view: RecordView,
    session: RunSession,
    hang: HangMonitor,
) -> ControlClient:
    """Return this agent's line to the board, which tells the others what it has to."""
    fence_s = prepared.request.plan.fence_s if met.is_shared else None
    end_s = _end_s(prepared)
    link = ControlClient(
        met.board, me, view, prepared.clock, fence_timeout_s=fence_s, end_timeout_s=end_s
    )
    link.on_store_silent = lambda silent_s: session.chronicle.board_lost(
        f"silent for {silent_s:.1f} s"
    )
    link.on_store_back = session.chronicle.board_back
    link.wants_heartbeats = lambda: hang.is_suspicious
    link.on_heartbeats = lambda beats: hang.others_are_busy_for(busy_for_s(beats, me.agent))
    link.on_record_change = lambda record: session.safely(
        "recording a phase",
        lambda: session.chronicle.phase_seen(record.phase.value, record.generation, record.reason),
    )
    return link


def _wish(checkpoints: CheckpointService) -> Json:
    held = checkpoints.holding()
    return {} if held is None else {FIELD: held}


def _checkpoints(
    prepared: LaunchContext,
    met: ControlEndpoint,
    session: RunSession,
    pace: StepTracker,
    link: ControlClient,
) -> CheckpointService:
    me = link.me
    record = CheckpointRecord(
        session.chronicle,
        pace,
        prepared.clock,
        log.warning,
        say_news=log_notice,
        n_ranks=me.n_workers,
    )
    job = CheckpointJob(
        request=prepared.request,
        name=session.identity.folder,
        env=prepared.env,
        node=me.node,
        cwd=str(Path.cwd()),
        uid=os.geteuid(),
    )
    agreement = _agreement(prepared, met, session, link) if met.is_shared else None
    return checkpoints_of(job, record, prepared.clock, agreement)


def _agreement(
    prepared: LaunchContext, met: ControlEndpoint, session: RunSession, link: ControlClient
) -> CommitFollower:
    """Return this node's part in what all agree on of checkpoints."""
    plan, run_id = prepared.request.plan, session.identity.run_id
    place = PeerPlace(
        me=link.me,
        # Without a token whoever reaches the board knows the run's id: peers prove no more.
        token=plan.meeting.token or run_id,
        job=session.identity.folder,
        directory=plan.checkpoints.directory,
        domain=domain_of(plan.checkpoints.domain, link.me.node, prepared.env, log.warning),
    )
    return CommitFollower(
        met.board,
        link.keys,
        place,
        _survey,
        log.warning,
        is_led=lambda: link.record.phase in {RunPhase.RUN, RunPhase.DRAIN},
    )


def _witness(
    prepared: LaunchContext, met: ControlEndpoint, session: RunSession, link: ControlClient
) -> CommitLeader:
    return CommitLeader(
        met.board,
        link.keys,
        link.me,
        prepared.clock,
        prepared.request.plan.checkpoints.replicas,
        gave_up=OverdueReporter(session.chronicle, log.warning).gave_up,
    )


def _survey(directory: str) -> StoredStates:
    from gpuops.agent.checkpoint.keeper_client import survey

    return survey(directory)


def _enter(
    prepared: LaunchContext, met: ControlEndpoint, node: str, mine: RunIdentity
) -> tuple[Member, RecordView]:
    me = Member(
        agent=str(uuid4()),
        node=node,
        address=met.address,
        n_workers=prepared.config.nproc_per_node,
        node_rank_hint=prepared.request.plan.order,
    )
    fresh = ControlRecord(
        run_id=mine.run_id,
        folder=mine.folder,
        generation=0,
        phase=RunPhase.RENDEZVOUS,
        since_s=0.0,
        fingerprint=fingerprint(prepared.request),
    )
    return me, join(met.board, me, fresh, prepared.clock, threading.Event().wait)


def _drain_grace_s(prepared: LaunchContext, name: str) -> float:
    now_s, asked_s = prepared.clock.now_us() / US_PER_S, prepared.request.plan.drain_grace_s
    return drain_grace(prepared.env, now_s, Signals[name], asked_s)


def _end_s(prepared: LaunchContext) -> float:
    """Return what a live agent may take from the news that its generation is over to its report."""
    return prepared.failure_grace_s + EVIDENCE_S + KILL_WAIT_S + END_MARGIN_S


def _timing(prepared: LaunchContext) -> LeaderTimeouts:
    plan = prepared.request.plan
    return LeaderTimeouts(
        suspect_s=plan.suspect_s,
        dead_s=plan.dead_s,
        end_s=_end_s(prepared),
        last_call_s=plan.last_call_s,
        first_call_s=plan.first_call_s,
        join_timeout_s=plan.join_timeout_s,
        grow_after_s=plan.grow_after_s,
    )


def _gate(prepared: LaunchContext, gpus: GpuMonitor) -> PreflightGate:
    if not prepared.request.plan.gate:
        return NoPreflight()
    plan = PreflightPlan(env=prepared.env, deadline_s=prepared.request.plan.gate_deadline_s)
    memory = open_memory(prepared.env, os.getpid(), prepared.clock)

    def check() -> PreflightCheck:
        return PreflightCheck(replace(plan, gpus=gpus.listed_uuids))

    return HealthPreflight(check, memory, prepared.clock, log.info, gpus.own_uuids)
