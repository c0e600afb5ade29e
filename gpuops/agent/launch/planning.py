"""From what was typed, the environment, the settings and Slurm to one plan, or one refusal."""

import argparse
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpuops.agent.launch.endpoint import Endpoint, fill_torch, resolve_endpoint, workers_master
from gpuops.agent.launch.job_token import TOKEN, given_token, own_token_file
from gpuops.agent.launch.option_values import RendezvousTimeouts, parse_conf
from gpuops.agent.launch.options import (
    OUR_OPTIONS,
    TORCH_OPTIONS,
    Option,
    Options,
    RunRequest,
    TypedOptions,
    read_option,
)
from gpuops.agent.launch.plan import CheckpointPlan, EndpointKind, LaunchPlan
from gpuops.agent.launch.preconditions import why_unseen
from gpuops.agent.launch.restart_policy import node_count, read, restart_policy
from gpuops.agent.launch.slurm import SlurmStep, refuse_batch_script, step_of
from gpuops.checkpoint.storage.address import AddressError, check_address
from gpuops.config import schema
from gpuops.config.resolve import Settings
from gpuops.errors import UsageError
from gpuops.incident.decision import RestartPolicy
from gpuops.wire.worker_drill import VARIABLE, WorkerDrill, drill_of_run

_LOOPBACK = "127.0.0.1"
# Of the silence that is death: `Plan`'s own proportions, 6 s and 10 s of 15 s.
_SUSPECT, _FENCE = 0.4, 2 / 3


def request_of(
    typed: TypedOptions, settings: Settings, env: Mapping[str, str], *, uid: int
) -> RunRequest:
    """Return what is to be launched, with its plan.

    What is typed wins over ``PET_*`` and ``GPUOPS_*``, these over the file, all over Slurm.

    Raises:
        UsageError: A value that means nothing, or two that contradict each other; both are named as
            they were given.
    """
    found = argparse.Namespace(**vars(typed.found))
    options = _options(found, env, settings)
    step = step_of(env)
    is_standalone = bool(found.standalone)
    if options["nnodes"].text is None and not is_standalone:
        refuse_batch_script(env, step)
    size = node_count(options, step, is_standalone=is_standalone)
    terms = restart_policy(options, size)
    place = resolve_endpoint(
        options, size, step, is_standalone=is_standalone, store_url=settings.store_url
    )
    timing = parse_conf(options["rdzv_conf"].text or "", "--rdzv-conf")
    plan = replace(_plan(options, terms, place, step), checkpoints=_checkpoints(options, settings))
    plan = _timed(replace(plan, spares=size.spares, local_address=found.local_addr), timing)
    plan = _with_token(plan, options, env, settings.state_dir, uid)
    _fill(found, options, plan, place, step, is_standalone=is_standalone)
    is_private = place.kind is EndpointKind.PRIVATE
    drill = drill_of_run(env, is_allowed=found.allow_drills)
    return RunRequest(
        torch=found,
        command=typed.command,
        run_name=found.run_name,
        plan=plan,
        is_private=is_private,
        master=workers_master(options) if is_private and not is_standalone else None,
        print_timeouts=found.print_timeouts,
        as_json=found.as_json,
        drill=drill,
        given={name: item.shown for name, item in options.items() if item.is_set},
        warnings=(
            *typed.warnings,
            *_drill_warnings(env, drill),
            *_warnings(plan, timing, None if settings.disabled else why_unseen(found)),
        ),
    )


def _options(found: argparse.Namespace, env: Mapping[str, str], settings: Settings) -> Options:
    names = (*TORCH_OPTIONS, *OUR_OPTIONS)
    return {name: read_option(name, found, env, settings.values) for name in names}


def _plan(
    options: Options, policy: RestartPolicy, endpoint: Endpoint, step: SlurmStep | None
) -> LaunchPlan:
    address, port = read(options["http"], schema.parse_http_address)
    grace, decide = options["drain_grace"], options["decide"]
    return LaunchPlan(
        restart_policy=policy,
        endpoint=endpoint.meeting(""),
        order=endpoint.order,
        hang_timeout_s=read(options["hang_timeout"], schema.parse_hang_timeout),
        slow_after_s=read(options["slow_after"], schema.parse_slow_after),
        gate=read(options["health_gate"], schema.parse_switch),
        preflight=read(options["preflight"], schema.parse_preflight),
        records_steps=read(options["record_steps"], schema.parse_switch),
        grow_after_s=read(options["grow_after"], schema.parse_grow_after),
        drain_grace_s=read(grace, schema.parse_drain_grace) if grace.text else None,
        http_address=address,
        http_port=port,
        decide=read(decide, schema.parse_function_name) if decide.text else None,
        parks=step is not None and endpoint.kind is not EndpointKind.PRIVATE,
    )


