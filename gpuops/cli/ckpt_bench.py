"""``gpuops ckpt bench``: what saving and restoring costs here, beside torch's own ways."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

from gpuops.cli.ckpt_where import needs_extra
from gpuops.cli.interrupt import ctrl_c_ends_at_once
from gpuops.cli.settings import json_option
from gpuops.config_values import to_size
from gpuops.errors import UsageError
from gpuops.model import envelope
from gpuops.units import parse_seconds
from gpuops.worker.checkpointer_bench.plan import ROWS, SCHEMA, Plan

SIZE_BYTES_MIN = 2 * 10**6
SIZE_BYTES_MAX = 2**40
STEP_S_MAX = 10.0


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    try:
        found = to_size(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
    if not SIZE_BYTES_MIN <= found <= SIZE_BYTES_MAX:
        raise click.BadParameter(f"{value}: from {SIZE_BYTES_MIN} to {SIZE_BYTES_MAX} bytes")
    return found


def _step(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    try:
        found = parse_seconds(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
    if not 0 < found <= STEP_S_MAX:
        raise click.BadParameter(f"{value}: above 0, and up to {STEP_S_MAX:g} s")
    return found


@click.command()
@click.option("--size", metavar="SIZE", default="2GB", show_default=True, callback=_size)
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
    help="Of each way, one after the other in turns; a cold one comes before.",
)
@click.option(
    "--step",
    metavar="TIME",
    default="10ms",
    show_default=True,
    callback=_step,
    help="Of the training beside it; thirty such steps come before each save.",
)
@click.option("--kills", type=click.IntRange(0, 100_000), default=200, show_default=True)
@click.option("--flips", type=click.IntRange(3, 1_000_000), default=1000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of kills and flips.")
@click.option(
    "--only",
    metavar="ROW[,…]",
    help="Some of: save, small, recovery, kills, flips, odds, peer.",
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
    kills: int,
    flips: int,
    seed: int,
    only: str | None,
    directory: Path,
    as_json: bool,
) -> None:
    """Measure saving and restoring on this machine, beside torch's own ways and physical limits.

    Needs about nine times --size of memory, and three times --size of disk, and takes minutes;
    nothing else should run meanwhile.
    """
    chosen = tuple(only.split(",")) if only else ROWS
    unknown = [row for row in chosen if row not in ROWS]
    if unknown:
        raise UsageError(f"--only {unknown[0]!r:.60}: there are {', '.join(ROWS)}")
    plan = Plan(
        nbytes=size,
        n_tensors=tensors,
        small_tensors=small_tensors,
        rounds=rounds,
        step_s=step,
        kills=kills,
        flips=flips,
        seed=seed,
        only=chosen,
    )
    with needs_extra("gpuops ckpt bench"), ctrl_c_ends_at_once():
        from gpuops.worker.checkpointer_bench.bench import run_bench
    body = envelope(SCHEMA, run_bench(plan, directory.absolute(), _teller()))
    if as_json:
        click.echo(json.dumps(body, indent=2))
    else:
        from gpuops.cli.ckpt_bench_text import print_bench

        print_bench(body)


def _teller() -> Callable[[str], None]:
    """Return what shows how far it is: one line on a terminal, nothing in a pipe."""
    is_terminal = sys.stderr.isatty()

    def tell(text: str) -> None:
        if is_terminal:
            click.echo(f"\r\033[K{text}", nl=False, err=True)

    return tell
