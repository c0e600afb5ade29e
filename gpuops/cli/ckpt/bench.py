"""``gpuops ckpt bench``: the cost of saving and restoring, compared with memory and disk."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gpuops.cli.ckpt.address import needs_extra
from gpuops.cli.options import exit_on_ctrl_c, json_option, option_callback
from gpuops.config.schema import to_size
from gpuops.errors import UsageError
from gpuops.model import envelope
from gpuops.units import format_bytes, parse_seconds
from gpuops.worker.bench.savers import ROWS, SCHEMA, BenchPlan

_MS = 1e3
WIDTH_MIN = 150  # of the widest table: wrapped lines are better than truncated names
_SAVES = {
    "stall_s": "stall",
    "recoverable_s": "outlives SIGKILL",
    "durable_s": "durable",
    "lost_s": "training lost",
}


def print_bench(body: dict[str, Any], console: Console | None = None) -> None:
    """Print all tables; milliseconds, with extremes, and the cold first round in brackets."""
    console = console or Console()
    if console.width < WIDTH_MIN:
        console = Console(width=WIDTH_MIN)
    plan = body["plan"]
    console.print(
        f"torch {body['torch']}, one thread; {plan['rounds']} interleaved rounds, milliseconds: "
        "median, lowest-highest of the counted rounds, (the first round, cold, not counted)"
    )
    for name in ("save", "small"):
        if name in body:
            console.print(_saves(body[name]))
    if "recovery" in body:
        console.print(_recovery(body["recovery"], plan["nbytes"]))
    if body["goals"]:
        console.print(_goals(body["goals"]))
    for name in ("save", "recovery"):
        if name in body and (noise := _noise(name, body[name]["quiet_rounds"])):
            console.print(noise, soft_wrap=True)


def _ms(figures: dict[str, Any]) -> str:
    if figures["median"] is None:
        return "-"
    cold = "-" if figures["first"] is None else f"{figures['first'] * _MS:.0f}"
    return f"{_short(figures['median'] * _MS)}, {_spread(figures, _MS)} ({cold})"


def _spread(figures: dict[str, Any], times: float = 1.0) -> str:
    return f"{_short(figures['min'] * times)}-{_short(figures['max'] * times)}"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _noise(row: str, rounds: dict[str, int]) -> str | None:
    """Return a line where the machine was not quiet in some of the rounds of *row*."""
    if rounds["quiet"] == rounds["of"]:
        return None
    counted = "only the quiet ones are" if rounds["quiet"] else "none was, so all are"
    return (
        f"{row}: {rounds['quiet']} of {rounds['of']} rounds were quiet: what memory and disk take "
        f"was the same right before and after, within a quarter; {counted} compared with the limits"
    )


def _saves(part: dict[str, Any]) -> Table:
    size = format_bytes(part["nbytes"])
    table = Table("save", title=f"{size} in {part['n_tensors']} tensors", title_justify="left")
    for head in (*_SAVES.values(), "slower while persisting", "rounds"):
        table.add_column(head, justify="right")
    for way in part["ways"]:
        loss = way["loss"]["median"]
        slower = "-" if loss is None else f"{100 * loss:.1f} %"
        n_rounds = str(way["stall_s"]["n"])
        table.add_row(way["way"], *(_ms(way[field]) for field in _SAVES), slower, n_rounds)
    table.add_row("hash", "", _ms(part["hash"]), "", "", "", str(part["hash"]["n"]))
    return table


def _recovery(part: dict[str, Any], nbytes: int) -> Table:
    title = f"{format_bytes(nbytes)} of a worker that has ended, into a live process"
    caption = (
        "gpuops verifies and copies with all cores of the rank, the others copy with one thread; "
        "reading another process' memory is the minimum for a state that outlived its worker: "
        "the kernel maps each page. Under `gpuops run` a worker does that while it imports torch, "
        "which is not in the time of gpuops"
    )
    table = Table("restore", title=title, title_justify="left", caption=caption)
    table.add_column("milliseconds", justify="right")
    for way in part["ways"]:
        table.add_row(way["way"], _ms(way["seconds"]))
    return table


def _goals(rows: list[dict[str, Any]]) -> Table:
    table = Table("goal", "compared with", title="against the limits", title_justify="left")
    table.add_column("measured", justify="right")
    table.add_column("goal")
    table.add_column("met")
    for row in rows:
        value = "-" if row["value"] is None else f"{row['value']:.3g}"
        if row.get("min") is not None:
            value += f", {_spread(row)}"
        met = "yes" if row["met"] else "NO"
        table.add_row(row["metric"], row["beside"], value, row["goal"], met)
    return table


SIZE_BYTES_MIN = 2 * 10**6
SIZE_BYTES_MAX = 2**40
STEP_TIME_S_MAX = 10.0


def _parse_size(text: str) -> int:
    found = to_size(text)
    if not SIZE_BYTES_MIN <= found <= SIZE_BYTES_MAX:
        raise ValueError(f"{text}: from {SIZE_BYTES_MIN} to {SIZE_BYTES_MAX} bytes")
    return found


def _parse_step_time(text: str) -> float:
    found = parse_seconds(text)
    if not 0 < found <= STEP_TIME_S_MAX:
        raise ValueError(f"{text}: above 0, and up to {STEP_TIME_S_MAX:g} s")
    return found


@click.command(epilog="Example: gpuops ckpt bench --dir /scratch --size 500MB")
@click.option(
    "--size",
    metavar="SIZE",
    default="2GB",
    show_default=True,
    callback=option_callback(_parse_size),
)
@click.option("--tensors", type=click.IntRange(6, 1_000_000), default=300, show_default=True)
@click.option(
    "--small-tensors",
    type=click.IntRange(6, 1_000_000),
    default=20_000,
    show_default=True,
    help="How many tensors of 64 bytes, measured once more.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=7,
    show_default=True,
    help="Of each way, interleaved; a cold one comes before.",
)
@click.option(
    "--step",
    metavar="TIME",
    default="10ms",
    show_default=True,
    callback=option_callback(_parse_step_time),
    help="Of the concurrent training; thirty such steps come before each save.",
)
@click.option(
    "--only",
    metavar="ROW[,…]",
    help="Some of: save, small, recovery.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="Where to write; a new directory in it is removed at the end. Default: here.",
)
@json_option
def bench(
    *,
    size: int,
    tensors: int,
    small_tensors: int,
    rounds: int,
    step: float,
    only: str | None,
    directory: Path,
    as_json: bool,
) -> None:
    """Measure saving and restoring on this machine, compared with its memory and disk.

    Needs about six times --size of memory, and twice --size of disk, and takes minutes;
    nothing else should run at the same time.
    """
    chosen = tuple(only.split(",")) if only else ROWS
    unknown = [row for row in chosen if row not in ROWS]
    if unknown:
        raise UsageError(f"--only {unknown[0]!r:.60}: there are {', '.join(ROWS)}")
    plan = BenchPlan(
        nbytes=size,
        n_tensors=tensors,
        small_tensors=small_tensors,
        rounds=rounds,
        step_s=step,
        only=chosen,
    )
    with needs_extra("gpuops ckpt bench"), exit_on_ctrl_c():
        from gpuops.worker.bench.run import run_bench
    body = envelope(SCHEMA, run_bench(plan, directory.absolute(), _progress_printer()))
    if as_json:
        click.echo(json.dumps(body, indent=2))
    else:
        print_bench(body)


def _progress_printer() -> Callable[[str], None]:
    """Return a function that shows the progress: one line on a terminal, nothing in a pipe."""
    is_terminal = sys.stderr.isatty()

    def show(text: str) -> None:
        if is_terminal:
            click.echo(f"\r\033[K{text}", nl=False, err=True)

    return show
