"""Assembles one agent: control client, monitors, checkpoints, journal."""

import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals
from uuid import uuid4

from torch.distributed.launcher.api import LaunchConfig

from gpuops import __version__
from gpuops.agent.checkpoint.api import CheckpointService
from gpuops.agent.checkpoint.failure_history import FailureRecord, failures_on_record
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.agent.checkpoint.follower import KeeperLocation as PeerPlace
from gpuops.agent.checkpoint.leader import CommitLeader
from gpuops.agent.checkpoint.messages import FIELD
from gpuops.agent.checkpoint.record import CheckpointRecord, OverdueReporter
from gpuops.agent.checkpoint.start import CheckpointJob, checkpoints_of, domain_of
from gpuops.agent.checkpoint.stored_states import survey
from gpuops.agent.elastic.attempt import CurrentAttempt
from gpuops.agent.elastic.decider import decider
from gpuops.agent.elastic.logs import GenerationLogs
from gpuops.agent.elastic.rendezvous import ControlRendezvous
from gpuops.agent.elastic.signals import Cancellation
from gpuops.agent.elastic.teardown import KILL_WAIT_S
from gpuops.agent.elastic.waiting import AgentWait
from gpuops.agent.journal.payloads import slurm_job
from gpuops.agent.journal.session import DecisionLog, NodeContext, RunSession
from gpuops.agent.launch.endpoint import ControlEndpoint
from gpuops.agent.launch.identity import RunIdentity, fingerprint
from gpuops.agent.launch.options import RunRequest
from gpuops.agent.launch.services import Services
from gpuops.agent.launch.slurm import drain_grace
from gpuops.agent.launch.torch_compat import collective_env
from gpuops.agent.monitors.evidence import EVIDENCE_S
from gpuops.agent.monitors.fleet import FleetJudge, SuspectReporter
from gpuops.agent.monitors.gpu import GpuMonitor
from gpuops.agent.monitors.gpu_memory import open_memory
from gpuops.agent.monitors.hang.monitor import HangMonitor
from gpuops.agent.monitors.preflight import (
    BurninPlan,
    BurninPreflight,
    HealthPlan,
    HealthPreflight,
    NoPreflight,
    PreflightCheck,
    PreflightGate,
)
from gpuops.agent.monitors.preflight_sweep import sweep_gate
from gpuops.agent.monitors.progress import StepTracker
from gpuops.agent.monitors.registry import MonitorContext, MonitorGroup, MonitorRegistry
from gpuops.agent.status.published import PublishedSnapshot, busy_for_s, progress_of
from gpuops.config.resolve import Settings
from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.leader import Leader, LeaderExtension
from gpuops.control.record import ControlRecord, Member, RecordView, RunPhase
from gpuops.control.step import LeaderPolicy, LeaderTimeouts
from gpuops.control.store import Entry
from gpuops.control.threads import AgentCallbacks, ControlThreads
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
    state_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledAgent:
    """All that an agent is made of, before torch's agent and before the control threads run."""

    launch: LaunchContext
    endpoint: ControlEndpoint
    session: RunSession
    services: Services
    wait_hooks: AgentWait
    rendezvous: ControlRendezvous
    snapshot: PublishedSnapshot
    threads: ControlThreads

    def close(self) -> None:
        """End the preflight gate and the monitors."""
        self.session.safely("ending the gate", self.services.preflight.close)
        self.services.monitors.close()


def assemble(
    launch: LaunchContext,
    endpoint: ControlEndpoint,
    context: NodeContext,
    settings: Settings,
    logs: GenerationLogs,
    identity: RunIdentity,
) -> AssembledAgent:
    """Enter the run and return all that its agent here needs.

    Raises:
        RunIsOverError, UsageError, ControlStoreError: See `gpuops.control.join.join`.
    """
    clock, plan = launch.clock, launch.request.plan
    me, view = _join_run(launch, endpoint, context.node, identity)
    is_first = view.record.run_id == identity.run_id
    session = RunSession(
        context, RunIdentity(view.record.run_id, view.record.folder), leads=is_first
    )
    monitors = _monitors(launch, context, settings)
    gpus = monitors.gpu
    control = _control_client(launch, endpoint, me, view, session)
    suspects = SuspectReporter(control, clock, session, log.warning)
    fleet = FleetJudge(control, monitors.fleet, clock, suspects, session.safely)
    decisions = DecisionLog(session.journal)
    leader = _leader(launch, endpoint, session, control, fleet, decisions)
    job, restarts = slurm_job(launch.env)
    step_tracker = StepTracker()
    failures = _failure_record(settings, clock)
    services = Services(
        clock=clock,
        node=context.node,
        plan=plan,
        control=control,
        leader=leader,
        decisions=decisions,
        session=session,
        logs=logs,
        cancellation=launch.cancellation,
        current=CurrentAttempt(clock.mono_ns()),
        preflight=_preflight_gate(launch, endpoint.address, gpus, settings, control),
        say=log.warning,
        agent_pid=os.getpid(),
        slurm_job_id=job,
        slurm_restart_count=restarts,
        failure_grace_s=launch.failure_grace_s,
        cancel_grace_s=launch.cancel_grace_s,
        drain_grace_s=partial(_drain_grace_s, launch),
        monitors=MonitorGroup(monitors.all, control, clock, session.safely),
        hang=monitors.hang,
        step_tracker=step_tracker,
        checkpoints=_checkpoint_service(launch, endpoint, session, step_tracker, control),
        gpu_uuids=lambda: gpus.rank_gpus(range(me.n_workers)),
        job_xids=gpus.job_xids,
        worker_env=lambda folder: {
            **collective_env(
                launch.env,
                folder,
                hang_timeout_s=plan.hang_timeout_s,
                are_timed=plan.slow_after_s > 0,
            ),
            **failures.env(),
        },
    )
    return _with_callbacks(launch, endpoint, services, monitors.hang)


