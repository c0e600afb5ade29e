"""``gpuops node ls|show``."""

import json

import click

from gpuops.cli.reading import open_history, tell_notes
from gpuops.cli.settings import json_option, settings_of, store_option
from gpuops.host.clock import SystemClock
from gpuops.model import envelope
from gpuops.report.node_json import history_json, node_json
from gpuops.report.node_text import history_text, node_list
from gpuops.store import node_queries


@click.group()
def node() -> None:
    """List nodes, and tell the history of one."""


@node.command("ls")
@store_option
@json_option
@click.pass_context
def ls_command(ctx: click.Context, store: str | None, *, as_json: bool) -> None:
    """List the nodes on record."""
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            found = node_queries.nodes(connection)
        if as_json:
            body = {"nodes": [node_json(item) for item in found], "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.nodes/1", body), indent=2))
            return
        click.echo(node_list(found) if found else "no nodes on record")
        tell_notes(opened)


@node.command("show")
@click.argument("name")
@store_option
@json_option
@click.pass_context
def show_command(ctx: click.Context, name: str, store: str | None, *, as_json: bool) -> None:
    """Tell what is on record of the node NAME: what failed, what was done, what was repaired."""
    cluster, now_us = settings_of(ctx).cluster, SystemClock().now_us()
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            found = node_queries.find_node(connection, name, cluster=cluster)
            history = node_queries.node_history(connection, found, now_us=now_us)
        if as_json:
            body = {**history_json(history), "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.node/1", body), indent=2))
            return
        click.echo(history_text(history))
        tell_notes(opened)
