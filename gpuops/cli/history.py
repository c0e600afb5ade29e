"""``gpuops report`` and ``gpuops incident``: from the configured store or a run's own journal."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from gpuops.cli.options import json_option, settings_of, store_option, terminal_width
from gpuops.config.resolve import environ
from gpuops.errors import UsageError
from gpuops.host.clock import SystemClock
from gpuops.host.node_state import node_name
from gpuops.log import printable
from gpuops.model import Event, IncidentState, envelope
from gpuops.report.render.incident_text import (
    decision_block,
    decision_json,
    incident_block,
    incident_list,
)
from gpuops.report.render.json_bodies import report_json
from gpuops.report.render.run_text import report_text
from gpuops.report.run_status import (
    find_run_folder,
    has_journal,
    judge_liveness,
    observe_agent,
)
from gpuops.report.time_breakdown import (
    AgentLiveness,
    CheckpointStart,
    RunBreakdown,
    break_down_run,
)
from gpuops.store.engine import IncidentStore
from gpuops.store.history import load_journal, store_for_reading
from gpuops.store.queries import run_queries

_OFFERED, _FRESH_START = "checkpoint.offered", "checkpoint.fresh_start"

run_dir_option = click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Read this run directory alone, or RUN's in this parent of run directories; no store.",
)


def open_history(ctx: click.Context, store_url: str | None, run_dir: Path | None) -> IncidentStore:
    """Return the store to read, to be closed by the caller.

    Raises:
        UsageError: Two sources were named, or one that does not exist.
        StoreError: The store cannot be read.
    """
    if run_dir is not None:
        if store_url is not None:
            raise UsageError("--store and --run-dir exclude each other: name one source")
        return load_journal(run_dir / "journal")
    settings = settings_of(ctx, store__url=store_url)
    return store_for_reading(
        settings.store_url,
        is_default=settings.store_is_default,
        spool_dir=settings.spool_dir,
        cluster=settings.cluster,
        clock=SystemClock(),
        root=settings.root,
    )


def choose_run(run_dir: Path | None, run_id_part: str | None) -> tuple[Path | None, str | None]:
    """Return the directory of the run, and what names it there; *run_dir* may be its parent."""
    if run_dir is None or has_journal(run_dir):
        return run_dir, run_id_part
    found = find_run_folder(run_dir, run_id_part, has_journal)
    if found is None and run_id_part is not None and find_run_folder(run_dir, None, has_journal):
        raise UsageError(f"no run in {run_dir} has an id that starts or ends with {run_id_part!r}")
    return (run_dir, run_id_part) if found is None else (found, None)


def print_notes(store: IncidentStore) -> None:
    """Print the store's notes on standard error."""
    for note in store.notes:
        click.echo(f"gpuops: {printable(note)}", err=True)


@click.command(epilog="Example: gpuops report bfb67519 --json")
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
    """Report where a run's time went, what failed, what it cost and who was to blame.

    RUN is the end (or the beginning) of a run's id; without it, the newest run.
    """
    run_dir, wanted = choose_run(run_dir, _run_argument(words))
    with open_history(ctx, store, run_dir) as opened:
        found = _read_breakdown(opened, wanted, run_dir)
        if as_json:
            body = {**report_json(found), "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.report/1", body), indent=2))
            return
        click.echo(report_text(found), nl=False)
        print_notes(opened)


def _run_argument(words: tuple[str, ...]) -> str | None:
    rest = words[1:] if words[:1] == ("run",) else words
    if len(rest) > 1:
        raise UsageError(f"one run at a time: gpuops report [run] [RUN], not {' '.join(words)!r}")
    return rest[0] if rest else None


