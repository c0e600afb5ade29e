"""``gpuops incident ls|show``."""

import json
from pathlib import Path

import click

from gpuops.cli.reading import open_history, run_dir_option, tell_notes
from gpuops.cli.settings import json_option, store_option
from gpuops.model import IncidentState, envelope
from gpuops.report.decision_text import decision_block, decision_json
from gpuops.report.incident_text import incident_block, incident_list
from gpuops.store import queries


@click.group()
def incident() -> None:
    """List and show incidents."""


@incident.command("ls")
@click.option("--run", "run", metavar="RUN", help="Only this run: the end of its id.")
@click.option("--state", type=click.Choice([s.value for s in IncidentState]), help="Only these.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, metavar="N")
@run_dir_option
@store_option
@json_option
@click.pass_context
def ls_command(
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
    with open_history(ctx, store, run_dir) as opened:
        with opened.begin() as connection:
            run_id = None if run is None else queries.find_run(connection, run).id
            found = queries.incidents(connection, run_id=run_id, state=state, limit=limit)
        if as_json:
            body = {"incidents": [item.to_json() for item in found], "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.incidents/1", body), indent=2))
            return
        click.echo(incident_list(found) if found else "no incidents on record")
        tell_notes(opened)


@incident.command("show")
@click.argument("incident_id", metavar="ID")
@run_dir_option
@store_option
@json_option
@click.pass_context
def show_command(
    ctx: click.Context,
    incident_id: str,
    run_dir: Path | None,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """Show one incident, and why the run went on or stopped; ID is the end of its id."""
    with open_history(ctx, store, run_dir) as opened:
        with opened.begin() as connection:
            found = queries.find_incident(connection, incident_id)
            made = []
            if found.run_id is not None and found.attempt is not None:
                made = queries.decisions(connection, found.run_id, ordinal=found.attempt)
        if as_json:
            body = {
                "incident": found.to_json(),
                "decisions": [decision_json(row) for row in made],
                "notes": list(opened.notes),
            }
            click.echo(json.dumps(envelope("gpuops.incident/1", body), indent=2))
            return
        lines = incident_block(found, whole=True)
        for row in made:
            lines += ["", *decision_block(row)]
        click.echo("\n".join(lines))
        tell_notes(opened)
