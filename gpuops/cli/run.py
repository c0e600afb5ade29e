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

from gpuops.agent import thin_parent
from gpuops.agent.arguments import HelpAskedError, Request, help_text, read_words
from gpuops.agent.compat import require_torch
from gpuops.agent.exit_codes import leave, meaning
from gpuops.agent.job_token import SECRET_VARIABLES
from gpuops.agent.ladder import Ladder, ladder_of
from gpuops.agent.nested import refuse_nested
from gpuops.agent.planning import request_of
from gpuops.cli.interrupt import ctrl_c_ends_at_once
from gpuops.cli.settings import settings_of
from gpuops.config import Settings, conceal, environ
from gpuops.errors import EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, GpuopsError
from gpuops.host.clock import SystemClock
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import envelope

if TYPE_CHECKING:
    from gpuops.agent.outcome import Outcome

LOOK_S = 3.0
_log = logging.getLogger(__name__)


class _TorchrunCommand(click.Command):
    """Hands every word to torch's own parser, ``--`` and ``--help`` too."""

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
    if words[:1] == ("status",):
        return _status(ctx, words[1:])
    if find_spec("torch") is None and set(words) & {"-h", "--help"}:
        click.echo(
            "gpuops run [torchrun's flags] SCRIPT [args]: run a training job; it recovers.\n"
            "It needs torch, which is not installed here; try: pip install 'torch>=2.8' numpy"
        )
        return 0
    env = environ()
    refuse_nested(env)
    if thin_parent.is_wanted(env, os.getppid()):
        return thin_parent.watch(thin_parent.command_line(), env, _say)
    thin_parent.end_with_parent(env)
    _ask_for_a_requeue_until_it_runs()
    with ctrl_c_ends_at_once():
        torch_version = require_torch()
        from torch.distributed.run import get_args_parser

        from gpuops.agent.launch import launch

    try:
        typed = read_words(words, env, get_args_parser())
    except HelpAskedError as asked:
        click.echo(str(asked), nl=False)
        return 0
    settings = settings_of(
        ctx, store__url=typed.store, spool__dir=typed.spool, run__dir=typed.run_dir
    )
    request = request_of(typed, settings, env, uid=current_uid())
    ladder = ladder_of(request, env, time.time())
    if request.print_timeouts:
        return _print_timeouts(request, ladder)
    for line in (*request.warnings, *ladder.refuse()):
        _say(f"warning: {line}")
    conceal(SECRET_VARIABLES)
    _outlast_readers()
    if not settings.store_is_default:
        from gpuops.store.url import parse_url

        parse_url(settings.store_url)
    ended = launch(request, settings, env, SystemClock(), torch_version)
    _tell(ended, settings)
    if problem := leave(ended.exit_code, settings.values["run.exit_code_file"].value):
        _say(f"warning: {problem}")
    return ended.exit_code


def _status(ctx: click.Context, words: tuple[str, ...]) -> int:
    """Hand over to ``gpuops run status``."""
    from gpuops.cli.run_status import status

    with status.make_context("run status", list(words), parent=ctx.parent) as inner:
        found = status.invoke(inner)
    return found if isinstance(found, int) else 0


def _print_timeouts(request: Request, ladder: Ladder) -> int:
    if request.as_json:
        click.echo(json.dumps(envelope("gpuops.timeouts/1", ladder.to_json()), indent=2))
    else:
        click.echo(printable(ladder.to_text()))
    return EXIT_USAGE if any(problem.is_error for problem in ladder.problems) else EXIT_OK


def _tell(ended: "Outcome", settings: Settings) -> None:
    """Say how the run ended, what that asks of the scheduler, and where to read more."""
    if ended.exit_code != 0 and not ended.goes_on:
        was = "" if ended.outcome == "failed" else "was "
        _say(f"the run {was}{ended.outcome}: {ended.reason}")
    if asked := meaning(ended.exit_code):
        _say(asked)
    if ended.note is not None:
        _say(ended.note)
    if ended.run_id is not None and ended.exit_code != 0:
        is_there = ended.note is None and _is_in_store(settings, ended.run_id)
        hint = f"see `gpuops report {ended.run_id[-8:]}`, {ended.run_dir}"
        if not is_there:
            where = shlex.quote(str(ended.run_dir))
            hint = f"not in the store yet; see `gpuops report --run-dir {where}`"
        _say(hint)


def _say(text: str) -> None:
    click.echo(f"gpuops: {printable(text)}", err=True)


def _ask_for_a_requeue_until_it_runs() -> None:
    """Have a preemption before anything began end in 85, as one later does; imports take seconds.

    The run's own handlers take these two over.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _requeue_at_once)


def _requeue_at_once(number: int, _frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    os.write(2, f"gpuops: {name} before the run began: exit {EXIT_REQUEUE}\n".encode())
    os._exit(EXIT_REQUEUE)


def _outlast_readers() -> None:
    """Let the job go on when nobody reads its lines, which torch's tee writes to our streams.

    By whole lines: in blocks, a file or a pipe would get them long after what happened.
    """
    from gpuops.agent.console import lasting

    def lost(name: str, exc: OSError) -> None:
        _log.warning("%s takes no more, the job goes on: %s", name, exc.strerror)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = lasting(sys.stdout, partial(lost, "standard output"))
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = lasting(sys.stderr, lambda _exc: None)


def _is_in_store(settings: Settings, run_id: str) -> bool:
    """Say whether the run's end has reached the store: a spool may have refused what led there."""
    from gpuops.store.engine import open_store
    from gpuops.store.queries import find_run

    try:
        with (
            open_store(
                settings.store_url, mode="read", root=settings.root, deadline_s=LOOK_S
            ) as store,
            store.begin() as connection,
        ):
            return find_run(connection, run_id).ended_us is not None
    except GpuopsError:
        return False
