"""``gpuops run``: torch's ``launch_agent`` with our agent, our logs, an agreement and a memory.

The run ends for all when the control record says so; never because of an error or a signal on this
node alone.
"""

import argparse
import contextlib
import gc
import inspect
import logging
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing.api import SignalException

from gpuops.agent.checkpoint.api import awaited
from gpuops.agent.checkpoint.start import check_can_persist, domain_of
from gpuops.agent.elastic.agent import GpuopsAgent
from gpuops.agent.elastic.rendezvous import ControlStoreLostError, ExcludedError, RunOverError
from gpuops.agent.elastic.signals import Cancellation, SignalActions
from gpuops.agent.journal.run_dir import folder_name
from gpuops.agent.journal.session import RunOutcome, RunSession, ended_as
from gpuops.agent.launch.assemble import AssembledAgent, LaunchContext, assemble, checkpoint_job
from gpuops.agent.launch.endpoint import ControlEndpoint, meet
from gpuops.agent.launch.identity import RunIdentity
from gpuops.agent.launch.job_token import with_own_token
from gpuops.agent.launch.node_context import describe_run, node_context_of
from gpuops.agent.launch.option_values import check_startable
from gpuops.agent.launch.options import RunRequest
from gpuops.agent.launch.plan import EndpointKind
from gpuops.agent.launch.torch_config import (
    SIGNALS_DEFAULT,
    command,
    configure,
    prepare_environment,
)
from gpuops.agent.status.server import AgentServer
from gpuops.config.resolve import Settings
from gpuops.control.etcd.formation import QuorumPlan
from gpuops.control.join import RunIsOverError, leave
from gpuops.control.store import ControlStoreError, ControlStoreUnreachableError
from gpuops.errors import (
    EXIT_FAIL,
    EXIT_INTERNAL,
    EXIT_NODE_UNHEALTHY,
    EXIT_OK,
    EXIT_REQUEUE,
)
from gpuops.host.clock import Clock
from gpuops.host.node_state import node_name
from gpuops.host.trust import current_uid
from gpuops.model import uuid7
from gpuops.scrub import scrub
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

FAILURE_GRACE_S = 3.0
# Slurm kills what is left 30 s after SIGTERM (KillWait, slurm.conf(5)); by then we have recorded.
CANCEL_GRACE_S = 20.0
ABANDON_S = 5.0  # for the record of a run whose main thread does not answer
DRAIN_SIGNALS = ("SIGTERM", "SIGUSR1")
LEAVE_S = 2.0


def launch(
    request: RunRequest,
    settings: Settings,
    env: Mapping[str, str],
    clock: Clock,
    torch_version: str,
) -> RunOutcome:
    """Run the job to its end and return how that was.

    Raises:
        UsageError: A value that torch's own checks refuse; an unusable run directory, store URL or
            directory of checkpoints; another token; another job or agent under the same id.
    """
    is_explicit = _has_shutdown_timeout(request, env)
    config, logs = configure(request)
    entry = command(request.torch, env, disabled=settings.disabled)
    check_startable(entry[0])
    names = getattr(config, "signals_to_handle", SIGNALS_DEFAULT).split(",")
    prepare_environment(env)
    timeout_s = float(getattr(config, "shutdown_timeout", None) or 0)
    prepared = LaunchContext(
        request=with_own_token(request, current_uid()),
        config=config,
        entry=entry,
        clock=clock,
        cancellation=Cancellation(names, clock, drains=_drain_signals(names)),
        failure_grace_s=timeout_s if is_explicit else FAILURE_GRACE_S,
        cancel_grace_s=timeout_s if is_explicit else CANCEL_GRACE_S,
        env=env,
        state_dir=settings.state_dir,
    )
    name = scrub(request.run_name or _default_name(request.torch))
    describe = describe_run(
        name,
        request.command,
        env,
        cluster=settings.cluster,
        torch_version=torch_version,
        max_restarts=request.plan.restart_policy.restarts_max,
    )
    around = node_context_of(settings, env, clock, describe=describe)
    initialize_metrics(MetricsConfig(config.metrics_cfg))
    mine = _new_identity(name, clock.now_us())
    check_can_persist(checkpoint_job(prepared, around.node, mine.folder))
    prepared.cancellation.install()
    try:
        with prepared.cancellation.interruptible():
            assembly = _join(
                prepared, lambda met: assemble(prepared, met, around, settings, logs, mine)
            )
    except RunIsOverError as exc:
        return RunOutcome(
            exit_code=exc.record.exit_code or EXIT_OK,
            outcome=ended_as(exc.record.exit_code or EXIT_OK),
            reason=f"the run of this id has ended: {exc.record.reason}",
        )
    except ControlStoreError as exc:
        return _record_no_endpoint(
            RunSession(around, mine, leads=True), f"the rendezvous failed: {exc}"
        )
    except SignalException as exc:
        return _stopped_before(RunSession(around, mine, leads=True), prepared, exc.sigval)
    finally:
        prepared.cancellation.restore()
    gc.freeze()  # what the imports made stays: no collection scans it, nor does the exit
    return _run(prepared, assembly)


