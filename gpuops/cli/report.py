"""``gpuops report``."""

import json
from pathlib import Path

import click

from gpuops.cli.reading import open_history, run_dir_option, tell_notes
from gpuops.cli.settings import json_option, store_option
from gpuops.errors import UsageError
from gpuops.model import envelope
from gpuops.report.account import RunAccount, account
from gpuops.report.as_json import report_json
from gpuops.report.present import report_text
from gpuops.store import queries
from gpuops.store.engine import Store


@click.command()
@click.argument("words", nargs=-1, metavar="[run] [RUN]")
@run_dir_option
@store_option
@json_option
@click.pass_context
def report(
    ctx: click.Context,
    words: tuple[str, ...],
    run_dir: Path | None,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """Say where a run's time went, what failed, what it cost and who was to blame.

    RUN is the end (or the beginning) of a run's id; without it, the newest run.
    """
    wanted = _run_named(words)
    with open_history(ctx, store, run_dir) as opened:
        found = _account(opened, wanted)
        if as_json:
            body = {**report_json(found), "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.report/1", body), indent=2))
            return
        click.echo(report_text(found), nl=False)
        tell_notes(opened)


def _run_named(words: tuple[str, ...]) -> str | None:
    rest = words[1:] if words[:1] == ("run",) else words
    if len(rest) > 1:
        raise UsageError(f"one run at a time: gpuops report [run] [RUN], not {' '.join(words)!r}")
    return rest[0] if rest else None


def _account(store: Store, wanted: str | None) -> RunAccount:
    with store.begin() as connection:
        run = queries.find_run(connection, wanted)
        return account(
            run,
            queries.attempts(connection, run.id),
            queries.incidents(connection, run_id=run.id, limit=10_000),
        )
