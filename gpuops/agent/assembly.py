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

from gpuops.agent.arguments import Request
from gpuops.agent.checkpoint_domain import domain_of
from gpuops.agent.checkpoint_overdue import Overdue
from gpuops.agent.checkpoint_peers import Agreement
from gpuops.agent.checkpoint_peers import Place as PeerPlace
from gpuops.agent.checkpoint_record import CheckpointRecord
from gpuops.agent.checkpoint_start import Job, checkpoints_of
from gpuops.agent.checkpoint_witness import CheckpointWitness
from gpuops.agent.checkpoint_words import FIELD, Stored
from gpuops.agent.checkpoints import Checkpoints
from gpuops.agent.collectives import collective_env
from gpuops.agent.deciding import decider
from gpuops.agent.detectors import open_detectors
from gpuops.agent.evidence import EVIDENCE_S
from gpuops.agent.failure_record import FailureRecord, failures_on_record
from gpuops.agent.fingerprint import fingerprint
from gpuops.agent.gatekeeper import GateKeeper, HealthKeeper, OpenGate
from gpuops.agent.gpu_memory import open_memory
from gpuops.agent.gpu_sentry import GpuSentry, Place, open_sentry
from gpuops.agent.grace import drain_grace
from gpuops.agent.hang_sentry import HangSentry
from gpuops.agent.health_gate import GatePlan, HealthGate
from gpuops.agent.identity import Identity
from gpuops.agent.logs import GenerationLogs
from gpuops.agent.meeting import Met
from gpuops.agent.pace import Pace
from gpuops.agent.parts import Parts
from gpuops.agent.published import busy_for_s
from gpuops.agent.records import slurm_job
from gpuops.agent.rulings import Rulings
from gpuops.agent.seat import Seats
from gpuops.agent.session import Session, Surroundings
from gpuops.agent.signals import Cancellation
from gpuops.agent.teardown import KILL_WAIT_S
from gpuops.config import Settings
from gpuops.control.enter import enter
from gpuops.control.leader import Leader, Timing
from gpuops.control.link import Link
from gpuops.control.record import ControlRecord, Member, Phase
from gpuops.control.view import View
from gpuops.host.clock import Clock
from gpuops.log import say_news
from gpuops.model import Json
from gpuops.units import US_PER_S

log = logging.getLogger(__name__)

END_MARGIN_S = 2.0  # to read the logs of workers that have ended, and to say so


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A launch whose values have all been checked; nothing has been started."""

    request: Request
    config: LaunchConfig
    entry: tuple[str, tuple[str, ...]]
    clock: Clock
    cancellation: Cancellation
    failure_grace_s: float
    cancel_grace_s: float
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """An agent's parts before there is an agent."""

    prepared: Prepared
    met: Met
    session: Session
    parts: Parts
    seats: Seats

    def close(self) -> None:
        """Let go of the sentries and the gate."""
        self.session.safely("ending the gate", self.parts.gate.close)
        for sentry in self.parts.sentries:
            self.session.safely("ending a watch", sentry.close)


