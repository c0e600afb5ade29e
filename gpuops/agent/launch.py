"""``gpuops run``: torch's ``launch_agent`` with our agent, our logs and a memory.

The rendezvous is closed for everyone only after a run that came to its end; never because of an
error or a signal on this node alone.
"""

import argparse
import inspect
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from signal import Signals
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    registry,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig, _get_addr_and_port
from torch.distributed.run import config_from_args

from gpuops.agent.agent import FAILURE_GRACE_S, GpuopsAgent, Parts, WorkerStartError
from gpuops.agent.arguments import Request
from gpuops.agent.identity import Identity
from gpuops.agent.logs import GenerationLogs
from gpuops.agent.private_rendezvous import PrivateRendezvous
from gpuops.agent.records import slurm_job
from gpuops.agent.rundir import folder_name
from gpuops.agent.session import Session
from gpuops.agent.signals import UNUSED_SIGNAL, Cancellation
from gpuops.agent.surroundings import describe_run, surroundings
from gpuops.agent.values import check_log_dir, check_startable, check_values
from gpuops.config import Settings, export
from gpuops.errors import EXIT_FAIL, EXIT_INTERNAL, EXIT_OK, UsageError
from gpuops.host.clock import Clock
from gpuops.model import uuid7
from gpuops.scrub import scrub

log = logging.getLogger(__name__)

SHIM = Path(__file__).parents[1] / "worker" / "shim.py"
SIGNALS_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
# Slurm kills what is left 30 s after SIGTERM (KillWait, slurm.conf(5)); by then we have recorded.
CANCEL_GRACE_S = 20.0
ABANDON_S = 5.0  # for the record of a run that has no workers yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, for the command to print."""

    exit_code: int
    outcome: str
    reason: str
    run_id: str | None = None
    run_dir: Path | None = None
    note: str | None = None


def launch(
    request: Request, settings: Settings, env: Mapping[str, str], clock: Clock, torch_version: str
) -> Outcome:
    """Run the job to its end and return how that was.

    Raises:
        UsageError: A value that torch's own checks refuse; an unusable run directory or store URL.
    """
    # Not in torch 2.8: the flag, like other options, comes and goes between releases.
    is_explicit = getattr(request.torch, "shutdown_timeout", None) is not None or bool(
        env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    )
    config, logs = _configure(request)
    entry = command(request.torch, env, disabled=settings.disabled)
    check_startable(entry[0])
    names = getattr(config, "signals_to_handle", SIGNALS_DEFAULT).split(",")
    prepare_environment(env)
    name = scrub(request.run_name or _default_name(request.torch))
    run_id = uuid7(clock.now_us(), os.urandom(10))
    describe = describe_run(
        name,
        request.command,
        env,
        cluster=settings.cluster,
        torch_version=torch_version,
        max_restarts=config.max_restarts,
    )
    around = surroundings(settings, env, clock, describe=describe)
    job, restarts = slurm_job(env)
    timeout_s = float(getattr(config, "shutdown_timeout", None) or 0)
    parts = Parts(
        clock=clock,
        node=around.node,
        identity=Identity(run_id, folder_name(name, run_id, clock.now_us())),
        logs=logs,
        cancellation=Cancellation(names, clock),
        open_session=lambda identity, leads: Session(around, identity, leads=leads),
        say=log.warning,
        alone=config.max_nodes == 1,
        agent_pid=os.getpid(),
        slurm_job_id=job,
        slurm_restart_count=restarts,
        failure_grace_s=timeout_s if is_explicit else FAILURE_GRACE_S,
        cancel_grace_s=timeout_s if is_explicit else CANCEL_GRACE_S,
    )
    return _run(request, config, entry, parts)


def prepare_environment(env: Mapping[str, str]) -> None:
    """Set what torch reads from the environment of the agent.

    A store shared between agent and workers keeps keys of dead workers: with it, restarted workers
    often wait for peers that are gone (pytorch issue 135712).
    """
    wanted = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": UNUSED_SIGNAL,
    }
    export(wanted)


