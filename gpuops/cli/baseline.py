"""``gpuops baseline``: floors learned from the fleet's own results."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import click

from gpuops.burnin.baseline import (
    MOVED_PERCENT,
    NODES_MIN,
    RESULTS_MIN,
    Floor,
    FloorChange,
    Learned,
    changes,
    learn,
)
from gpuops.burnin.baseline_file import (
    Baseline,
    baseline_for,
    baseline_text,
    load_baselines,
)
from gpuops.checks.core.suite import unknown_name
from gpuops.cli.history import open_history, print_notes
from gpuops.cli.options import (
    OutputFile,
    json_option,
    parse_since,
    settings_of,
    since_option,
    store_option,
)
from gpuops.config.resolve import Settings
from gpuops.errors import EXIT_OK, EXIT_TRY_LATER, UsageError
from gpuops.host.clock import SystemClock
from gpuops.host.records import to_json
from gpuops.host.trust import atomic_write, check_folders, current_uid
from gpuops.log import printable
from gpuops.model import Json, envelope
from gpuops.report.render.layout import WIDTH, table
from gpuops.resources import data_dir
from gpuops.store.queries.burnin_queries import passed_measurements
from gpuops.units import US_PER_S, iso_utc

_LEARN_SINCE = "90d"


@click.group(epilog="Example: gpuops baseline learn --out h100.toml")
def baseline() -> None:
    """Learn from burn-ins what healthy nodes measure; show it, and what moved since."""


@baseline.command("learn", epilog="Example: gpuops baseline learn --since 28d --out h100.toml")
@click.option("--shape", metavar="SHAPE", help="Only machines of this shape, as `show` names them.")
@since_option(_LEARN_SINCE)
@click.option(
    "--nodes-min",
    type=click.IntRange(min=1),
    default=NODES_MIN,
    show_default=True,
    help="Nodes that a floor needs.",
)
@click.option(
    "--results-min",
    type=click.IntRange(min=1),
    default=RESULTS_MIN,
    show_default=True,
    help="Results that a floor needs.",
)
@click.option(
    "--out", metavar="FILE", type=OutputFile(), help="Output file; default: standard output."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@store_option
@click.pass_context
def learn_command(
    ctx: click.Context,
    *,
    shape: str | None,
    since_us: int | None,
    nodes_min: int,
    results_min: int,
    out: Path | None,
    force: bool,
    store: str | None,
) -> int:
    """Write a baseline: floors from what root measured on nodes whose burn-in passed.

    Read it, and put it into `baselines/` of the site's folder (check.site_dir), where burn-ins find
    it by the machine's shape. Exit codes: 0 learned; 64 a mistake, or several shapes; 75 too few
    results as yet.
    """
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists; use --force to replace it")
    since_us = parse_since(_LEARN_SINCE) if since_us is None else since_us
    found = _learn(ctx, store, since_us, shape, (nodes_min, results_min))
    if not found.floors:
        return EXIT_TRY_LATER
    if len(found.floors) > 1:
        shapes = ", ".join(map(repr, sorted(found.floors)))
        raise UsageError(f"the store has several shapes; name one with --shape: {shapes}")
    ((shape, floors),) = found.floors.items()
    # What was not measured here keeps the figure of others, which only warns.
    quoted, _ = baseline_for(load_baselines([data_dir("checks") / "baselines"]), shape)
    made = Baseline(
        name=shape if out is None else out.stem,
        inherits="" if quoted is None else quoted.name,
        about=f"learned by `gpuops baseline learn` on {iso_utc(SystemClock().now_us())[:10]}",
        shape=shape,
        verified=True,
        until=datetime.fromtimestamp(found.last_us // US_PER_S, UTC).date(),
        nodes_min=nodes_min,
        results_min=results_min,
        floors=floors,
    )
    if out is None:
        click.echo(baseline_text(made), nl=False)
        return EXIT_OK
    try:
        atomic_write(out, baseline_text(made).encode(), 0o644)
    except OSError as exc:
        raise UsageError(f"cannot write {out}: {exc.strerror}") from exc
    click.echo(f"wrote {out}: {len(floors)} floors of {printable(shape)}")
    return EXIT_OK


def _learn(
    ctx: click.Context, store: str | None, since_us: int, shape: str | None, least: tuple[int, int]
) -> Learned:
    """Return what the store says; what people should know about it goes to standard error."""
    measured = partial(passed_measurements, cluster=settings_of(ctx).cluster, since_us=since_us)
    nothing = "nothing to learn from: the store has no burn-in of root's that passed since then"
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            found = learn(
                measured(connection, shape=shape), nodes_min=least[0], results_min=least[1]
            )
            if shape is not None and not found.floors and not found.remarks:
                shapes = ", ".join(sorted({repr(row.shape) for row in measured(connection)}))
                nothing += f" of the shape {shape!r} (it has: {shapes or 'none'})"
        print_notes(opened)
    for text in found.remarks or (() if found.floors else (nothing,)):
        click.echo(f"gpuops: {printable(text)}", err=True)
    return found


@baseline.command("show", epilog="Example: gpuops baseline show h100-sxm")
@click.argument("name", required=False)
@json_option
@click.pass_context
def show_command(ctx: click.Context, name: str | None, *, as_json: bool) -> None:
    """List baselines, shipped ones and the site's; or show the floors of the one called NAME."""
    baselines = _load(settings_of(ctx))
    shown = list(baselines.values()) if name is None else [_named(baselines, name)]
    if as_json:
        bodies = [{**to_json(x), "floors": [_floor_json(y) for y in x.floors]} for x in shown]
        body = envelope("gpuops.baselines/1", {"baselines": bodies})
        click.echo(json.dumps(body, indent=2, default=str))
    elif name is None:
        rows = [
            (x.name, x.shape, str(len(x.floors)), "yes" if x.verified else "no", x.path)
            for x in shown
        ]
        head = ("name", "shape", "floors", "verified", "file")
        click.echo(table(head, rows, right=(2,), width=2 * WIDTH))
    else:
        click.echo(_floors_text(shown[0]))


