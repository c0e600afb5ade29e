"""``gpuops sweep``: test the nodes of a Slurm step, or hosts over ssh, in pairs."""

import json
import secrets
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from gpuops.agent.launch.endpoint import address_towards
from gpuops.agent.launch.job_token import given_token, own_token, own_token_file
from gpuops.agent.launch.slurm import SlurmStep, step_of
from gpuops.burnin.pairs import NodePair
from gpuops.burnin.schedule import ALL_PAIRS_MAX
from gpuops.checks.core.runner import CheckRun
from gpuops.cli.interrupt import sigterm_interrupts
from gpuops.cli.lazy_group import LazyGroup
from gpuops.cli.options import (
    FiniteRange,
    command_words,
    json_option,
    option_callback,
    settings_of,
    warn_unless_stored,
)
from gpuops.cli.slurm import hook_context, scontrol_finder
from gpuops.cli.sweep_node import SUITE, SweptNode, warn
from gpuops.cli.sweep_result import (
    check_run_of,
    print_round,
    print_sweep,
    sweep_body,
    sweep_events,
)
from gpuops.config.resolve import Settings, environ, unset_environ
from gpuops.config.schema import to_size
from gpuops.control.store import ControlStoreUnreachableError
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_TRY_LATER, EXIT_UNKNOWN, UsageError
from gpuops.gate.record import RECORD_TEST_S, record
from gpuops.host.clock import SystemClock
from gpuops.host.process.sidecar import die_with_parent_thread
from gpuops.host.trust import current_uid
from gpuops.hostlist import expand
from gpuops.model import EntityKind, FailureClass, Finding, Json, Status
from gpuops.slurm.env import job_of
from gpuops.sweep.coordinator import JOIN_S, SweepResult, SweepSettings
from gpuops.sweep.session import SweepAddress, SweepInterruptedError, SweepLeader, take_part
from gpuops.units import US_PER_S, format_seconds

_SEED_BITS = 31
_SIZE_BYTES_MAX = 2**40
_RECORD = "the node that leads it records what was tested, unless its gpuops was killed"
_EXIT_CODES = {Status.FAIL: EXIT_FAIL, Status.UNKNOWN: EXIT_UNKNOWN}


def _buffer_size(text: str) -> int:
    size = to_size(text)
    if size > _SIZE_BYTES_MAX:
        raise ValueError(f"{text!r} is more than 1TiB")
    return size


# Participants of a sweep need no store, whose modules these import.
_STORE_COMMANDS = {
    "history": (
        "gpuops.cli.sweep_show:history",
        "Name the nodes and links that fail more often than the fleet over many sweeps.",
    ),
    "show": (
        "gpuops.cli.sweep_show:show",
        "Show a recorded sweep: its matrix, what it names, and by which figures.",
    ),
}


