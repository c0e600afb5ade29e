"""``gpuops sweep``: test the nodes of a Slurm step, or hosts over ssh, in pairs."""

import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from gpuops.agent.launch.job_token import given_token, own_token, own_token_file
from gpuops.agent.launch.slurm import SlurmStep, step_of
from gpuops.burnin.pairs import PairTest
from gpuops.burnin.schedule import ALL_PAIRS_MAX
from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.request import build_request
from gpuops.cli.options import json_option, option_callback, settings_of
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
from gpuops.control.tcp.process import start_server
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_TRY_LATER, EXIT_UNKNOWN, UsageError
from gpuops.gate.record import CheckOccasion, record, record_check_run, record_options
from gpuops.gate.session import check_node, make_plan
from gpuops.host.clock import SystemClock
from gpuops.host.gpu_names import read_gpu_names
from gpuops.host.node_state import node_name
from gpuops.host.process.remote import RemoteCommands, start_remote
from gpuops.host.trust import current_uid
from gpuops.hostlist import expand
from gpuops.log import printable
from gpuops.model import Json, Status
from gpuops.slurm.topology import domain_of
from gpuops.sweep.coordinator import SweepResult, SweepSettings, coordinate
from gpuops.sweep.messages import Participant
from gpuops.sweep.pair_test import PairTestRunner
from gpuops.sweep.participant import participate
from gpuops.sweep.session import SweepAddress, in_thread, reach