def _with_callbacks(
    launch: LaunchContext, endpoint: ControlEndpoint, services: Services, hang: HangMonitor
) -> AssembledAgent:
    """Return *services* with what calls them: the rendezvous, the status, the control threads."""
    control, plan = services.control, launch.request.plan.endpoint
    wait_hooks = AgentWait(services)
    rendezvous = ControlRendezvous(
        control,
        plan.run_key,
        wait_hooks,
        join_payload=lambda: _join_payload(services.checkpoints),
    )
    return AssembledAgent(
        launch=launch,
        endpoint=endpoint,
        session=services.session,
        services=services,
        wait_hooks=wait_hooks,
        rendezvous=rendezvous,
        snapshot=PublishedSnapshot(services, endpoint.describe(plan)),
        threads=_control_threads(launch, services, hang),
    )


def _leader(
    launch: LaunchContext,
    endpoint: ControlEndpoint,
    session: RunSession,
    control: ControlClient,
    fleet: FleetJudge,
    decisions: DecisionLog,
) -> Leader:
    plan = launch.request.plan
    extensions: list[LeaderExtension] = [fleet]
    policy = LeaderPolicy(
        restart=plan.restart_policy,
        timeouts=_leader_timeouts(launch, endpoint.gathered_s),
        decide=decider(plan.decide, launch.env),
        spares=plan.spares,
    )
    if endpoint.is_shared:
        extensions.insert(0, _commit_leader(launch, endpoint, session, control))
    return Leader(
        control,
        launch.clock,
        policy,
        on_decision=decisions.propose,
        extensions=extensions,
    )


def _monitors(launch: LaunchContext, context: NodeContext, settings: Settings) -> MonitorRegistry:
    return MonitorRegistry(
        MonitorContext(
            clock=launch.clock,
            node=context.node,
            env=launch.env,
            root=settings.root,
            site_dir=settings.site_dir,
            hang_timeout_s=launch.request.plan.hang_timeout_s,
            records_steps=launch.request.plan.records_steps,
            slow_after_s=launch.request.plan.slow_after_s,
        )
    )


def _failure_record(settings: Settings, clock: Clock) -> FailureRecord:
    store, root = settings.store_url, settings.root
    return FailureRecord(partial(failures_on_record, store, settings.cluster, root, clock), clock)


def _control_client(
    launch: LaunchContext,
    endpoint: ControlEndpoint,
    me: Member,
    view: RecordView,
    session: RunSession,
) -> ControlClient:
    def on_record_change(record: ControlRecord) -> None:
        session.safely(
            "recording a phase",
            lambda: session.journal.phase_seen(
                record.phase.value, record.generation, record.reason
            ),
        )

    return ControlClient(
        endpoint.store,
        me,
        view,
        launch.clock,
        fence_timeout_s=launch.request.plan.fence_s if endpoint.is_shared else None,
        on_record_change=on_record_change,
    )


def _control_threads(
    launch: LaunchContext, services: Services, hang: HangMonitor
) -> ControlThreads:
    journal, me = services.session.journal, services.control.me

    def on_heartbeats(found: Mapping[str, Entry]) -> None:
        running = services.current.running_generation()
        hang.others_are_busy_for(busy_for_s(found, me.agent, running))

    callbacks = AgentCallbacks(
        on_fence=lambda _silent_s: services.current.kill_workers(),
        running_generation=services.current.running_generation,
        heartbeat_payload=lambda: progress_of(services),
        on_store_silent=lambda silent_s: journal.store_unreachable(f"silent for {silent_s:.1f} s"),
        on_store_back=journal.store_back,
        wants_heartbeats=lambda: hang.is_suspicious,
        on_heartbeats=on_heartbeats,
        hold_s=services.checkpoints.exchange_s,
    )
    return ControlThreads(
        services.control,
        callbacks,
        services.leader,
        launch.clock,
        end_timeout_s=_end_timeout_s(launch),
    )


def _join_payload(checkpoints: CheckpointService) -> Json:
    held = checkpoints.inventory()
    return {} if held is None else {FIELD: held}


