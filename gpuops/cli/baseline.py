"""``gpuops baseline``: floors learned from the fleet's own results."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import click

from gpuops.burnin.baseline import (
    MOVED_PERCENT,
    NODES_MIN,
    RESULTS_MIN,
    SIMILARITY_MIN,
    Cell,
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
    option_callback,
    settings_of,
    store_option,
)
from gpuops.config.resolve import Settings
from gpuops.errors import EXIT_OK, EXIT_TRY_LATER, UsageError
from gpuops.host.clock import SystemClock
from gpuops.host.trust import atomic_write, check_folders, current_uid
from gpuops.log import printable
from gpuops.model import Json, envelope
from gpuops.report.render.layout import WIDTH, table
from gpuops.resources import data_dir
from gpuops.store.queries.burnin_queries import passed_measurements
from gpuops.units import US_PER_S, iso_utc, parse_iso_utc, parse_seconds

F = TypeVar("F", bound=Callable[..., object])
LEARN_DAYS = 90
_SHOWN_MAX = 20


def _parse_since(text: str) -> int:
    """Return the microseconds since the epoch of a day, or of so long ago."""
    try:
        return parse_iso_utc(text)
    except ValueError:
        return SystemClock().now_us() - round(parse_seconds(text) * US_PER_S)


def since_option(default: str) -> Callable[[F], F]:
    """Return the option that says from when on results count; *default* for people."""
    return click.option(
        "--since",
        "since_us",
        metavar="DAY|TIME",
        callback=option_callback(_parse_since),
        help=f"Only results since this day (2026-11-01) or for so long (28d); default: {default}.",
    )


def count_option(flag: str, default: int, what: str) -> Callable[[F], F]:
    """Return an option of *what* a floor needs, at least."""
    return click.option(
        flag,
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        metavar="N",
        help=f"{what} that a floor needs.",
    )


@click.group(epilog="Example: gpuops baseline learn --out h100.toml")
def baseline() -> None:
    """Learn from burn-ins what healthy nodes measure; show it, and what moved since."""


@baseline.command("learn", epilog="Example: gpuops baseline learn --since 28d --out h100.toml")
@click.option("--shape", metavar="SHAPE", help="Only machines of this shape, as `show` names them.")
@since_option(f"{LEARN_DAYS}d")
@count_option("--nodes-min", NODES_MIN, "Nodes")
@count_option("--results-min", RESULTS_MIN, "Results")
@click.option(
    "--out", metavar="FILE", type=OutputFile(), help="Output file; default: standard output."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@store_option
@json_option
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
    as_json: bool,
) -> int:
    """Write a baseline: floors from what root measured on nodes whose burn-in passed.

    Read it, and put it into `baselines/` of the site's folder (check.site_dir), where burn-ins find
    it by the machine's shape. Exit codes: 0 learned; 64 a mistake, or several shapes; 75 too few
    results as yet.
    """
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists; use --force to replace it")
    now_us = SystemClock().now_us()
    since_us = now_us - LEARN_DAYS * 86_400 * US_PER_S if since_us is None else since_us
    found = _learn(ctx, store, since_us, shape, (nodes_min, results_min))
    shapes = sorted({floor.shape for floor in found.floors})
    if len(shapes) > 1:
        raise UsageError(f"the store has several shapes; name one with --shape: {_list(shapes)}")
    for line in _remarks(found):
        click.echo(f"gpuops: {printable(line)}", err=True)
    if not shapes:
        return EXIT_TRY_LATER
    # What was not measured here keeps the figure of others, which only warns.
    quoted, _ = baseline_for(load_baselines([data_dir("checks") / "baselines"]), shapes[0])
    made = Baseline(
        name=shapes[0] if out is None else out.stem,
        inherits="" if quoted is None else quoted.name,
        about=f"learned by `gpuops baseline learn` on {iso_utc(now_us)[:10]}",
        shape=shapes[0],
        verified=True,
        until=datetime.fromtimestamp(found.last_us // US_PER_S, UTC).date(),
        nodes_min=nodes_min,
        results_min=results_min,
        floors=found.floors,
    )
    if out is not None:
        try:
            atomic_write(out, baseline_text(made).encode(), 0o644)
        except OSError as exc:
            raise UsageError(f"cannot write {out}: {exc.strerror}") from exc
    if as_json:
        body = {**_baseline_json(made), **_learned_json(found), "file": out and str(out)}
        click.echo(json.dumps(envelope("gpuops.baseline-learned/1", body), indent=2))
    elif out is None:
        click.echo(baseline_text(made), nl=False)
    else:
        click.echo(f"wrote {out}: {len(found.floors)} floors of {printable(shapes[0])}")
    return EXIT_OK


def _learn(
    ctx: click.Context, store: str | None, since_us: int, shape: str | None, least: tuple[int, int]
) -> Learned:
    cluster = settings_of(ctx).cluster
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            results = passed_measurements(
                connection, cluster=cluster, since_us=since_us, shape=shape
            )
            found = learn(results, nodes_min=least[0], results_min=least[1])
        print_notes(opened)
    return found


def _list(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words))


def _about(cell: Cell) -> str:
    text = f"{cell.shape}: {cell.test} {cell.parameters_text}".rstrip()
    return text + f", driver {cell.driver}" * bool(cell.driver)


def _remarks(found: Learned) -> list[str]:
    """Return what people should know about what was, and what was not, learned."""
    lines = []
    for item in found.unlike:
        moved = 100 * (item.median / item.fleet_median - 1)
        lines.append(
            f"{item.node} is unlike its fleet in {_about(item.cell)}: similarity"
            f" {item.similarity:.3f}, below {SIMILARITY_MIN}; its median is {moved:+.1f} % off"
        )
    lines += [
        f"no floor for {_about(item.cell)}: {item.results} results of {item.nodes} nodes passed"
        for item in found.too_few
    ]
    if not found.floors and not found.too_few:
        lines.append(
            "nothing to learn from: the store has no burn-in of root's that passed since then"
        )
    more = len(lines) - _SHOWN_MAX
    return lines if more <= 1 else [*lines[:_SHOWN_MAX], f"and {more} more; --json has them all"]


@baseline.command("show", epilog="Example: gpuops baseline show h100-sxm")
@click.argument("name", required=False)
@json_option
@click.pass_context
def show_command(ctx: click.Context, name: str | None, *, as_json: bool) -> None:
    """List baselines, shipped ones and the site's; or show the floors of the one called NAME."""
    baselines = _load(settings_of(ctx))
    shown = list(baselines.values()) if name is None else [_named(baselines, name)]
    if as_json:
        body = {"baselines": [_baseline_json(item) for item in shown]}
        click.echo(json.dumps(envelope("gpuops.baselines/1", body), indent=2))
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
            f"{floor.test} {floor.parameters_text}".rstrip(),
            f"{floor.value:.4g}",
            "-" if floor.median is None else f"{floor.median:.4g}",
            f"{floor.fail_bound:.4g}" if floor.fail_bound and floor.may_fail else "-",
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
        since_us = _day_after(before.until)
    found = _learn(ctx, store, since_us, before.shape, (before.nodes_min, before.results_min))
    compared = changes(before.floors, found.floors)
    if as_json:
        body = {
            "name": before.name,
            "since": iso_utc(since_us),
            "changes": [_change_json(item) for item in compared],
            **_learned_json(found),
        }
        click.echo(json.dumps(envelope("gpuops.baseline-diff/1", body), indent=2))
        return EXIT_OK if found.floors else EXIT_TRY_LATER
    for line in _remarks(found):
        click.echo(f"gpuops: {printable(line)}", err=True)
    if not found.floors:
        return EXIT_TRY_LATER
    moved = [item for item in compared if item.is_moved]
    head = ("test", "median", "then", "moved", "unit", "with")
    rows = [_change_row(item) for item in sorted(moved, key=lambda x: -abs(x.percent or 0))]
    if rows:
        click.echo(table(head, rows, right=(1, 2, 3), width=2 * WIDTH))
    rest = len(compared) - len(moved)
    click.echo(f"{rest} of {len(compared)} floors moved by less than {MOVED_PERCENT:g} %")
    return EXIT_OK