GATE_SUITE = "preflight"
_JOIN_S = 120.0
_SEED_BITS = 31
_EXIT_CODES = {Status.FAIL: EXIT_FAIL, Status.UNKNOWN: EXIT_UNKNOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What the command line says of the tests."""

    seed: int
    seconds: float
    size_bytes: int | None
    timeout_s: float
    join_s: float
    nightly: bool


class _SweepGroup(click.Group):
    """The commands that read the store, whose modules no participant of a sweep has to import."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return ["history", "show"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from gpuops.cli import sweep_show

        known = cmd_name in self.list_commands(ctx)
        command: click.Command | None = getattr(sweep_show, cmd_name) if known else None
        return command


@click.group(
    cls=_SweepGroup,
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
    "--seconds", type=click.FloatRange(0.1, 3600), default=5.0, show_default=True, help="Of a test."
)
@click.option(
    "--size",
    metavar="SIZE",
    callback=option_callback(to_size),
    help="Buffer of each rank; default: 1GiB on GPUs, 32MiB on CPUs.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Draw the same pairs again.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    help="Of one collective: after that the pair failed.",
)
@click.option(
    "--nightly", is_flag=True, help="One more round of all nodes, for `gpuops sweep history`."
)
@click.option("--no-check", is_flag=True, help="Take part without a health check of the node.")
@click.option("--no-record", is_flag=True, help="Do not record the result.")
@click.option("--join", metavar="HOST:PORT", hidden=True)
@click.option("--run-key", metavar="KEY", hidden=True)
@click.option("--name", metavar="NODE", hidden=True)
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
    no_check: bool,
    no_record: bool,
    join: str | None,
    run_key: str | None,
    name: str | None,
    as_json: bool,
) -> int:
    """Test nodes in pairs, and name the node or the link that is slow or fails.

    Up to 16 nodes every pair is tested; above, two rounds of random pairs, first those that no
    recorded sweep of 90 days has tested. Suspects are tested again with nodes that passed.

    Exit codes: 0 nobody is named, or only with a warning; 1 a node or a link failed; 3 it could not
    be judged; 64 a mistake on the command line; 75 the sweep was not finished.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return EXIT_OK
    settings = settings_of(ctx, check__suite=GATE_SUITE, burnin__ssh=ssh)
    ssh_command = shlex.split(settings.values["burnin.ssh"].value)
    devices = _count_gpus(settings.root)
    terms = _Terms(
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        seconds=seconds,
        size_bytes=size,
        timeout_s=timeout_s,
        join_s=_JOIN_S,
        nightly=nightly,
    )
    session = _Session(
        ctx, settings, terms, devices, is_checked=not no_check, is_recorded=not no_record
    )
    try:
        if join is not None:
            return session.join_remote(join, run_key or "", name)
        if hosts is not None:
            result = session.over_ssh(_hosts(hosts), ssh_command, shlex.split(remote))
        else:
            step = step_of(environ())
            if step is None:
                raise UsageError(
                    "a sweep needs several nodes: start it with `srun --ntasks-per-node=1 gpuops "
                    "sweep`, or name hosts: `gpuops sweep --hosts gpu[001-016]`; one node alone "
                    "is tested by `gpuops burnin`"
                )
            found = session.in_step(step)
            if found is None:
                return session.exit_code
            result = found
    except ControlStoreUnreachableError as exc:
        click.echo(f"gpuops: the sweep was not finished: {printable(str(exc))}", err=True)
        return EXIT_TRY_LATER
    return session.report(result, as_json=as_json)


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
    if len(names) < 2:
        raise UsageError(
            f"--hosts {text!r} names {len(names)} host{'s' * (len(names) != 1)}, and a pair needs "
            "two; one node alone is tested by `gpuops burnin`"
        )
    return names


def _count_gpus(root: Path) -> int:
    """Return how many GPUs this process may use, without asking the driver, which may hang."""
    found = len(read_gpu_names(root, {}))
    visible = environ().get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([w for w in visible.split(",") if w]))


class _Session:
    """One sweep from this process: ``exit_code`` is that of what was found about this node."""

    def __init__(
        self,
        ctx: click.Context,
        settings: Settings,
        terms: _Terms,
        devices: int,
        *,
        is_checked: bool,
        is_recorded: bool,
    ) -> None:
        self._ctx = ctx
        self._settings = settings
        self._terms = terms
        self._devices = devices
        self._is_checked = is_checked
        self._is_recorded = is_recorded
        self._clock = SystemClock()
        self._start_us = self._clock.now_us()
        self._node = node_name(environ())
        self.exit_code = EXIT_OK

    def in_step(self, step: SlurmStep) -> SweepResult | None:
        """Take part in the sweep of *step*; return its result on its first node, else None."""
        if len(step.nodes) < 2:
            raise UsageError(
                f"the step has one node, {step.nodes[0]}, and a pair needs two; `gpuops burnin` "
                "tests one node"
            )
        token = self._token()
        unfit = self._unfit()
        is_first = self._node == step.host or step.order == 0
        if is_first:
            start_server(step.host, step.port, run_key=step.run_key, token=token)
        place = SweepAddress(host=step.host, port=step.port, run_key=step.run_key, token=token)
        if not is_first:
            self._participate(place, self._node, unfit)
            return None
        leading = in_thread(lambda: self._lead(place, step.nodes))
        self._participate(place, self._node, unfit)
        return leading.result()

    def over_ssh(
        self, hosts: Sequence[str], ssh: Sequence[str], remote: Sequence[str]
    ) -> SweepResult:
        """Sweep *hosts* from here; this machine takes no part unless it is one of them."""
        from gpuops.agent.launch.endpoint import address_towards

        token, run_key = secrets.token_hex(32), f"sweep-{secrets.token_hex(8)}"
        address = address_towards(hosts[0], 22)
        server = start_server(address, 0, run_key=run_key, token=token)
        place = SweepAddress(host=address, port=server.port, run_key=run_key, token=token)
        flags = [] if self._is_checked else ["--no-check"]
        flags += [] if self._is_recorded else ["--no-record"]

        def words(host: str) -> list[str]:
            join = ["--join", f"{address}:{server.port}", "--run-key", run_key, "--name", host]
            return [*remote, "sweep", *join, *flags]

        participants = start_remote(ssh, hosts, words, token, environ())
        try:
            return self._lead(place, hosts, participants)
        finally:
            participants.close()
            server.kill()

    def join_remote(self, join: str, run_key: str, name: str | None) -> int:
        """Take part in a sweep that another machine started over ssh; the token is on our input."""
        host, _, port = join.rpartition(":")
        token = sys.stdin.readline(4096).strip()
        place = SweepAddress(host=host.strip("[]"), port=int(port), run_key=run_key, token=token)
        self._participate(place, name or self._node, self._unfit())
        return self.exit_code

    def report(self, result: SweepResult, *, as_json: bool) -> int:
        """Print and record *result*; return the exit code."""
        check_run = check_run_of(result, self._node, (self._start_us, self._clock.now_us()))
        body = sweep_body(result, check_run)
        print_sweep(body, check_run, result.tests, as_json=as_json)
        self._record(check_run, body, result.tests)
        return _EXIT_CODES.get(check_run.verdict, EXIT_OK)

    def _token(self) -> str:
        env, uid = environ(), current_uid()
        given = given_token(env, None, uid)
        unset_environ("GPUOPS_TOKEN")
        return given or own_token(own_token_file(self._settings.state_dir), uid)

    def _unfit(self) -> str | None:
        """Return why this node's own health check keeps it out; it runs before any thread does."""
        if not self._is_checked:
            return None
        plan = make_plan(build_request(self._settings, environ()))
        failed = [f for f in check_node(plan, self._clock).findings if f.status is Status.FAIL]
        return f"{failed[0].check}: {failed[0].headline}" if failed else None

    def _participate(self, place: SweepAddress, node: str, unfit: str | None) -> None:
        store = reach(place, self._terms.join_s)
        try:
            domain = domain_of(environ())
            me = Participant(
                node=node,
                address=store.local_address,
                devices=self._devices,
                domain=domain[-1] if domain else None,
                unfit=unfit,
            )
            found = participate(store, me, PairTestRunner(environ()), time.sleep)
        finally:
            store.close()
        for item in found:
            text = f"{node}: {item.get('status')}: {item.get('message')}"
            click.echo(printable(text), err=True)
            if item.get("status") == Status.FAIL.word:
                self.exit_code = EXIT_FAIL

    def _lead(
        self,
        place: SweepAddress,
        nodes: Sequence[str],
        participants: RemoteCommands | None = None,
    ) -> SweepResult:
        from gpuops.cli.sweep_show import known_pairs

        terms = self._terms
        store = reach(place, terms.join_s)
        settings = SweepSettings(
            sweep=secrets.token_hex(6),
            expected=tuple(nodes),
            seed=terms.seed,
            size_bytes=terms.size_bytes,
            seconds=terms.seconds,
            timeout_s=terms.timeout_s,
            join_s=terms.join_s,
            tested=known_pairs(self._settings) if len(nodes) > ALL_PAIRS_MAX else frozenset(),
            nightly=terms.nightly,
        )
        try:
            return coordinate(
                store,
                settings,
                self._clock,
                time.sleep,
                failed=dict if participants is None else participants.failures,
                on_round=print_round,
            )
        finally:
            store.close()

    def _record(self, check_run: CheckRun, body: Json, tests: Sequence[PairTest]) -> None:
        if not self._is_recorded:
            return
        config_file = (self._ctx.find_root().obj or {}).get("config_file")
        options = record_options(self._settings, config_file, self._settings.state_dir)
        occasion = CheckOccasion(trigger="manual", mode=self._settings.mode.value)
        node, clock = self._node, self._clock
        problems = [
            record_check_run(check_run, occasion, options, clock),
            record(lambda: sweep_events(body, tests, node, clock), node, options, clock),
        ]
        for problem in dict.fromkeys(problems):
            if problem is not None:
                click.echo(problem, err=True)