def _new_identity(name: str, now_us: int) -> RunIdentity:
    run_id = uuid7(now_us, os.urandom(10))
    return RunIdentity(run_id, folder_name(name, run_id, now_us))


def _has_shutdown_timeout(request: RunRequest, env: Mapping[str, str]) -> bool:
    # Not in torch 2.8: the flag, like other options, comes and goes between releases.
    flag = getattr(request.torch, "shutdown_timeout", None)
    return flag is not None or bool(env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))


def _drain_signals(names: list[str]) -> tuple[str, ...]:
    """Return the signals that mean an orderly end; SIGTERM unless the user handles it otherwise."""
    return tuple(name for name in DRAIN_SIGNALS if name != "SIGTERM" or "SIGTERM" in names)


def _join(
    prepared: LaunchContext, enter: Callable[[ControlEndpoint], AssembledAgent]
) -> AssembledAgent:
    """Meet the others and join the run; retry if the control store stops answering in between.

    Raises:
        ControlStoreUnreachableError: It has not answered within the time to join.
    """
    end_ns = prepared.clock.mono_ns() + round(prepared.request.plan.join_timeout_s * NS_PER_S)
    while True:
        met = _find_endpoint(prepared)
        try:
            return enter(met)
        except ControlStoreUnreachableError as exc:
            met.store.close()
            if met.quorum is not None:
                met.quorum.abandon()
            if prepared.clock.mono_ns() >= end_ns:
                raise
            log.warning("entering the run again: %s", exc)


def _find_endpoint(prepared: LaunchContext) -> ControlEndpoint:
    plan, cancellation = prepared.request.plan, prepared.cancellation

    def wait(seconds: float) -> None:
        cancellation.check()
        if cancellation.drain is not None:
            raise SignalException("asked to stop", sigval=cancellation.drain)
        threading.Event().wait(seconds)

    return meet(
        plan.endpoint,
        prepared.clock,
        local_address=plan.local_address,
        limit_s=plan.join_timeout_s,
        wait=wait,
        quorum=_quorum_plan(prepared),
    )


def _quorum_plan(prepared: LaunchContext) -> QuorumPlan | None:
    plan, node = prepared.request.plan, node_name(prepared.env)
    if plan.quorum is False or plan.endpoint.kind is not EndpointKind.TCP:
        return None
    return QuorumPlan(
        node=node,
        domain=domain_of(plan.checkpoints.domain, node, prepared.env, log.warning),
        limits=plan.gather_limits,
        is_asked_for=plan.quorum is True,
    )


def _record_no_endpoint(session: RunSession, text: str) -> RunOutcome:
    """Record a run of one agent, which never reached the others."""
    reason = scrub(text)
    session.safely("recording the failure", lambda: session.journal.rendezvous_failed(reason))
    return _close(session, RunOutcome(exit_code=EXIT_FAIL, outcome="failed", reason=reason))


def _stopped_before(session: RunSession, prepared: LaunchContext, number: Signals) -> RunOutcome:
    """Record a run that was asked to end before this agent was part of it."""
    name, journal = number.name, session.journal
    reason = f"{name} to the agent, which waited for its run"
    if prepared.cancellation.drain is number:
        session.safely("recording the drain", lambda: journal.drained(name, [], EXIT_REQUEUE))
        ended = RunOutcome(exit_code=EXIT_REQUEUE, outcome="preempted", reason=reason)
    else:
        session.safely("recording the cancellation", lambda: journal.cancelled(name, []))
        ended = RunOutcome(exit_code=128 + number, outcome="cancelled", reason=reason)
    return _close(session, ended)