def _floors_text(found: Baseline) -> str:
    rows = [
        (
            f"{floor.test} {floor.parameters}".rstrip(),
            f"{floor.value:.4g}",
            _number(floor.median),
            _number(floor.fail_bound if floor.may_fail else None),
            floor.unit,
            str(floor.results),
            floor.source,
        )
        for floor in found.floors
    ]
    head = ("test", "floor", "median", "fails", "unit", "results", "source")
    lines = [printable(f"{found.name}: {found.about or 'floors'} ({found.path})")]
    if not found.verified:
        lines.append("not verified here: quoted floors only warn")
    return "\n".join([*lines, table(head, rows, right=(1, 2, 3, 5), width=2 * WIDTH)])


def _load(settings: Settings) -> dict[str, Baseline]:
    return load_baselines(check_folders(settings.site_dir, uid=current_uid()).baselines)


def _named(baselines: Mapping[str, Baseline], name: str) -> Baseline:
    if name not in baselines:
        raise UsageError(unknown_name("baseline", name, baselines))
    return baselines[name]


@baseline.command("diff", epilog="Example: gpuops baseline diff h100-rack")
@click.argument("name")
@since_option("the day after its last result, else 90d")
@store_option
@json_option
@click.pass_context
def diff_command(
    ctx: click.Context,
    name: str,
    *,
    since_us: int | None,
    store: str | None,
    as_json: bool,
) -> int:
    """Show which learned floors of the baseline NAME moved since, and with which driver.

    Exit codes: 0 compared; 75 too few results as yet.
    """
    before = _named(_load(settings_of(ctx)), name)
    if since_us is None:
        day = before.until and (before.until + timedelta(days=1)).isoformat()
        since_us = parse_since(day or _LEARN_SINCE)
    found = _learn(ctx, store, since_us, before.shape, (before.nodes_min, before.results_min))
    now = found.floors.get(before.shape, ())
    compared = changes(before.floors, now)
    if as_json:
        rows = [_change_json(item) for item in compared]
        body = {"name": before.name, "since": iso_utc(since_us), "changes": rows}
        click.echo(json.dumps(envelope("gpuops.baseline-diff/1", body), indent=2))
    elif now:
        click.echo(_changes_text(compared))
    return EXIT_OK if now else EXIT_TRY_LATER


def _changes_text(compared: Sequence[FloorChange]) -> str:
    moved = [item for item in compared if item.is_moved]
    head = ("test", "median", "then", "moved", "unit", "with")
    rows = [_change_row(item) for item in sorted(moved, key=lambda x: -abs(x.percent or 0))]
    lines = [table(head, rows, right=(1, 2, 3), width=2 * WIDTH)] if rows else []
    rest = f"{len(compared) - len(moved)} of {len(compared)} floors moved by less than"
    return "\n".join([*lines, f"{rest} {MOVED_PERCENT:g} %"])


def _change_row(change: FloorChange) -> tuple[str, ...]:
    before, now, percent = change.before, change.now, change.percent
    about = now or before
    assert about is not None
    return (
        f"{about.test} {about.parameters}".rstrip(),
        _number(None if now is None else now.median),
        _number(None if before is None else before.median),
        f"{percent:+.1f} %" if percent is not None else "new" if before is None else "not measured",
        about.unit,
        _software_change(change),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _software_change(change: FloorChange) -> str:
    """Return the versions of now, and those of before where they differ."""
    texts = []
    for word, name in (("driver", "driver"), ("NCCL", "nccl")):
        before, now = (getattr(x, name, "") for x in (change.before, change.now))
        old = f"{before} -> " if before and now and before != now else ""
        texts += [f"{word} {old}{now or before}"] if now or before else []
    return ", ".join(texts)


def _floor_json(floor: Floor) -> Json:
    return {**to_json(floor), "fail_bound": floor.fail_bound, "may_fail": floor.may_fail}


def _change_json(change: FloorChange) -> Json:
    sides = {"before": change.before, "now": change.now}
    shown = {word: floor and _floor_json(floor) for word, floor in sides.items()}
    return {**shown, "percent": change.percent, "moved": change.is_moved}
