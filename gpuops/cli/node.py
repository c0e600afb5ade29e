"""``gpuops node`` and ``gpuops repair``."""

import json
from collections.abc import Mapping, Sequence

import click

from gpuops.cli.history import open_history, print_notes
from gpuops.cli.options import json_option, settings_of, store_option
from gpuops.config.resolve import Settings, environ
from gpuops.errors import GpuopsError, UsageError
from gpuops.gate.repair import RepairRequest, RepairSummary, acknowledge_repair
from gpuops.host.clock import SystemClock
from gpuops.host.node_state import boot_id, node_name
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import Entity, EntityKind, Event, envelope
from gpuops.report.render.json_bodies import history_json, node_json
from gpuops.report.render.layout import short_id
from gpuops.report.render.node_text import history_text, node_list
from gpuops.store.queries import burnin_queries, node_queries
from gpuops.store.spool.record import spool_recorder
from gpuops.store.spool.send import flush
from gpuops.units import iso_utc


@click.group(epilog="Example: gpuops node show gpu017")
def node() -> None:
    """List nodes, and show the history of one."""


@node.command("ls", epilog="Example: gpuops node ls --json")
@store_option
@json_option
@click.pass_context
def list_nodes(ctx: click.Context, store: str | None, *, as_json: bool) -> None:
    """List the nodes on record."""
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            found = node_queries.nodes(connection)
        if as_json:
            body = {"nodes": [node_json(item) for item in found], "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.nodes/1", body), indent=2))
            return
        click.echo(node_list(found) if found else "no nodes on record")
        print_notes(opened)


@node.command("show", epilog="Example: gpuops node show gpu017")
@click.argument("name")
@store_option
@json_option
@click.pass_context
def show_node(ctx: click.Context, name: str, store: str | None, *, as_json: bool) -> None:
    """Show the history of the node NAME: findings, burn-in, sweep, incidents, drains, repairs."""
    cluster, now_us = settings_of(ctx).cluster, SystemClock().now_us()
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            found = node_queries.find_node(connection, name, cluster=cluster)
            history = node_queries.node_history(connection, found, now_us=now_us)
            burnin = burnin_queries.last_burnin(connection, found.id)
            sweep = burnin_queries.last_sweep(connection, found.cluster, found.name)
        if as_json:
            body = {**history_json(history, burnin, sweep), "notes": list(opened.notes)}
            click.echo(json.dumps(envelope("gpuops.node/1", body), indent=2))
            return
        click.echo(history_text(history, burnin, sweep))
        print_notes(opened)


REPAIR_FLUSH_S = 10.0
TEXT_CHARS_MAX = 500


@click.command(epilog='Example: gpuops repair gpu017 --what "reseated GPU 3"')
@click.argument("node")
@click.option("--gpu", metavar="UUID", help="Only this GPU was repaired.")
@click.option("--nic", metavar="GUID", help="Only this network card was repaired.")
@click.option("--what", required=True, metavar="TEXT", help="What was done.")
@click.option("--by", metavar="NAME", help="Who did it; default: the calling user.")
@store_option
@json_option
@click.pass_context
def repair(
    ctx: click.Context,
    *,
    node: str,
    gpu: str | None,
    nic: str | None,
    what: str,
    by: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Record that NODE was repaired: earlier failures no longer count against it.

    Its open incidents are closed, and its strikes and old kernel messages are ignored. On the node
    itself this works without the store.
    """
    uid = current_uid()
    if uid != 0:
        raise UsageError(
            f"gpuops repair must be run by root, not by uid {uid}: users' reports about a node do "
            "not count; try sudo"
        )
    settings, env = settings_of(ctx, store__url=store), environ()
    request = RepairRequest(
        node=node,
        entity=_entity(node, gpu, nic),
        by=_text("--by", by or _caller_name(env)),
        what=_text("--what", what),
        is_here=node == node_name(env),
        state_dir=settings.state_dir,
        uid=uid,
    )
    clock = SystemClock()
    done = acknowledge_repair(request, settings.store_url, settings.cluster, clock)
    notes = [*done.notes, *_record_events(settings, node, done.events, clock)]
    if as_json:
        click.echo(
            json.dumps(envelope("gpuops.repair/1", _result_json(node, done, notes)), indent=2)
        )
        return
    click.echo(_result_text(node, done))
    for note in notes:
        click.echo(f"gpuops: {printable(note)}", err=True)


def _entity(node: str, gpu: str | None, nic: str | None) -> Entity:
    if gpu is not None and nic is not None:
        raise UsageError("--gpu and --nic exclude each other: name one part, or none for all")
    if gpu is not None:
        return Entity(EntityKind.GPU, _text("--gpu", gpu))
    if nic is not None:
        return Entity(EntityKind.NIC, _text("--nic", nic))
    return Entity(EntityKind.NODE, node)


def _text(option: str, value: str) -> str:
    text = " ".join(value.split())
    if not text or len(text) > TEXT_CHARS_MAX or not text.isprintable():
        raise UsageError(
            f"{option} needs 1 to {TEXT_CHARS_MAX} printable characters, got {value!r:.80}"
        )
    return text


def _caller_name(env: Mapping[str, str]) -> str:
    return env.get("SUDO_USER") or env.get("USER") or "root"


def _record_events(
    settings: Settings, node: str, events: Sequence[Event], clock: SystemClock
) -> list[str]:
    """Send *events* to the store through the spool; return notes about failures.

    Raises:
        GpuopsError: They cannot be written to the spool.
    """
    recorder = spool_recorder(
        settings.spool_dir,
        node=node,
        boot_id=boot_id(settings.root),
        bytes_max=settings.spool_bytes_max,
        clock=clock,
    )
    recorder.record(*events)
    recorder.close()
    if recorder.lost:
        raise GpuopsError(
            f"the repair is not recorded: cannot write events to {settings.spool_dir}"
        )
    report = flush(
        settings.spool_dir,
        settings.store_url,
        deadline_s=REPAIR_FLUSH_S,
        cluster=settings.cluster,
        clock=clock,
        root=settings.root,
    )
    return [] if report.note is None else [f"the store gets the repair later: {report.note}"]


def _result_json(node: str, done: RepairSummary, notes: Sequence[str]) -> dict[str, object]:
    repair = done.repair
    return {
        "node": node,
        "repair": {
            "entity": {"kind": repair.entity_kind, "id": repair.entity_id},
            "time": iso_utc(repair.t_us),
            "by": repair.by,
            "what": repair.what,
        },
        "incidents": [item.to_json() for item in done.closed],
        "notes": list(notes),
    }


def _result_text(node: str, done: RepairSummary) -> str:
    repair = done.repair
    about = (
        ""
        if repair.entity_kind == EntityKind.NODE
        else f", {repair.entity_kind} {repair.entity_id}"
    )
    lines = [printable(f"node {node}{about}: repaired by {repair.by}: {repair.what}")]
    lines += [
        f"closed incident {short_id(item.id)}: {printable(item.title)}" for item in done.closed
    ]
    return "\n".join(lines if done.closed else [*lines, "no incident was open"])