def _run(prepared: LaunchContext, assembly: AssembledAgent) -> RunOutcome:
    session, parts, cancellation = assembly.session, assembly.services, prepared.cancellation
    agent = _make_agent(prepared, assembly)
    cancellation.install(
        SignalActions(
            on_signal=lambda number: _log_exit(assembly, number),
            abandon=lambda number: _abandon(agent, assembly, number),
        )
    )
    assembly.threads.start()
    server = _serve(assembly)
    try:
        ended = _supervise(agent, prepared, assembly)
        _end_checkpoints(prepared, assembly)
    except BaseException as exc:  # boundary: recorded as ours, then ends the command
        text = traceback.format_exc()
        session.journal.tool_failed("supervising the workers", exc, text)
        _close(session, RunOutcome(exit_code=EXIT_INTERNAL, outcome="failed", reason=str(exc)))
        raise
    finally:
        if server is not None:
            server.close()
        agent.close()
        parts.checkpoints.leave()
        _leave(assembly)
        cancellation.restore()
    return _close(session, ended)


def _end_checkpoints(prepared: LaunchContext, assembly: AssembledAgent) -> None:
    """End the keeper once its newest state has persisted; a signal to us ends that wait.

    Where a signal ended the run, that state has had its time already.
    """
    checkpoints, cancellation = assembly.services.checkpoints, prepared.cancellation
    is_asked = (
        cancellation.received or cancellation.drain or assembly.services.control.record.drain_signal
    )
    save_s = 0.0 if is_asked else assembly.services.plan.checkpoints.last_save_s
    try:
        awaited(lambda: checkpoints.end(save_s), partial(_restart_check, prepared, is_asked))
    except SignalException as exc:
        assembly.services.say(f"{exc.sigval.name}: the last checkpoint is not waited for any more")


def _restart_check(prepared: LaunchContext, is_asked: object) -> None:
    """Raise where a signal came that had not come before."""
    cancellation = prepared.cancellation
    number = cancellation.received or cancellation.drain
    if number is not None and (cancellation.is_urgent or not is_asked):
        raise SignalException("a signal while checkpoints persist", sigval=number)


def _serve(assembly: AssembledAgent) -> AgentServer | None:
    plan = assembly.services.plan
    if plan.http_port is None:
        return None
    server = AgentServer(plan.http_address, plan.http_port, assembly.snapshot.take).start()
    assembly.snapshot.http_port = server.port
    return server


def _supervise(agent: GpuopsAgent, prepared: LaunchContext, assembly: AssembledAgent) -> RunOutcome:
    session, handler = assembly.session, agent.get_worker_group().spec.event_log_handler
    try:
        agent.run()
    except SignalException as exc:
        name = exc.sigval.name
        _save_last(prepared, assembly)
        session.safely("recording the cancellation", lambda: agent.cancelled(name))
        reason = f"{exc.sigval.name} to the agent"
        ended = RunOutcome(exit_code=128 + exc.sigval, outcome="cancelled", reason=reason)
    except RunOverError as exc:
        code = EXIT_OK if exc.record.exit_code is None else exc.record.exit_code
        session.leads = exc.record.decided_by == assembly.services.node
        end = partial(assembly.services.decisions.record_end, exc.record, leads=session.leads)
        session.safely("recording the end", end)
        ended = RunOutcome(exit_code=code, outcome=ended_as(code), reason=exc.record.reason)
    except ExcludedError as exc:
        ended = _record_excluded(str(exc), assembly)
    except ControlStoreLostError as exc:
        why = str(exc)
        session.safely("recording the loss", lambda: session.journal.store_lost(why))
        ended = RunOutcome(exit_code=EXIT_REQUEUE, outcome="failed", reason=why)
    else:
        session.leads = assembly.services.control.record.decided_by == assembly.services.node
        events.record(agent.get_event_succeeded(), handler)
        return RunOutcome(
            exit_code=EXIT_OK, outcome="completed", reason="every rank exited with code 0"
        )
    events.record(agent.get_event_failed(), handler)
    return ended


def _save_last(prepared: LaunchContext, assembly: AssembledAgent) -> None:
    """Have the newest checkpoint persist before a cancelled run ends; another signal cuts it short.

    The workers are gone by now.
    """
    checkpoints, limit_s = assembly.services.checkpoints, assembly.services.cancel_grace_s

    def check() -> None:
        if prepared.cancellation.is_urgent:
            raise SignalException("another signal", sigval=Signals.SIGKILL)

    with contextlib.suppress(SignalException):
        awaited(lambda: checkpoints.flush(limit_s), check)


