"""``gpuops db upgrade|status|flush|replay|prune``."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TypeVar

import click

from gpuops.cli.options import json_option, settings_of, store_option
from gpuops.config.resolve import Settings, environ
from gpuops.errors import EXIT_OK, EXIT_TRY_LATER, StoreError
from gpuops.host.clock import SystemClock
from gpuops.host.node_state import node_name
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import Json, envelope
from gpuops.report.render.layout import table
from gpuops.store.backends import parse_url, redacted
from gpuops.store.engine import SchemaFit, StoreSummary, open_store, summarize_store
from gpuops.store.migrate import upgrade_store
from gpuops.store.prune import Retention, count_prunable, prune
from gpuops.store.schema import REVISION
from gpuops.store.sizes import GROWTH_DAYS, TableSize
from gpuops.store.spool.forward import (
    USERS_DIR,
    ForwardOptions,
    ForwardReport,
    UsersBacklog,
    forward_users,
    measure_users,
)
from gpuops.store.spool.read import count_dropped, count_rejected
from gpuops.store.spool.replay import (
    REPLAY_DEADLINE_S,
    ReplayReport,
    replay_rejected,
    users_records,
)
from gpuops.store.spool.segments import SpoolBacklog, measure_spool
from gpuops.store.spool.send import FLUSH_DEADLINE_S, flush
from gpuops.units import NS_PER_S, US_PER_S, format_bytes, format_seconds, iso_utc

F = TypeVar("F", bound=Callable[..., object])
USERS_DEADLINE_S = 2.0


def deadline_option(default_s: float, command: str) -> Callable[[F], F]:
    """Return the option of *command* that says how long it sends lines, in seconds."""
    return click.option(
        "--deadline",
        "deadline_s",
        type=click.FloatRange(min=0.1, max=3600),
        default=default_s,
        show_default=True,
        metavar="S",
        help=f"Seconds after which the rest is left for the next {command}.",
    )


@click.group(epilog="Example: gpuops db upgrade")
def db() -> None:
    """Create, inspect and feed the incident store."""


@db.command("upgrade", epilog="Example: gpuops db upgrade")
@store_option
@click.pass_context
def upgrade_command(ctx: click.Context, store: str | None) -> None:
    """Upgrade the store's schema to this version; create the tables of an empty store."""
    settings = settings_of(ctx, store__url=store)
    before, after = upgrade_store(
        settings.store_url, create_directory=settings.store_is_default, root=settings.root
    )
    name = redacted(parse_url(settings.store_url))
    if before == after:
        click.echo(f"{name}: already at schema {after}")
    else:
        click.echo(f"{name}: schema {before or 'none'} -> {after}")


@db.command("status", epilog="Example: gpuops db status --json")
@store_option
@json_option
@click.pass_context
def status_command(ctx: click.Context, store: str | None, *, as_json: bool) -> int:
    """Show the store's schema and rows, and the backlog of the spool.

    As root, also that of the spools of users (spool.users_dir).
    """
    settings = settings_of(ctx, store__url=store)
    backlog = measure_spool(settings.spool_dir)
    rejected = count_rejected(settings.spool_dir)
    summary, error = _summarize(settings)
    body = {
        "store": _store_json(settings, summary, error),
        "spool": _spool_json(settings, backlog, rejected),
        "users": _users_json(settings) if current_uid() == 0 else None,
    }
    if as_json:
        click.echo(json.dumps(envelope("gpuops.db-status/1", body), indent=2))
    else:
        _print_status(body)
    if summary is None:
        return EXIT_TRY_LATER
    usable = summary.fit in (SchemaFit.CURRENT, SchemaFit.UNKNOWN)
    return EXIT_OK if usable or _is_new_sqlite(summary) else EXIT_TRY_LATER


def _summarize(settings: Settings) -> tuple[StoreSummary | None, str | None]:
    try:
        return summarize_store(settings.store_url, SystemClock().now_us(), root=settings.root), None
    except StoreError as exc:
        return None, str(exc)


def _is_new_sqlite(summary: StoreSummary) -> bool:
    return summary.backend == "sqlite" and summary.fit is SchemaFit.EMPTY


def _store_json(settings: Settings, summary: StoreSummary | None, error: str | None) -> Json:
    return {
        "url": redacted(parse_url(settings.store_url)),
        "origin": settings.values["store.url"].origin,
        "backend": summary and summary.backend,
        "schema": summary and summary.revision,
        "schema_of_this_gpuops": REVISION,
        "state": summary.fit.value if summary else "unreachable",
        "advice": summary.advice if summary else error,
        "rows": summary.rows if summary else {},
        "tables": [_table_json(item) for item in summary.tables] if summary else [],
    }


def _table_json(item: TableSize) -> Json:
    return {
        "name": item.name,
        "rows": item.rows,
        "bytes": item.bytes,
        "rows_per_day": item.rows_per_day,
        "bytes_per_day": item.bytes_per_day,
    }


