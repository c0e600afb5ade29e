"""``gpuops run``."""

import io
import json
import logging
import os
import shlex
import signal
import sys
import time
from functools import partial
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING

import click

from gpuops.agent.elastic import supervisor
from gpuops.agent.launch.identity import leave, meaning
from gpuops.agent.launch.job_token import SECRET_VARIABLES
from gpuops.agent.launch.options import HelpAskedError, RunRequest, help_text, read_words
from gpuops.agent.launch.planning import request_of
from gpuops.agent.launch.preconditions import refuse_foreign_proc, refuse_nested
from gpuops.agent.launch.timeouts import Timeouts, timeouts_of
from gpuops.agent.launch.torch_compat import require_torch
from gpuops.cli.options import exit_on_ctrl_c, settings_of
from gpuops.config.resolve import Settings, environ, unset_environ, update_environ
from gpuops.errors import EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, GpuopsError
from gpuops.host.clock import SystemClock
from gpuops.host.container import container_facts
from gpuops.host.node_state import node_name
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.wire import worker_drill

if TYPE_CHECKING:
    from gpuops.agent.journal.session import RunOutcome

STORE_LOOKUP_TIMEOUT_S = 3.0
_log = logging.getLogger(__name__)


class _TorchrunCommand(click.Command):
    """Passes every argument to torch's parser, including ``--`` and ``--help``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["words"] = tuple(args)
        return []

    def format_help(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from torch.distributed.run import get_args_parser

        formatter.write(help_text(get_args_parser(), environ()))


@click.command(cls=_TorchrunCommand, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, words: tuple[str, ...]) -> int:
    """Run a training job: torchrun's flags, and it recovers."""
    if words[:1] in {("status",), ("readmit",)}:
        return _command(ctx, *words)
    if find_spec("torch") is None and set(words) & {"-h", "--help"}:
        click.echo(
            "gpuops run [torchrun's flags] SCRIPT [args]: run a training job; it recovers.\n"
            "It needs torch, which is not installed here; try: pip install 'torch>=2.8' numpy"
        )
        return 0
    env = environ()
    refuse_nested(env)
    if supervisor.is_wanted(env, os.getpid(), os.getppid()):
        return supervisor.watch(supervisor.command_line(), env, _print_line)
    supervisor.end_with_parent(env)
    _requeue_on_early_signal()
    with exit_on_ctrl_c():
        torch_version = require_torch()
        from torch.distributed.run import get_args_parser

        from gpuops.agent.launch.launch import launch
        from gpuops.agent.launch.node_context import lost_in_container

    try:
        typed = read_words(words, env, get_args_parser())
    except HelpAskedError as help_error:
        click.echo(str(help_error), nl=False)
        return 0
    update_environ(typed.env)
    env = environ()
    settings = settings_of(
        ctx, store__url=typed.store, spool__dir=typed.spool, run__dir=typed.run_dir
    )
    request = request_of(typed, settings, env, uid=current_uid())
    container = container_facts(settings.root)
    refuse_foreign_proc(container)
    timeouts = timeouts_of(request, env, time.time())
    if request.print_timeouts:
        return _print_timeouts(request, timeouts)
    for line in (*request.warnings, *timeouts.refuse()):
        _print_line(f"warning: {line}")
    if note := lost_in_container(container, env, settings.spool_users_dir):
        _print_line(note)
    unset_environ((*SECRET_VARIABLES, *_foreign_drill(request, node_name(env))))
    _survive_closed_streams()
    if not settings.store_is_default:
        from gpuops.store.backends import parse_url

        parse_url(settings.store_url)
    outcome = launch(request, settings, environ(), SystemClock(), torch_version)
    _print_outcome(outcome, settings)
    if problem := leave(outcome.exit_code, settings.values["run.exit_code_file"].value):
        _print_line(f"warning: {problem}")
    return outcome.exit_code


def _foreign_drill(request: RunRequest, node: str) -> tuple[str, ...]:
    """Return the variable that the workers of *node* must not see: they inject no fault."""
    drill = request.drill
    return () if drill is not None and drill.node in {None, node} else (worker_drill.VARIABLE,)


def _command(ctx: click.Context, name: str, *words: str) -> int:
    """Run ``gpuops run status`` or ``gpuops run readmit``."""
    from gpuops.cli.run_readmit import readmit
    from gpuops.cli.run_status import status

    command = status if name == "status" else readmit
    with command.make_context(f"run {name}", list(words), parent=ctx.parent) as inner:
        found = command.invoke(inner)
    return found if isinstance(found, int) else 0


def _print_timeouts(request: RunRequest, timeouts: Timeouts) -> int:
    if request.as_json:
        click.echo(json.dumps(envelope("gpuops.timeouts/1", timeouts.to_json()), indent=2))
    else:
        click.echo(printable(timeouts.to_text()))
    return EXIT_USAGE if any(problem.is_error for problem in timeouts.problems) else EXIT_OK


def _print_outcome(outcome: "RunOutcome", settings: Settings) -> None:
    """Print how the run ended, what the exit code requests, and where to read more."""
    if outcome.exit_code != 0 and not outcome.goes_on:
        verb = "" if outcome.outcome == "failed" else "was "
        _print_line(f"the run {verb}{outcome.outcome}: {outcome.reason}")
    if request_text := meaning(outcome.exit_code):
        _print_line(request_text)
    if outcome.note is not None:
        _print_line(outcome.note)
    if outcome.run_id is not None and outcome.exit_code != 0:
        in_store = outcome.note is None and _is_in_store(settings, outcome.run_id)
        hint = f"see `gpuops report {outcome.run_id[-8:]}`, {outcome.run_dir}"
        if not in_store:
            where = shlex.quote(str(outcome.run_dir))
            hint = f"not in the store yet; see `gpuops report --run-dir {where}`"
        _print_line(hint)


def _print_line(text: str) -> None:
    click.echo(f"gpuops: {printable(text)}", err=True)


def _requeue_on_early_signal() -> None:
    """Exit with 85 on a preemption during the imports, which take seconds.

    The run replaces these two handlers by its own.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_for_requeue)


def _exit_for_requeue(number: int, _frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    os.write(2, f"gpuops: {name} before the run began: exit {EXIT_REQUEUE}\n".encode())
    os._exit(EXIT_REQUEUE)


def _survive_closed_streams() -> None:
    """Keep the job running if nobody reads its lines, which torch's tee writes to our streams.

    Streams are line buffered: block buffering would delay the lines in a file or a pipe.
    """
    from gpuops.agent.status.console import lasting

    def lost(name: str, exc: OSError) -> None:
        _log.warning("cannot write to %s, the job continues: %s", name, exc.strerror)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = lasting(sys.stdout, partial(lost, "standard output"))
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = lasting(sys.stderr, lambda _exc: None)


def _is_in_store(settings: Settings, run_id: str) -> bool:
    """Return whether the store has the run's end: the spool may have lost events."""
    from gpuops.store.engine import open_store
    from gpuops.store.queries.run_queries import find_run

    try:
        with (
            open_store(
                settings.store_url,
                mode="read",
                root=settings.root,
                deadline_s=STORE_LOOKUP_TIMEOUT_S,
            ) as store,
            store.begin() as connection,
        ):
            return find_run(connection, run_id).ended_us is not None
    except GpuopsError:
        return False