def checkpoint_job(launch: LaunchContext, node: str, name: str) -> CheckpointJob:
    """Return what the checkpoints need to know of the job *name* on *node*."""
    return CheckpointJob(
        request=launch.request,
        name=name,
        env=launch.env,
        node=node,
        cwd=str(Path.cwd()),
        uid=os.geteuid(),
        temporary=Path(tempfile.gettempdir()),
        state_dir=launch.state_dir,
    )


def _checkpoint_service(
    launch: LaunchContext,
    endpoint: ControlEndpoint,
    session: RunSession,
    step_tracker: StepTracker,
    control: ControlClient,
) -> CheckpointService:
    me = control.me
    record = CheckpointRecord(
        session.journal,
        step_tracker,
        launch.clock,
        log.warning,
        say_news=log_notice,
        n_ranks=me.n_workers,
    )
    job = checkpoint_job(launch, me.node, session.identity.folder)
    agreement = _commit_follower(launch, endpoint, session, control) if endpoint.is_shared else None
    return checkpoints_of(job, record, launch.clock, agreement)


def _commit_follower(
    launch: LaunchContext, endpoint: ControlEndpoint, session: RunSession, control: ControlClient
) -> CommitFollower:
    """Return the part of this node in the agreement on checkpoints."""
    plan = launch.request.plan
    place = PeerPlace(
        me=control.me,
        token=plan.endpoint.token,
        job=session.identity.folder,
        directory=plan.checkpoints.directory,
        domain=control.me.domain,
    )
    return CommitFollower(
        endpoint.store,
        control.keys,
        place,
        survey,
        log.warning,
        is_led=lambda: control.record.phase in {RunPhase.RUN, RunPhase.DRAIN},
    )


def _commit_leader(
    launch: LaunchContext, endpoint: ControlEndpoint, session: RunSession, control: ControlClient
) -> CommitLeader:
    return CommitLeader(
        endpoint.store,
        control.keys,
        control.me,
        launch.clock,
        launch.request.plan.checkpoints.replicas,
        gave_up=OverdueReporter(session.journal, log.warning).gave_up,
    )


def _join_run(
    launch: LaunchContext, endpoint: ControlEndpoint, node: str, identity: RunIdentity
) -> tuple[Member, RecordView]:
    me = Member(
        agent=str(uuid4()),
        node=node,
        address=endpoint.address,
        n_workers=launch.config.nproc_per_node,
        node_rank_hint=launch.request.plan.order,
        domain=domain_of(launch.request.plan.checkpoints.domain, node, launch.env, log.warning),
    )
    fresh = ControlRecord(
        run_id=identity.run_id,
        folder=identity.folder,
        generation=0,
        phase=RunPhase.RENDEZVOUS,
        since_s=0.0,
        gpuops_version=__version__,
        made_by=node,
        fingerprint=fingerprint(launch.request),
    )
    return me, join(endpoint.store, me, fresh, launch.clock, threading.Event().wait)


def _drain_grace_s(launch: LaunchContext, name: str) -> float:
    now_s, asked_s = launch.clock.now_us() / US_PER_S, launch.request.plan.drain_grace_s
    return drain_grace(launch.env, now_s, Signals[name], asked_s)


def _end_timeout_s(launch: LaunchContext) -> float:
    """Return how long a live agent may take to report after its generation has ended."""
    return launch.failure_grace_s + EVIDENCE_S + KILL_WAIT_S + END_MARGIN_S


def _leader_timeouts(launch: LaunchContext, gathered_s: float) -> LeaderTimeouts:
    plan = launch.request.plan
    return LeaderTimeouts(
        suspect_s=plan.suspect_s,
        dead_s=plan.dead_s,
        end_s=_end_timeout_s(launch),
        last_call_s=plan.last_call_s,
        first_call_s=max(plan.last_call_s, plan.first_call_s - gathered_s),
        join_timeout_s=plan.join_timeout_s,
        grow_after_s=plan.grow_after_s,
    )


def _preflight_gate(
    launch: LaunchContext,
    address: str,
    gpus: GpuMonitor,
    settings: Settings,
    control: ControlClient,
) -> PreflightGate:
    gate, plan = _health_gate(launch, gpus, settings.root), launch.request.plan
    if control.record.generation > 0 or plan.preflight == "off":
        return gate
    if plan.preflight == "sweep":
        return sweep_gate(gate, plan, launch.env, address, settings.file, control)
    burnin_plan = BurninPlan(env=launch.env, deadline_s=plan.preflight_limit_s)

    def burnin() -> PreflightCheck:
        return PreflightCheck(replace(burnin_plan, gpus=gpus.listed_uuids))

    return BurninPreflight(gate, burnin, log_notice)


def _health_gate(launch: LaunchContext, gpus: GpuMonitor, root: Path) -> PreflightGate:
    if not launch.request.plan.gate:
        return NoPreflight()
    deadline_s = launch.request.plan.gate_deadline_s
    plan = HealthPlan(env=launch.env, deadline_s=deadline_s, root=root)
    memory = open_memory(launch.env, os.getpid(), launch.clock)

    def check() -> PreflightCheck:
        return PreflightCheck(replace(plan, gpus=gpus.listed_uuids))

    return HealthPreflight(check, memory, launch.clock, log.info, gpus.own_uuids)