def _with_token(
    plan: LaunchPlan, options: Options, env: Mapping[str, str], state_dir: Path, uid: int
) -> LaunchPlan:
    """Return *plan* with the given token, or with where the user's own is, unless insecure."""
    given = given_token(env, options["token_file"].text, uid)
    insecure, replicas = options["insecure"], options["ckpt_replicas"]
    if plan.endpoint.kind is EndpointKind.PRIVATE:
        return plan  # nothing listens
    if not read(insecure, schema.parse_switch):
        own = None if given else own_token_file(state_dir)
        return replace(plan, endpoint=replace(plan.endpoint, token=given, own_token=own))
    if given:
        name = TOKEN if env.get(TOKEN) else options["token_file"].shown
        raise UsageError(f"{insecure.shown}: a token is given, too ({name}); leave one out")
    if replicas.is_set and not replicas.is_general and plan.checkpoints.replicas > 1:
        raise UsageError(
            f"{insecure.shown}: no node serves its states to others, as {replicas.shown} asks; "
            "leave one out"
        )
    return replace(plan, checkpoints=replace(plan.checkpoints, replicas=1))


def _checkpoints(options: Options, settings: Settings) -> CheckpointPlan:
    wanted, directory = options["ckpt"], options["ckpt_dir"]
    values = settings.values
    return CheckpointPlan(
        in_memory=read(wanted, schema.parse_checkpoint_mode) and not settings.disabled,
        directory=None if directory.text is None else _resolve_directory(directory),
        lease_s=schema.parse_duration(values["checkpoint.lease"].value),
        replicas=read(options["ckpt_replicas"], schema.parse_replicas),
        domain=read(options["ckpt_domain"], schema.parse_domain),
        last_save_s=schema.parse_duration(values["checkpoint.last_save"].value),
    )


def _resolve_directory(option: Option) -> str:
    """Return the directory as every worker finds it, whatever folder it goes to."""
    directory = read(option, schema.parse_directory)
    try:
        check_address(directory)
    except AddressError as exc:
        raise UsageError(f"{option.shown}: {exc}") from None
    return directory if "://" in directory else str(Path(directory).expanduser().absolute())


def _timed(plan: LaunchPlan, timing: RendezvousTimeouts) -> LaunchPlan:
    """Return *plan* with what ``--rdzv-conf`` says in the place of defaults."""
    if timing.join_timeout_s is not None:
        plan = replace(plan, join_timeout_s=timing.join_timeout_s)
    if timing.last_call_s is not None:
        plan = replace(plan, last_call_s=timing.last_call_s, first_call_s=timing.last_call_s)
    if timing.is_host is not None:
        plan = replace(plan, endpoint=replace(plan.endpoint, is_host=timing.is_host))
    if timing.dead_s is not None:
        dead_s = timing.dead_s
        plan = replace(
            plan,
            dead_s=dead_s,
            suspect_s=_SUSPECT * dead_s,
            fence_s=_FENCE * dead_s,
            # Whoever bears longer silence of a peer bears it of the control store.
            store_lost_s=max(plan.store_lost_s, 2 * dead_s),
        )
    plan = replace(plan, quorum=timing.quorum)
    if timing.store_lost_s is not None:
        plan = replace(plan, store_lost_s=timing.store_lost_s)
    return plan


def _fill(
    found: argparse.Namespace,
    options: Options,
    plan: LaunchPlan,
    endpoint: Endpoint,
    step: SlurmStep | None,
    *,
    is_standalone: bool,
) -> None:
    """Put into *found* what torch's functions read there, as torchrun's own parser would have."""
    fill_torch(found, endpoint)
    terms = plan.restart_policy
    found.nnodes = f"{terms.nodes_min}:{terms.nodes_max}"
    found.max_restarts = terms.restarts_max
    found.rdzv_conf = ""  # read, as all of the rendezvous, by us
    gpus = None if step is None or step.gpus is None else str(step.gpus)
    found.nproc_per_node = options["nproc_per_node"].text or gpus or "1"
    if endpoint.kind is EndpointKind.PRIVATE:
        found.local_addr = found.local_addr or _LOOPBACK
        if is_standalone or options["rdzv_id"].text is None:
            found.rdzv_id = str(uuid.uuid4())  # as under torchrun --standalone


def _drill_warnings(env: Mapping[str, str], drill: WorkerDrill | None) -> tuple[str, ...]:
    if drill is not None:
        return (f"--allow-drills: the fault {env[VARIABLE]} is injected",)
    if env.get(VARIABLE):
        return (f"{VARIABLE} is ignored: a fault is injected with --allow-drills only",)
    return ()


def _warnings(plan: LaunchPlan, timing: RendezvousTimeouts, unseen: str | None) -> tuple[str, ...]:
    lines = [] if unseen is None else [unseen]
    if timing.ignored:
        lines.append(f"--rdzv-conf: {', '.join(timing.ignored)} means nothing here and is left out")
    if plan.quorum and plan.endpoint.kind is not EndpointKind.TCP:
        kind = plan.endpoint.kind
        where = "one node alone" if kind is EndpointKind.PRIVATE else kind.value.capitalize()
        lines.append(f"--rdzv-conf: quorum=1 changes nothing: {where} holds the control record")
    if plan.endpoint.is_insecure:
        lines.append(
            "--insecure: whoever reaches the agents can read and stop this run, as with torchrun; "
            "no node serves its checkpoints in memory to others"
        )
    return tuple(lines)