def _day_after(day: date | None) -> int:
    if day is None:
        return _parse_since(f"{LEARN_DAYS}d")
    return parse_iso_utc((day + timedelta(days=1)).isoformat())


def _change_row(change: FloorChange) -> tuple[str, ...]:
    before, now = change.before, change.now
    about = now or before
    assert about is not None
    percent = change.percent
    return (
        f"{about.test} {about.parameters_text}".rstrip(),
        _typical(now),
        _typical(before),
        f"{percent:+.1f} %" if percent is not None else "new" if before is None else "not measured",
        about.unit,
        _software_change(change),
    )


def _typical(floor: Floor | None) -> str:
    return "-" if floor is None or floor.median is None else f"{floor.median:.4g}"


def _software_change(change: FloorChange) -> str:
    """Return the versions of now, and those of before where they differ."""
    texts = []
    for word, name in (("driver", "driver"), ("NCCL", "nccl")):
        before, now = (getattr(x, name, "") for x in (change.before, change.now))
        old = f"{before} -> " if before and now and before != now else ""
        texts += [f"{word} {old}{now or before}"] if now or before else []
    return ", ".join(texts)


def _floor_json(floor: Floor) -> Json:
    body = asdict(floor)
    body["parameters"] = body.pop("parameters_text")
    return {**body, "fail_bound": floor.fail_bound, "may_fail": floor.may_fail}


def _baseline_json(item: Baseline) -> Json:
    until = item.until and item.until.isoformat()
    return {**asdict(item), "until": until, "floors": [_floor_json(x) for x in item.floors]}


def _learned_json(found: Learned) -> Json:
    return {
        "unlike": [{**asdict(item), "cell": item.cell._asdict()} for item in found.unlike],
        "too_few": [{**asdict(item), "cell": item.cell._asdict()} for item in found.too_few],
    }


def _change_json(change: FloorChange) -> Json:
    sides = {"before": change.before, "now": change.now}
    shown = {word: floor and _floor_json(floor) for word, floor in sides.items()}
    return {**shown, "percent": change.percent, "moved": change.is_moved}
