"""``gpuops detect show``: the history of a run's step time, with what was detected."""

import json
from pathlib import Path

import click

from gpuops.cli.history import choose_run, open_history, print_notes, run_dir_option
from gpuops.cli.options import json_option, store_option
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.report.render.step_history import history_json, history_text
from gpuops.store.queries import run_queries

_INCIDENTS_MAX = 1000


@click.command(epilog="Example: gpuops detect show bfb67519")
@click.argument("run", required=False)
@run_dir_option
@store_option
@json_option
@click.pass_context
def show(
    ctx: click.Context, run: str | None, run_dir: Path | None, store: str | None, *, as_json: bool
) -> None:
    """Show how long the steps of RUN took, by time, and what was detected when.

    RUN is the end (or the beginning) of a run's id; without it, the newest run. Every `gpuops run`
    records the median and the longest step of each minute, and its incidents: this reads them
    from the store, or from the run's folder. `--record-steps` is not needed.
    """
    run_dir, wanted = choose_run(run_dir, run)
    with open_history(ctx, store, run_dir) as opened:
        with opened.begin() as connection:
            found = run_queries.find_run(connection, wanted)
            minutes = run_queries.progress(connection, found.id)
            incidents = run_queries.incidents(connection, run_id=found.id, limit=_INCIDENTS_MAX)
        if as_json:
            body = {**history_json(found, minutes, incidents), "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.detect-show/1", body), indent=2))
            return
        click.echo("\n".join(map(printable, history_text(found, minutes, incidents))))
        print_notes(opened)