def _record_excluded(reason: str, assembly: AssembledAgent) -> RunOutcome:
    """End as a node that is left out; one under srun waits (`AgentWait.excluded`)."""
    parts, session = assembly.services, assembly.session
    now_us = parts.clock.now_us()
    session.safely("recording the exclusion", lambda: session.journal.excluded(reason, now_us))
    parts.say(
        f"node {parts.node} is left out of this run: {reason}; once it is repaired, "
        f"`gpuops run readmit {parts.node}`, then start this command there again"
    )
    alone = not assembly.endpoint.is_shared
    session.leads = alone
    code = EXIT_NODE_UNHEALTHY
    return RunOutcome(exit_code=code, outcome="failed", reason=reason, goes_on=not alone)


def _leave(assembly: AssembledAgent) -> None:
    """Leave the run, so that no agent waits for this one; a silent control store delays nothing."""

    def go() -> None:
        quorum, is_last = assembly.endpoint.quorum, False
        with contextlib.suppress(ControlStoreError):
            if not assembly.endpoint.is_shared:
                assembly.endpoint.store.close()  # wakes the control thread, which waits on it
            assembly.threads.stop()
            if assembly.endpoint.guard is not None:
                assembly.endpoint.guard.close()
            if assembly.endpoint.is_shared:
                control, store = assembly.services.control, assembly.endpoint.store
                kind = assembly.launch.request.plan.endpoint.kind
                has_server = kind is EndpointKind.TCP and quorum is None
                dead = assembly.services.leader.dead_agents
                is_last = leave(store, control.record, control.me, has_server=has_server, dead=dead)
        if quorum is not None:
            quorum.close(is_last=is_last)
            if is_last:
                quorum.store.end_servers()
        assembly.endpoint.store.close()

    assembly.close()
    going = threading.Thread(target=go, daemon=True)
    going.start()
    going.join(LEAVE_S)


def _log_exit(assembly: AssembledAgent, number: Signals) -> None:
    parts = assembly.services
    if not parts.current.has_workers():
        return
    if number.name in DRAIN_SIGNALS and assembly.launch.cancellation.received is None:
        limit_s = parts.drain_grace_s(number.name)
        parts.say(
            f"{number.name}: the workers finish their step and stop, at most {limit_s:g} s; "
            "again to end them now"
        )
        return
    limit_s = parts.cancel_grace_s
    parts.say(f"{number.name}: ending the workers, at most {limit_s:g} s; again to kill them now")


def _abandon(agent: GpuopsAgent, assembly: AssembledAgent, number: Signals) -> None:
    """Record the cancellation and end this process; its main thread waits for another host."""
    name = number.name

    def record() -> None:
        session = assembly.session
        session.safely("recording the cancellation", lambda: agent.cancelled(name))
        reason = f"{name} to the agent"
        _close(session, RunOutcome(exit_code=128 + number, outcome="cancelled", reason=reason))

    assembly.services.say(f"the run cancelled: {name} to the agent, which waits for others")
    recording = threading.Thread(target=record, daemon=True)
    recording.start()
    recording.join(ABANDON_S)
    os._exit(128 + number)


def _close(session: RunSession, ended: RunOutcome) -> RunOutcome:
    note = session.close(ended.outcome, ended.exit_code, ended.reason)
    return replace(ended, run_id=session.identity.run_id, run_dir=session.directory.path, note=note)


def _make_agent(prepared: LaunchContext, assembly: AssembledAgent) -> GpuopsAgent:
    config = prepared.config
    address, port = prepared.request.master or (None, None)
    given: dict[str, Any] = {f.name: getattr(config, f.name, None) for f in fields(config)}
    given |= {
        "local_world_size": config.nproc_per_node,
        "entrypoint": prepared.entry[0],
        "args": prepared.entry[1],
        "rdzv_handler": assembly.rendezvous,
        "master_addr": address,
        "master_port": port,
        "max_restarts": prepared.request.plan.restart_policy.restarts_max,
    }
    # Fields and options come and go between releases of torch; what both sides have is passed on.
    spec = WorkerSpec(**{f.name: given[f.name] for f in fields(WorkerSpec) if f.name in given})
    takes = inspect.signature(LocalElasticAgent.__init__).parameters
    options = ("start_method", "log_line_prefix_template", "shutdown_timeout")
    return GpuopsAgent(
        spec,
        assembly.services,
        assembly.snapshot,
        assembly.wait_hooks.waiting,
        **{name: given[name] for name in options if name in takes and name in given},
    )


def _default_name(args: argparse.Namespace) -> str:
    script = str(args.training_script)
    return script.rpartition(".")[2] if args.module else Path(script).stem