def _spool_json(settings: Settings, backlog: SpoolBacklog, rejected: int) -> Json:
    return {
        "dir": str(settings.spool_dir),
        "segments": backlog.segments,
        "lines": backlog.lines,
        "bytes": backlog.bytes,
        **_oldest_json(backlog.oldest_us),
        "rejected": rejected,
        "rejected_dropped": count_dropped(settings.spool_dir),
    }


def _oldest_json(oldest_us: int | None) -> Json:
    if oldest_us is None:
        return {"oldest": None, "oldest_age_s": None}
    age_s = max((SystemClock().now_us() - oldest_us) / US_PER_S, 0.0)
    return {"oldest": iso_utc(oldest_us), "oldest_age_s": age_s}


def _users_json(settings: Settings) -> Json:
    backlog, error = UsersBacklog(is_complete=False), None
    try:
        backlog = measure_users(
            _forward_options(settings), clock=SystemClock(), deadline_s=USERS_DEADLINE_S
        )
    except OSError as exc:
        error = f"cannot read {settings.spool_users_dir}: {exc.strerror}"
    records = users_records(settings.spool_dir).values()
    return {
        "dir": str(settings.spool_users_dir),
        "users": backlog.users,
        "segments": backlog.segments,
        "bytes": backlog.bytes,
        **_oldest_json(backlog.oldest_us),
        "complete": backlog.is_complete,
        "rejected": sum(map(count_rejected, records)),
        "rejected_dropped": sum(map(count_dropped, records)),
        "error": error,
    }


def _print_status(body: Json) -> None:
    store, spool = body["store"], body["spool"]
    click.echo(printable(f"store   {store['url']}  [{store['origin']}]"))
    click.echo(f"schema  {store['state']}, revision {store['schema'] or 'none'}")
    if store["advice"]:
        click.echo(printable(f"        {store['advice']}"))
    if store["rows"]:
        click.echo("rows    " + ", ".join(f"{name} {n}" for name, n in store["rows"].items()))
        _print_sizes(store["tables"])
    waiting = "nothing waits"
    if spool["lines"]:
        age = format_seconds(spool["oldest_age_s"])
        size = format_bytes(spool["bytes"])
        waiting = f"{spool['lines']} events wait ({size}, the oldest for {age})"
    click.echo(printable(f"spool   {spool['dir']}: {waiting}"))
    _print_rejected(spool, "rejected/")
    if body["users"]:
        _print_users(body["users"])


def _print_rejected(counts: Json, folder: str) -> None:
    if counts["rejected"]:
        click.echo(f"        {counts['rejected']} refused lines are kept in {folder}")
        click.echo("        `gpuops db replay` sends them again")
    if counts["rejected_dropped"]:
        click.echo(f"        {counts['rejected_dropped']} more did not fit there and were dropped")


def _print_users(users: Json) -> None:
    waiting = "nothing waits"
    if users["segments"]:
        age, size = format_seconds(users["oldest_age_s"]), format_bytes(users["bytes"])
        waiting = f"{size} of {users['users']} users wait (the oldest for {age})"
    if users["error"]:
        waiting = users["error"]
    elif not users["complete"]:
        waiting += ", and more that was not looked at"
    click.echo(printable(f"users   {users['dir']}: {waiting}"))
    _print_rejected(users, f"{USERS_DIR}/*/rejected/ of the spool")


def _print_sizes(tables: list[Json]) -> None:
    total = sum(item["bytes"] or 0 for item in tables)
    if total:
        growth = sum(item["bytes_per_day"] or 0 for item in tables)
        click.echo(
            f"size    {format_bytes(total)}, {format_bytes(round(growth))} a day"
            f" (new rows of the last {GROWTH_DAYS} days)"
        )
    rows = [
        (
            item["name"],
            "-" if item["bytes"] is None else format_bytes(item["bytes"]),
            str(item["rows"]),
            "-" if item["rows_per_day"] is None else f"{item['rows_per_day']:.0f}",
            "-" if item["bytes_per_day"] is None else format_bytes(round(item["bytes_per_day"])),
        )
        for item in tables
    ]
    head = ("table", "size", "rows", "rows a day", "bytes a day")
    for line in table(head, rows, right=(1, 2, 3, 4)).splitlines() if rows else ():
        click.echo(f"        {line}")