def assemble(
    prepared: Prepared,
    met: Met,
    around: Surroundings,
    settings: Settings,
    logs: GenerationLogs,
    mine: Identity,
) -> Assembly:
    """Enter the run and return all that its agent here needs.

    Raises:
        RunIsOverError, UsageError, BoardError: See `gpuops.control.enter.enter`.
    """
    clock, plan = prepared.clock, prepared.request.plan
    me, view = _enter(prepared, met, around.node, mine)
    is_first = view.record.run_id == mine.run_id
    session = Session(around, Identity(view.record.run_id, view.record.folder), leads=is_first)
    hang = HangSentry(clock, plan.hang_timeout_s, prepared.env)
    place = Place(
        node=around.node, env=prepared.env, root=settings.root, site_dir=settings.site_dir
    )
    gpus = open_sentry(place, clock)
    detectors = open_detectors(prepared.env)
    link = _link(prepared, met, me, view, session, hang)
    leader = Leader(link, clock, plan.terms, _timing(prepared), decider(plan.decide, prepared.env))
    link.leads = leader
    if met.is_shared:
        leader.aside.witness = _witness(prepared, met, session, link)
    job, restarts = slurm_job(prepared.env)
    pace = Pace()
    failures = _failures(settings, clock)
    parts = Parts(
        clock=clock,
        node=around.node,
        plan=plan,
        link=link,
        leader=leader,
        rulings=Rulings(leader, session.chronicle),
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
    seats = Seats(link, plan.meeting.run_key)
    seats.wish = lambda: _wish(parts.checkpoints)
    return Assembly(prepared=prepared, met=met, session=session, parts=parts, seats=seats)


def _failures(settings: Settings, clock: Clock) -> FailureRecord:
    store, root = settings.store_url, settings.root
    return FailureRecord(partial(failures_on_record, store, settings.cluster, root, clock), clock)


def _link(
    prepared: Prepared, met: Met, me: Member, view: View, session: Session, hang: HangSentry
) -> Link:
    """Return this agent's line to the board, which tells the others what it has to."""
    fence_s = prepared.request.plan.fence_s if met.is_shared else None
    end_s = _end_s(prepared)
    link = Link(met.board, me, view, prepared.clock, fence_s=fence_s, end_s=end_s)
    link.on_silence = lambda silent_s: session.chronicle.board_lost(f"silent for {silent_s:.1f} s")
    link.on_answer = session.chronicle.board_back
    link.wants_peers = lambda: hang.is_suspicious
    link.on_peers = lambda beats: hang.others_are_busy_for(busy_for_s(beats, me.agent))
    link.on_record = lambda record: session.safely(
        "recording a phase",
        lambda: session.chronicle.phase_seen(record.phase.value, record.generation, record.reason),
    )
    return link


def _wish(checkpoints: Checkpoints) -> Json:
    held = checkpoints.holding()
    return {} if held is None else {FIELD: held}


def _checkpoints(
    prepared: Prepared, met: Met, session: Session, pace: Pace, link: Link
) -> Checkpoints:
    me = link.me
    record = CheckpointRecord(
        session.chronicle,
        pace,
        prepared.clock,
        log.warning,
        say_news=say_news,
        n_ranks=me.n_workers,
    )
    job = Job(
        request=prepared.request,
        name=session.identity.folder,
        env=prepared.env,
        node=me.node,
        cwd=str(Path.cwd()),
        uid=os.geteuid(),
    )
    agreement = _agreement(prepared, met, session, link) if met.is_shared else None
    return checkpoints_of(job, record, prepared.clock, agreement)


def _agreement(prepared: Prepared, met: Met, session: Session, link: Link) -> Agreement:
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
    return Agreement(
        met.board,
        link.keys,
        place,
        _survey,
        log.warning,
        is_led=lambda: link.record.phase in {Phase.RUN, Phase.DRAIN},
    )


def _witness(prepared: Prepared, met: Met, session: Session, link: Link) -> CheckpointWitness:
    return CheckpointWitness(
        met.board,
        link.keys,
        link.me,
        prepared.clock,
        prepared.request.plan.checkpoints.replicas,
        gave_up=Overdue(session.chronicle, log.warning).gave_up,
    )


def _survey(directory: str) -> Stored:
    from gpuops.agent.keeper_tie import survey

    return survey(directory)


def _enter(prepared: Prepared, met: Met, node: str, mine: Identity) -> tuple[Member, View]:
    me = Member(
        agent=str(uuid4()),
        node=node,
        address=met.address,
        n_workers=prepared.config.nproc_per_node,
        order=prepared.request.plan.order,
    )
    fresh = ControlRecord(
        run_id=mine.run_id,
        folder=mine.folder,
        generation=0,
        phase=Phase.FORM,
        since_s=0.0,
        fingerprint=fingerprint(prepared.request),
    )
    return me, enter(met.board, me, fresh, prepared.clock, threading.Event().wait)


def _drain_grace_s(prepared: Prepared, name: str) -> float:
    now_s, asked_s = prepared.clock.now_us() / US_PER_S, prepared.request.plan.drain_grace_s
    return drain_grace(prepared.env, now_s, Signals[name], asked_s)


def _end_s(prepared: Prepared) -> float:
    """Return what a live agent may take from the news that its generation is over to its report."""
    return prepared.failure_grace_s + EVIDENCE_S + KILL_WAIT_S + END_MARGIN_S


def _timing(prepared: Prepared) -> Timing:
    plan = prepared.request.plan
    return Timing(
        suspect_s=plan.suspect_s,
        dead_s=plan.dead_s,
        end_s=_end_s(prepared),
        last_call_s=plan.last_call_s,
        first_call_s=plan.first_call_s,
        join_timeout_s=plan.join_timeout_s,
        grow_after_s=plan.grow_after_s,
    )


def _gate(prepared: Prepared, gpus: GpuSentry) -> GateKeeper:
    if not prepared.request.plan.gate:
        return OpenGate()
    plan = GatePlan(env=prepared.env, deadline_s=prepared.request.plan.gate_deadline_s)
    memory = open_memory(prepared.env, os.getpid(), prepared.clock)

    def check() -> HealthGate:
        return HealthGate(replace(plan, gpus=gpus.listed_uuids))

    return HealthKeeper(check, memory, prepared.clock, log.info, gpus.own_uuids)
