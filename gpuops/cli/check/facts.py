"""``gpuops facts``: record what the probes of a suite read, to be judged elsewhere or later."""

import json
from pathlib import Path

import click

from gpuops.cli.check.request import build_request
from gpuops.cli.options import OutputFile, settings_of
from gpuops.config.resolve import environ
from gpuops.errors import EXIT_OK, UsageError
from gpuops.gate.session import make_plan, record_facts
from gpuops.host.clock import SystemClock
from gpuops.host.trust import atomic_write
from gpuops.log import printable


@click.command(epilog="Example: gpuops facts --out gpu017.json")
@click.option(
    "--suite",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Record what the checks of this suite read.",
)
@click.option(
    "--out",
    metavar="FILE",
    type=OutputFile(),
    help="Output file (mode 0600); default: standard output.",
)
@click.pass_context
def facts(ctx: click.Context, *, suite: str, out: Path | None) -> int:
    """Record the facts of this node as one JSON object, without judging them.

    `gpuops check --facts FILE` judges them, with any suite and on any machine.
    """
    settings = settings_of(ctx, check__suite=suite)
    recording, note = record_facts(make_plan(build_request(settings, environ())), SystemClock())
    if note is not None:
        click.echo(f"gpuops: {printable(note)}", err=True)
    text = json.dumps(recording.to_json(), indent=None if out is not None else 1)
    if out is None:
        click.echo(text)
        return EXIT_OK
    try:
        atomic_write(out, f"{text}\n".encode(), 0o600)
    except OSError as exc:
        raise UsageError(f"cannot write {out}: {exc.strerror}") from exc
    return EXIT_OK
