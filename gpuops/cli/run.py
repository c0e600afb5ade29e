"""``gpuops run``."""

import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import FrameType

import click

from gpuops.agent.arguments import HelpAskedError, help_text, parse
from gpuops.agent.compat import require_torch
from gpuops.cli.settings import settings_of
from gpuops.config import Settings, environ
from gpuops.errors import GpuopsError
from gpuops.host.clock import SystemClock
from gpuops.log import printable

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
    if find_spec("torch") is None and set(words) & {"-h", "--help"}:
        click.echo(
            "gpuops run [torchrun's flags] SCRIPT [args]: run a training job; it recovers.\n"
            "It needs torch, which is not installed here; try: pip install 'torch>=2.8' numpy"
        )
        return 0
    with _ctrl_c_ends_at_once():
        torch_version = require_torch()
        from torch.distributed.run import get_args_parser

        from gpuops.agent.launch import launch

    env = environ()
    try:
        request = parse(words, env, get_args_parser())
    except HelpAskedError as asked:
        click.echo(str(asked), nl=False)
        return 0
    settings = settings_of(
        ctx, store__url=request.store, spool__dir=request.spool, run__dir=request.run_dir
    )
    _outlast_readers()
    if not settings.store_is_default:
        from gpuops.store.url import parse_url

        parse_url(settings.store_url)
    ended = launch(request, settings, env, SystemClock(), torch_version)
    if ended.exit_code != 0:
        click.echo(f"gpuops: the run {ended.outcome}: {printable(ended.reason)}", err=True)
    if ended.note is not None:
        click.echo(f"gpuops: {printable(ended.note)}", err=True)
    if ended.run_id is not None and ended.exit_code != 0:
        is_there = ended.note is None and _is_in_store(settings, ended.run_id)
        hint = f"see `gpuops report {ended.run_id[-8:]}`, {ended.run_dir}"
        if not is_there:
            where = shlex.quote(str(ended.run_dir))
            hint = f"not in the store yet; see `gpuops report --run-dir {where}`"
        click.echo(f"gpuops: {printable(hint)}", err=True)
    return ended.exit_code


@contextmanager
def _ctrl_c_ends_at_once() -> Iterator[None]:
    """Take Ctrl-C while nothing has begun: some of what is imported swallows KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as for a shell's background job, or somebody else's
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"gpuops: interrupted\n")
    os._exit(128 + number)


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