def _read_breakdown(
    store: IncidentStore, run_id_part: str | None, run_dir: Path | None
) -> RunBreakdown:
    with store.begin() as connection:
        run = run_queries.find_run(connection, run_id_part)
        attempts = run_queries.attempts(connection, run.id)
        incidents = run_queries.incidents(connection, run_id=run.id, limit=10_000)
        last_event_us = run_queries.last_event_us(connection, run.id)
        decisions = run_queries.decisions(connection, run.id)
        exclusions = run_queries.exclusions(connection, run.id)
        starts = [
            event
            for kind in (_OFFERED, _FRESH_START)
            for event in run_queries.events(connection, run_id=run.id, kind=kind)
        ]
    found = break_down_run(
        run, attempts, incidents, last_event_us=last_event_us, agent=_agent_liveness(run, run_dir)
    )
    return replace(
        found,
        decisions=tuple(decisions),
        exclusions=tuple(exclusions),
        starts=_checkpoint_starts(starts),
    )


def _checkpoint_starts(events: Sequence[Event]) -> dict[int, CheckpointStart]:
    """Return what each attempt began with; of several nodes, one that lost states counts."""
    found: dict[int, CheckpointStart] = {}
    for event in events:
        lost_step, why = event.payload.get("lost_step"), event.payload.get("why")
        start = CheckpointStart(
            is_fresh=event.kind == _FRESH_START,
            why=str(why or ""),
            lost_step=lost_step if isinstance(lost_step, int) else None,
        )
        known = found.get(event.attempt or 0)
        if known is None or known.lost_step is None:
            found[event.attempt or 0] = start
    return found


def _agent_liveness(run: run_queries.RunRow, run_dir: Path | None) -> AgentLiveness:
    """Return the state of the agent of a run without an end, if this is its node."""
    directory = run_dir or Path(run.run_dir)
    if run.ended_us is not None or not (run_dir or directory.is_absolute()):
        return AgentLiveness.UNKNOWN
    return judge_liveness(run, node_name(environ()), observe_agent(directory))


@click.group(epilog="Example: gpuops incident ls --run bfb67519")
def incident() -> None:
    """List and show incidents."""


@incident.command("ls", epilog="Example: gpuops incident ls --run bfb67519")
@click.option("--run", "run", metavar="RUN", help="Only this run: the end of its id.")
@click.option("--state", type=click.Choice([s.value for s in IncidentState]), help="Only these.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, metavar="N")
@run_dir_option
@store_option
@json_option
@click.pass_context
def list_incidents(
    ctx: click.Context,
    run: str | None,
    state: str | None,
    limit: int,
    run_dir: Path | None,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """List incidents, newest first."""
    run_dir, run = choose_run(run_dir, run)
    with open_history(ctx, store, run_dir) as opened:
        with opened.begin() as connection:
            run_id = None if run is None else run_queries.find_run(connection, run).id
            found = run_queries.incidents(connection, run_id=run_id, state=state, limit=limit)
        if as_json:
            body = {"incidents": [item.to_json() for item in found], "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.incidents/1", body), indent=2))
            return
        width = terminal_width()
        click.echo(incident_list(found, width=width) if found else "no incidents on record")
        print_notes(opened)


@incident.command("show", epilog="Example: gpuops incident show ad27e143")
@click.argument("incident_id", metavar="ID")
@run_dir_option
@store_option
@json_option
@click.pass_context
def show_incident(
    ctx: click.Context, incident_id: str, run_dir: Path | None, store: str | None, *, as_json: bool
) -> None:
    """Show one incident, and why the run continued or stopped; ID is the end of its id."""
    with open_history(ctx, store, run_dir) as opened:
        with opened.begin() as connection:
            found = run_queries.find_incident(connection, incident_id)
            decisions = []
            if found.run_id is not None and found.attempt is not None:
                decisions = run_queries.decisions(connection, found.run_id, ordinal=found.attempt)
        if as_json:
            body = {
                "incident": found.to_json(),
                "decisions": [decision_json(row) for row in decisions],
                "notes": list(opened.notes),
            }
            click.echo(json.dumps(envelope("gpuops.incident/1", body), indent=2))
            return
        lines = incident_block(found, full=True)
        for row in decisions:
            lines += ["", *decision_block(row)]
        click.echo("\n".join(lines))
        print_notes(opened)