@click.group(
    cls=LazyGroup,
    lazy=_STORE_COMMANDS,
    invoke_without_command=True,
    epilog="Example: gpuops sweep --hosts gpu[001-016]",
)
@click.option("--hosts", metavar="LIST", help="Sweep these hosts over ssh: gpu[001-016].")
@click.option("--ssh", metavar="COMMAND", help="Default: the setting burnin.ssh.")
@click.option(
    "--remote",
    metavar="COMMAND",
    default="gpuops",
    show_default=True,
    help="How gpuops is started on the hosts.",
)
@click.option(
    "--seconds", type=FiniteRange(0.1, 3600), default=5.0, show_default=True, help="Of a test."
)
@click.option(
    "--size",
    metavar="SIZE",
    callback=option_callback(_buffer_size),
    help="Buffer of each rank; default: 1GiB on GPUs, 32MiB on CPUs.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Draw the same pairs again, tested or not."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(1, 3600),
    default=20.0,
    show_default=True,
    help="Of one collective: after that the pair failed.",
)
@click.option(
    "--nightly", is_flag=True, help="One more round of all nodes, for `gpuops sweep history`."
)
@click.option(
    "--slow-percent",
    type=FiniteRange(0, 100, min_open=True, max_open=True),
    help="A pair this far below the median is slow; default: 5, more where healthy pairs differ.",
)
@click.option("--no-check", is_flag=True, help="Take part without a health check of the node.")
@click.option("--no-record", is_flag=True, help="Do not record the result.")
@click.option("--join", metavar="HOST:PORT", hidden=True)
@click.option("--run-key", metavar="KEY", hidden=True)
@click.option("--name", metavar="NODE", hidden=True)
@click.option("--lead", metavar="NODES", type=click.IntRange(min=1), hidden=True)
@click.option("--join-limit", "join_s", type=FiniteRange(0), default=JOIN_S, hidden=True)
@json_option
@click.pass_context
def sweep(
    ctx: click.Context,
    *,
    hosts: str | None,
    ssh: str | None,
    remote: str,
    seconds: float,
    size: int | None,
    seed: int | None,
    timeout_s: float,
    nightly: bool,
    slow_percent: float | None,
    no_check: bool,
    no_record: bool,
    join: str | None,
    run_key: str | None,
    name: str | None,
    lead: int | None,
    join_s: float,
    as_json: bool,
) -> int:
    """Test nodes in pairs, and name the node or the link that is slow or fails.

    Up to 16 nodes every pair is tested; above, two rounds of random pairs, first those that no
    recorded sweep of 90 days has tested. Suspects are tested again with nodes that passed. A node
    that another test uses, or that fails its health check, is left out. Run by root, a node that
    fails goes through the gate of this site's hooks: it is drained where gate.mode is enforce.

    Exit codes: 0 nobody is named, or only with a warning; 1 a node or a link failed; 3 it could not
    be judged; 64 a mistake on the command line; 75 not finished; 130 Ctrl-C; 143 SIGTERM.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return EXIT_OK
    ctx.with_resource(sigterm_interrupts())
    step = None if join is not None or hosts is not None else _step()
    settings = settings_of(ctx, burnin__ssh=ssh)
    token = "" if step is None else _token(settings.state_dir)
    node = SweptNode(
        context=hook_context(ctx, SUITE, job_of(environ())),
        find=scontrol_finder(ctx),
        is_checked=not no_check,
        is_recorded=not no_record,
    )
    names = _hosts(hosts) if hosts is not None else () if step is None else step.nodes
    leads = lead is not None or (join is None and (step is None or node.name == step.host))
    leader = SweepLeader(
        settings=SweepSettings(
            sweep=secrets.token_hex(6),
            expected=names,
            seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
            size_bytes=size,
            seconds=seconds,
            timeout_s=timeout_s,
            tested=_tested(settings, lead or len(names)) if leads and seed is None else frozenset(),
            nightly=nightly,
            slow_percent=slow_percent,
            join_s=join_s,
            nodes_max=lead,
            why_not=partial(_why_not, settings) if lead is not None else lambda _nodes: None,
        ),
        clock=node.context.clock,
        on_round=print_round if lead is None else lambda _number, _tests: None,
    )
    start_us = leader.clock.now_us()
    try:
        if join is not None:
            place = _joined(join, run_key or "")
            of_run = partial(_sweep_run, leader=leader if leads else None)
            return (of_run if as_json else _take_part)(node, place, name or node.name)
        if step is not None:
            place = SweepAddress(host=step.host, port=step.port, run_key=step.run_key, token=token)
            if not leads:
                return _take_part(node, place, node.name)
            return _lead_step(leader, node, place, start_us, as_json=as_json)
        return _report(node, _over_ssh(leader, node, settings, remote), start_us, as_json=as_json)
    except ControlStoreUnreachableError as exc:
        warn(f"the sweep was not finished: {exc}; {_RECORD}")
        return EXIT_TRY_LATER
    except SweepInterruptedError as exc:
        _interrupted(node, exc, start_us, as_json=as_json)


def _step() -> SlurmStep:
    """Return the step of srun that this is a task of.

    Raises:
        UsageError: It is none, or one of a single node.
    """
    step = step_of(environ())
    if step is None:
        raise UsageError(
            "a sweep needs several nodes: start it with `srun --ntasks-per-node=1 gpuops sweep`, "
            "or name hosts: `gpuops sweep --hosts gpu[001-016]`; one node alone is tested by "
            "`gpuops burnin`"
        )
    if len(step.nodes) < 2:
        raise UsageError(
            f"the step has one node, {step.nodes[0]}, and a pair needs two; `gpuops burnin` tests "
            "one node"
        )
    return step


def _refuse_options(ctx: click.Context) -> None:
    """Refuse the options of a sweep before ``show`` or ``history``, where they mean nothing."""
    for param in ctx.command.params:
        if ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            name = ctx.invoked_subcommand
            raise UsageError(
                f"{param.opts[0]} before `{name}` starts no sweep; put it after `{name}`"
            )


def _hosts(text: str) -> tuple[str, ...]:
    try:
        names = expand(text)
    except ValueError as exc:
        raise UsageError(f"--hosts: {exc}") from exc
    if options := [name for name in names if name.startswith("-")]:
        raise UsageError(f"--hosts: {options[0]!r} is no host; ssh would read it as an option")
    if len(names) < 2:
        raise UsageError(
            f"--hosts {text!r} names {len(names)} host{'s' * (len(names) != 1)}, and a pair needs "
            "two; one node alone is tested by `gpuops burnin`"
        )
    return names


def _tested(settings: Settings, n_nodes: int) -> frozenset[NodePair]:
    if n_nodes <= ALL_PAIRS_MAX:
        return frozenset()
    from gpuops.cli.sweep_show import known_pairs  # participants need no store

    return known_pairs(settings)


def _token(state_dir: Path) -> str:
    given = given_token(environ(), None, current_uid())
    unset_environ("GPUOPS_TOKEN")
    return given or own_token(own_token_file(state_dir), current_uid())


def _take_part(node: SweptNode, place: SweepAddress, name: str) -> int:
    start_us = node.context.clock.now_us()
    with node.locked(name) as me:
        return node.settle(take_part(place, me, environ()), start_us)


def _sweep_run(node: SweptNode, place: SweepAddress, name: str, leader: SweepLeader | None) -> int:
    """Take part in the sweep of a run, as its *leader* if given; print the findings about *name*.

    The run decides what they mean: they go through no gate, and only the leader records the sweep.
    An agent asks for it with ``--join`` and ``--json``; a host over ssh has ``--join`` alone.
    """
    die_with_parent_thread()  # with its agent
    start_us = node.context.clock.now_us()
    with node.locked(name) as me:
        if me.unfit is not None:
            warn(f"{name} is not tested: {me.unfit}")
        if leader is None:
            found = take_part(place, me, environ())
        else:
            result, found = leader.lead_step(place, me, environ())
            found = [*found, *(x for x in result.findings if x.entity.kind is EntityKind.SWITCH)]
            if result.tests:
                _record(node, result, start_us)
    found = [before_a_run(item) for item in found]
    here = [item for item in found if item.entity.kind is EntityKind.NODE]
    for item in found:
        if item not in here or item.status <= Status.SKIP:
            warn(f"{item.entity}: {item.status.word}: {item.message}")
    click.echo(json.dumps({"findings": [item.to_json() for item in here]}))
    return EXIT_OK


def before_a_run(found: Finding) -> Finding:
    """Return *found*, which keeps no node out for slow processors: they may serve another job."""
    is_busy = found.status is Status.FAIL and found.failure_class is FailureClass.HOST_SLOW
    return replace(found, status=Status.WARN) if is_busy else found


def _why_not(settings: Settings, nodes: Collection[str]) -> str | None:
    """Return why *nodes* of a run need no sweep, None if the last one of a node is too old."""
    from gpuops.cli.sweep_show import known_pairs  # participants need no store

    if len(nodes) < 2:
        return "no other node came to test it with"
    max_age_s = settings.values["burnin.sweep_max_age"].value
    pairs = known_pairs(settings, SystemClock().now_us() - round(max_age_s * US_PER_S))
    if not set(nodes).issubset(chain.from_iterable(pairs)):
        return None
    return f"all nodes were swept in the last {format_seconds(max_age_s)} (burnin.sweep_max_age)"


def _joined(join: str, run_key: str) -> SweepAddress:
    """Return where the sweep is; its token is on our input, from a run in the environment."""
    host, _, port = join.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise UsageError(f"--join {join!r}: HOST:PORT is expected")
    token = sys.stdin.readline(4096).strip() or given_token(environ(), None, current_uid())
    unset_environ("GPUOPS_TOKEN")
    return SweepAddress(host=host.strip("[]"), port=int(port), run_key=run_key, token=token)


def _lead_step(
    leader: SweepLeader, node: SweptNode, place: SweepAddress, start_us: int, *, as_json: bool
) -> int:
    with node.locked(node.name) as me:
        result, found = leader.lead_step(place, me, environ())
        try:
            return _report(node, result, start_us, as_json=as_json)
        finally:
            node.settle(found, start_us)  # also if nobody can read the result


def _over_ssh(leader: SweepLeader, node: SweptNode, settings: Settings, remote: str) -> SweepResult:
    """Sweep hosts from here; this machine takes no part unless it is one of them."""
    ssh = command_words("burnin.ssh", settings.values["burnin.ssh"].value)
    gpuops = command_words("--remote", remote)
    flags = [] if node.is_checked else ["--no-check"]
    flags += [] if node.is_recorded else ["--no-record"]

    def words(host: str, place: SweepAddress) -> list[str]:
        join = ["--join", f"{place.host}:{place.port}", "--run-key", place.run_key]
        return [*gpuops, "sweep", *join, "--name", host, *flags]

    address = address_towards(leader.settings.expected[0], 22)
    return leader.lead_remote(address, ssh, words, environ())


def _record(node: SweptNode, result: SweepResult, start_us: int) -> tuple[Json, CheckRun]:
    context = node.context
    clock = context.clock
    check_run = check_run_of(result, node.name, (start_us, clock.now_us()))
    body = sweep_body(result, check_run)
    if node.is_recorded:
        problem = record(
            lambda: sweep_events(body, result.tests, node.name, clock),
            node.name,
            context.options,
            clock,
            deadline_s=RECORD_TEST_S,
        )
        if problem is not None:
            click.echo(problem, err=True)
        else:
            options = context.options
            warn_unless_stored(context.gate.store_url, options.spool_dir, options.root)
    return body, check_run


def _interrupted(
    node: SweptNode, found: SweepInterruptedError, start_us: int, *, as_json: bool
) -> NoReturn:
    _report(node, found.result, start_us, as_json=as_json)
    raise found.cause


def _report(node: SweptNode, result: SweepResult, start_us: int, *, as_json: bool) -> int:
    """Record *result* and print it, which acts on no node; return the exit code."""
    body, check_run = _record(node, result, start_us)
    # Last: whoever does not read it, or has no space for it, loses no record.
    print_sweep(body, check_run, result.tests, as_json=as_json)
    return _EXIT_CODES.get(check_run.verdict, EXIT_OK)
