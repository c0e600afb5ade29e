"""``gpuops report``."""

import json
from dataclasses import replace
from pathlib import Path

import click

from gpuops.cli.reading import open_history, run_dir_option, tell_notes
from gpuops.cli.settings import json_option, store_option
from gpuops.config import environ
from gpuops.errors import UsageError
from gpuops.host.node import node_name
from gpuops.model import envelope
from gpuops.report.account import Agent, RunAccount, account
from gpuops.report.as_json import report_json
from gpuops.report.liveness import judge, look
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
        found = _account(opened, wanted, run_dir)
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


def _account(store: Store, wanted: str | None, run_dir: Path | None) -> RunAccount:
    with store.begin() as connection:
        run = queries.find_run(connection, wanted)
        attempts = queries.attempts(connection, run.id)
        incidents = queries.incidents(connection, run_id=run.id, limit=10_000)
        last_event_us = queries.last_event_us(connection, run.id)
        decisions = queries.decisions(connection, run.id)
        exclusions = queries.exclusions(connection, run.id)
    found = account(
        run, attempts, incidents, last_event_us=last_event_us, agent=_agent(run, run_dir)
    )
    return replace(found, decisions=tuple(decisions), exclusions=tuple(exclusions))


def _agent(run: queries.RunRow, run_dir: Path | None) -> Agent:
    """Return what has become of the agent of a run without an end, if this is its node."""
    directory = run_dir or Path(run.run_dir)
    if run.ended_us is not None or not (run_dir or directory.is_absolute()):
        return Agent.UNKNOWN
    return judge(run, node_name(environ()), look(directory))