@db.command("prune", epilog="Example: gpuops db prune --dry-run")
@store_option
@click.option("--dry-run", is_flag=True, help="Count the rows, delete none.")
@json_option
@click.pass_context
def prune_command(ctx: click.Context, store: str | None, *, dry_run: bool, as_json: bool) -> None:
    """Delete what is older than its retention (the settings `retention.*_days`).

    In small steps, so that writers never wait for long. Incidents, runs, repairs and strikes stay.
    """
    settings = settings_of(ctx, store__url=store)
    retention = Retention(
        **{item.name: settings.values[f"retention.{item.name}"].value for item in fields(Retention)}
    )
    now_us = SystemClock().now_us()
    with open_store(
        settings.store_url, mode="read" if dry_run else "write", root=settings.root
    ) as opened:
        if dry_run:
            with opened.begin() as connection:
                rows = count_prunable(connection, retention, now_us)
        else:
            rows = prune(opened, retention, now_us)
    if as_json:
        body = {"dry_run": dry_run, "deleted": rows, "retention": asdict(retention)}
        click.echo(json.dumps(envelope("gpuops.db-prune/1", body), indent=2))
        return
    done = "would delete" if dry_run else "deleted"
    counts = ", ".join(f"{name} {count}" for name, count in rows.items())
    click.echo(f"{done}: {counts or 'nothing is older than its retention'}")


@db.command("flush", epilog="Example: gpuops db flush")
@store_option
@deadline_option(FLUSH_DEADLINE_S, "flush")
@click.option("--quiet", is_flag=True, help="Print nothing.")
@json_option
@click.pass_context
def flush_command(
    ctx: click.Context, store: str | None, deadline_s: float, *, quiet: bool, as_json: bool
) -> int:
    """Send the events in the spool to the store; exit 75 if some remain.

    As root, also those in the spools of users (spool.users_dir).
    """
    settings, clock = settings_of(ctx, store__url=store), SystemClock()
    end_ns = clock.mono_ns() + round(deadline_s * NS_PER_S)
    report = flush(
        settings.spool_dir,
        settings.store_url,
        deadline_s=deadline_s,
        cluster=settings.cluster,
        clock=clock,
        root=settings.root,
    )
    forwarded = None
    if current_uid() == 0 and report.note is None:
        left_s = max((end_ns - clock.mono_ns()) / NS_PER_S, 0.1)
        forwarded = forward_users(_forward_options(settings), deadline_s=left_s, clock=clock)
    if as_json:
        body = {**asdict(report), "forwarded": forwarded and asdict(forwarded)}
        click.echo(json.dumps(envelope("gpuops.db-flush/1", body), indent=2))
    elif not quiet:
        click.echo(
            f"{report.sent} sent, {report.already_there} already there, {report.refused} refused, "
            f"{report.corrupt} corrupt, {report.torn} torn, {report.remaining} remaining"
        )
        if forwarded is not None and forwarded.users:
            click.echo(_forward_text(forwarded))
    note = report.note or (forwarded and forwarded.note)
    if note is None:
        return EXIT_OK
    if not quiet and not as_json:
        click.echo(printable(f"gpuops: {note}"), err=True)
    return EXIT_TRY_LATER


def _forward_options(settings: Settings) -> ForwardOptions:
    return ForwardOptions(
        users_dir=settings.spool_users_dir,
        spool_dir=settings.spool_dir,
        store_url=settings.store_url,
        cluster=settings.cluster,
        node=node_name(environ()),
        root=settings.root,
    )


def _forward_text(report: ForwardReport) -> str:
    held_back = f", {report.held_back} of them over their hourly bound" if report.held_back else ""
    return (
        f"spools of {report.users} users{held_back}: {report.sent} sent, "
        f"{report.already_there} already there, {report.refused} refused, "
        f"{report.corrupt} corrupt, {report.torn} torn"
    )


@db.command("replay", epilog="Example: gpuops db replay --dry-run")
@store_option
@click.option("--dry-run", is_flag=True, help="Ask the store, but change nothing.")
@deadline_option(REPLAY_DEADLINE_S, "replay")
@json_option
@click.pass_context
def replay_command(
    ctx: click.Context, store: str | None, deadline_s: float, *, dry_run: bool, as_json: bool
) -> int:
    """Send refused lines again, after an upgrade or a fix; exit 75 if some were not tried.

    What the store refuses again stays, with its newest reason. As root, also lines of users.
    """
    settings = settings_of(ctx, store__url=store)
    report = replay_rejected(
        _forward_options(settings), dry_run=dry_run, deadline_s=deadline_s, clock=SystemClock()
    )
    if as_json:
        reasons = [{"reason": text, "lines": n} for text, n in report.most_frequent()]
        body = {
            "dry_run": dry_run,
            "stored": report.stored,
            "already_there": report.already_there,
            "refused": report.refused,
            "reasons": reasons,
            "note": report.note,
        }
        click.echo(json.dumps(envelope("gpuops.db-replay/1", body), indent=2))
    else:
        _print_replay(report, dry_run=dry_run)
    if report.note is None:
        return EXIT_OK
    if not as_json:
        click.echo(printable(f"gpuops: {report.note}"), err=True)
    return EXIT_TRY_LATER


def _print_replay(report: ReplayReport, *, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    click.echo(f"{report.stored} {would}stored")
    click.echo(f"{report.already_there} already there")
    click.echo(f"{report.refused} {would}refused again")
    for reason, n_lines in report.most_frequent():
        click.echo(printable(f"  {n_lines}: {reason}"))
