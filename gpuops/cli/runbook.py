"""``gpuops runbook``."""

import json
import shutil
import sys

import click

from gpuops.cli.options import json_option
from gpuops.errors import UsageError
from gpuops.gate.policy import DRAINING_ACTIONS
from gpuops.incident.runbook import Runbook, find_runbook, load_runbooks
from gpuops.model import Json, envelope
from gpuops.resources import data_dir

WIDTH_MAX = 100


@click.command(epilog="Example: gpuops runbook host_mem.sigkill_probable")
@click.argument("name", required=False)
@click.option("--list", "as_list", is_flag=True, help="List every runbook.")
@click.option("--raw", is_flag=True, help="Print the page as it is in the file.")
@json_option
def runbook(name: str | None, *, as_list: bool, raw: bool, as_json: bool) -> None:
    """Show what to do about a failure class, such as host_mem.sigkill_probable."""
    if as_list == (name is not None):
        raise UsageError("name one failure class, or use --list to see them all")
    runbooks = load_runbooks(data_dir("runbooks"))
    if name is None:
        _print_list(list(runbooks.values()), as_json=as_json)
        return
    page = find_runbook(runbooks, name)
    if as_json:
        body = {"runbook": {**_row(page), "sources": list(page.sources), "text": page.body}}
        click.echo(json.dumps(envelope("gpuops.runbook/1", body), indent=2))
    elif raw:
        click.echo(page.text, nl=False)
    elif sys.stdout.isatty():
        click.echo(render(page, shutil.get_terminal_size().columns), nl=False)
    else:
        click.echo(_heading(page))
        click.echo(page.body)


def _print_list(pages: list[Runbook], *, as_json: bool) -> None:
    if as_json:
        rows = [_row(page) for page in pages]
        click.echo(json.dumps(envelope("gpuops.runbooks/1", {"runbooks": rows}), indent=2))
        return
    from gpuops.report.render.layout import table

    keys = ("failure_class", "severity", "side", "action", "title")
    head = ("failure class", *keys[1:])
    click.echo(table(head, [tuple(str(_row(page)[key]) for key in keys) for page in pages]))


def _row(page: Runbook) -> Json:
    return {
        "failure_class": page.failure_class.value,
        "severity": page.severity,
        "side": page.side.value,
        "action": page.action.value,
        "returns": page.returns.value,
        "title": page.title,
    }


def _heading(page: Runbook) -> str:
    policy = f"severity {page.severity}, side {page.side.value}, action {page.action.value}"
    if page.action in DRAINING_ACTIONS:
        policy += f", returns by {page.returns.value}"
    return f"# {page.failure_class.value}: {page.title}\n\n{policy}\n"


def render(page: Runbook, width: int) -> str:
    """Return the page set for a terminal of *width* columns."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=min(width, WIDTH_MAX), force_terminal=True)
    with console.capture() as captured:
        console.print(Markdown(f"{_heading(page)}\n{page.body}"))
    return captured.get()