def command(
    args: argparse.Namespace, env: Mapping[str, str], *, disabled: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the program of a worker and its arguments; without the shim where it is disabled."""
    python = env.get("PYTHON_EXEC") or sys.executable
    program = [args.training_script, *args.training_script_args]
    if args.no_python:
        if disabled:
            return program[0], tuple(program[1:])
        return python, (str(SHIM), "--exec", *program)
    # As under torchrun; the shim writes whole lines, so what a killed rank had ended is on disk.
    shim = [] if disabled else [str(SHIM)]
    module = ["-m"] if args.module else []
    return python, ("-u", *shim, *module, *program)


def _configure(request: Request) -> tuple[LaunchConfig, GenerationLogs]:
    """Return torch's configuration, in which the logs are ours.

    Raises:
        UsageError: torch's own checks refuse a value.
    """
    args = request.torch
    check_values(args, getattr(rendezvous_handler_registry, "_registry", None))
    if args.logs_specs is None:
        check_log_dir(args.log_dir)
    log_dir, args.log_dir = args.log_dir, os.devnull  # else torch makes a directory of its own
    try:
        config, _entrypoint, _arguments = config_from_args(args)
    except (AssertionError, ValueError, RuntimeError, KeyError, ImportError) as exc:
        said = str(exc) or "a flag has a value that torch refuses"
        raise UsageError(said) from exc
    if config.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node={args.nproc_per_node}: this node has none")
    if request.is_private and config.min_nodes > 1:
        raise UsageError(
            f"--standalone is a run on one node, and --nnodes={args.nnodes} waits for "
            "more; leave one of them out"
        )
    theirs = config.logs_specs
    assert theirs is not None
    inner = theirs if args.logs_specs is not None else None
    logs = GenerationLogs(
        theirs._redirects,  # noqa: SLF001 torch parses these flags and keeps the result there only
        theirs._tee,  # noqa: SLF001
        theirs._local_ranks_filter,  # noqa: SLF001
        inner,
        Path(log_dir) if log_dir else None,
    )
    config.logs_specs = logs
    return config, logs


def _run(
    request: Request, config: LaunchConfig, entry: tuple[str, tuple[str, ...]], parts: Parts
) -> Outcome:
    initialize_metrics(MetricsConfig(config.metrics_cfg))
    cancellation = parts.cancellation
    cancellation.abandon = lambda number: _abandon(None, parts, number)
    cancellation.install()
    try:
        with cancellation.interruptible():
            agent = _make_agent(request, config, entry, parts)
    except (RendezvousError, ValueError) as exc:
        cancellation.restore()
        session = parts.open_session(parts.identity, True)
        return _close(session, _no_rendezvous(session, exc))
    except SignalException as exc:
        cancellation.restore()
        return _close(*_cancelled(None, parts, exc.sigval))
    cancellation.heard = lambda number: _say_what_follows(agent, parts, number)
    cancellation.abandon = lambda number: _abandon(agent, parts, number)
    try:
        ended = _supervise(agent, parts)
    except BaseException as exc:  # boundary: recorded as ours, then ends the command
        if agent.session is not None:
            text = traceback.format_exc()
            agent.session.chronicle.tool_failed("supervising the workers", exc, text)
            ended = Outcome(exit_code=EXIT_INTERNAL, outcome="failed", reason=str(exc))
            _close(agent.session, ended)
        raise
    finally:
        agent.close()
        cancellation.restore()
    return _close(agent.session or parts.open_session(parts.identity, True), ended)


def _supervise(agent: GpuopsAgent, parts: Parts) -> Outcome:
    handler = agent.get_worker_group().spec.rdzv_handler
    event_handler = agent.get_worker_group().spec.event_log_handler
    try:
        result = agent.run()
    except SignalException as exc:
        _session, ended = _cancelled(agent, parts, exc.sigval)
        events.record(agent.get_event_failed(), event_handler)
        return ended
    except RendezvousError as exc:
        events.record(agent.get_event_failed(), event_handler)
        if agent.session is None:
            agent.session = parts.open_session(parts.identity, True)
        return _no_rendezvous(agent.session, exc)
    except WorkerStartError as exc:
        events.record(agent.get_event_failed(), event_handler)
        return _not_started(agent, scrub(str(exc)))
    events.record(agent.get_event_succeeded(), event_handler)
    handler.shutdown()
    if result is not None and result.is_failed():
        spent = agent.get_worker_group().spec.max_restarts
        return Outcome(
            exit_code=EXIT_FAIL,
            outcome="failed",
            reason=f"a worker failed and the budget of {spent} restarts is spent",
        )
    return Outcome(exit_code=EXIT_OK, outcome="completed", reason="every rank exited with code 0")


def _say_what_follows(agent: GpuopsAgent, parts: Parts, number: Signals) -> None:
    if agent.has_workers():
        limit_s = parts.cancel_grace_s
        parts.say(
            f"{number.name}: ending the workers, at most {limit_s:g} s; again to kill them now"
        )


def _cancelled(agent: GpuopsAgent | None, parts: Parts, number: Signals) -> tuple[Session, Outcome]:
    """Record that *number* ended the run, which may not have come as far as an agent."""
    session = (agent and agent.session) or parts.open_session(parts.identity, True)
    if agent is None:
        seen_ns = parts.cancellation.seen_mono_ns
        session.chronicle.cancelled(number.name, [], seen_mono_ns=seen_ns)
    else:
        agent.session = session
        session.safely("recording the cancellation", lambda: agent.cancelled(number.name))
    reason = f"{number.name} to the agent"
    return session, Outcome(exit_code=128 + number, outcome="cancelled", reason=reason)


def _abandon(agent: GpuopsAgent | None, parts: Parts, number: Signals) -> None:
    """Record the cancellation and end this process; its main thread waits for another host."""

    def record() -> None:
        _close(*_cancelled(agent, parts, number))

    parts.say(f"the run cancelled: {number.name} to the agent, which waits for its rendezvous")
    recording = threading.Thread(target=record, daemon=True)
    recording.start()
    recording.join(ABANDON_S)
    os._exit(128 + number)


def _no_rendezvous(session: Session, error: Exception) -> Outcome:
    reason = f"the rendezvous failed: {_chain(error)}"
    session.safely(
        "recording the failed rendezvous", lambda: session.chronicle.rendezvous_failed(reason)
    )
    return Outcome(exit_code=EXIT_FAIL, outcome="failed", reason=reason)


def _not_started(agent: GpuopsAgent, reason: str) -> Outcome:
    session = agent.session
    assert session is not None, "workers are started in a session"
    session.safely("recording the failed start", lambda: session.chronicle.start_failed(reason))
    return Outcome(exit_code=EXIT_FAIL, outcome="failed", reason=reason)


def _close(session: Session, ended: Outcome) -> Outcome:
    note = session.close(ended.outcome, ended.exit_code, ended.reason)
    return replace(ended, run_id=session.identity.run_id, run_dir=session.directory.path, note=note)


def _make_agent(
    request: Request, config: LaunchConfig, entry: tuple[str, tuple[str, ...]], parts: Parts
) -> GpuopsAgent:
    handler, (address, port) = _rendezvous(request, config)
    given: dict[str, Any] = {f.name: getattr(config, f.name, None) for f in fields(config)}
    given |= {
        "local_world_size": config.nproc_per_node,
        "entrypoint": entry[0],
        "args": entry[1],
        "rdzv_handler": handler,
        "master_addr": address,
        "master_port": port,
    }
    # Fields and options come and go between releases of torch; what both sides have is passed on.
    spec = WorkerSpec(**{f.name: given[f.name] for f in fields(WorkerSpec) if f.name in given})
    takes = inspect.signature(LocalElasticAgent.__init__).parameters
    options = ("start_method", "log_line_prefix_template", "shutdown_timeout")
    return GpuopsAgent(
        spec, parts, **{name: given[name] for name in options if name in takes and name in given}
    )


def _rendezvous(
    request: Request, config: LaunchConfig
) -> tuple[RendezvousHandler, tuple[str | None, int | None]]:
    """Return how agents meet, and the workers' master where that is settled beforehand."""
    if request.is_private:
        handler = PrivateRendezvous(config.run_id, config.local_addr or "127.0.0.1")
        return handler, request.master or (None, None)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    return registry.get_rendezvous_handler(parameters), _get_addr_and_port(parameters)


def _chain(error: BaseException) -> str:
    """Return *error* and what caused it, in one line."""
    parts = []
    cause: BaseException | None = error
    while cause is not None:
        parts.append(" ".join(str(cause).split()) or type(cause).__name__)
        cause = cause.__cause__
    return scrub("; ".join(parts))


def _default_name(args: argparse.Namespace) -> str:
    script = str(args.training_script)
    return script.rpartition(".")[2] if args.module else Path(script).stem
