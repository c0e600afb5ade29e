"""The options of ``gpuops drill``, by the field of `Wanted` that each one sets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpuops.config_values import to_size

Flag = Callable[[Callable[..., Any]], Callable[..., Any]]


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else to_size(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


FLAGS: dict[str, Flag] = {
    "node": click.option("--node", metavar="NAME", help="The agent of this node."),
    "rank": click.option("--rank", type=click.IntRange(min=0), help="This rank, or its agent."),
    "for_s": click.option("--for", "for_s", type=click.FloatRange(0.1, 86400), metavar="SECONDS"),
    "signal": click.option("--signal", metavar="NAME", help="Another signal, like SIGSEGV."),
    "store": click.option("--store-too", "store", is_flag=True, help="The agents' store as well."),
    "interface": click.option("--interface", metavar="NAME", help="This network interface."),
    "peers": click.option("--peer", "peers", multiple=True, metavar="ADDRESS"),
    "delay_ms": click.option("--delay", "delay_ms", type=float, metavar="MS"),
    "loss_percent": click.option("--loss", "loss_percent", type=float, metavar="PERCENT"),
    "rate_mbit": click.option("--rate", "rate_mbit", type=float, metavar="MBIT"),
    "directory": click.option("--dir", "directory", metavar="DIR", help="On this file system."),
    "size_bytes": click.option("--size", "size_bytes", callback=_size, help="Take so much (1GiB)."),
    "leave_bytes": click.option("--leave", "leave_bytes", callback=_size, help="Leave so much."),
    "address": click.option("--address", metavar="PCI", help="The GPU, like 0000:3b:00."),
    "xid": click.option("--xid", type=int, help="Another Xid."),
    "count": click.option("--count", type=int, help="So many lines."),
    "share": click.option("--share", type=float, help="The part of the time it stands still."),
}
RUN_FLAGS: tuple[Flag, ...] = (
    click.option(
        "--run-dir",
        type=click.Path(path_type=Path),
        help="The run's folder, or where runs go; default: the setting run.dir.",
    ),
    click.option("--pid", type=click.IntRange(min=2), help="The run of this agent or worker."),
    click.option("--owner", metavar="USER", help="As root: break a run of this user."),
)
STEP_FLAGS: tuple[Flag, ...] = (
    click.option("--at-step", type=click.IntRange(min=0), help="Wait until the rank is there."),
    click.option("--generation", type=click.IntRange(min=0), help="... in this generation."),
    click.option("--deadline", type=float, default=600.0, show_default=True, metavar="SECONDS"),
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
