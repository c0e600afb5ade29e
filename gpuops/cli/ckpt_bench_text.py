"""What ``gpuops ckpt bench`` prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

from gpuops.units import format_bytes

_MS = 1e3
WIDTH_MIN = 150  # of the widest table: a terminal that wraps is better than cut names
_SAVES = {
    "stall_s": "stall",
    "extra_s": "step longer by",
    "recoverable_s": "outlives SIGKILL",
    "durable_s": "durable",
    "lost_s": "training lost",
}


def print_bench(body: dict[str, Any], console: Console | None = None) -> None:
    """Print all tables; milliseconds, medians, and the cold first one in brackets."""
    console = console or Console()
    if console.width < WIDTH_MIN:
        console = Console(width=WIDTH_MIN)
    plan = body["plan"]
    console.print(
        f"torch {body['torch']}, one thread; medians of {plan['rounds']} rounds in turns, "
        "milliseconds; (cold): the first, which does not count"
    )
    for name in ("save", "small"):
        if name in body:
            console.print(_saves(body[name]))
    if "recovery" in body:
        console.print(_recovery(body["recovery"], plan["nbytes"]))
    if "flips" in body:
        console.print(_flips(body["flips"]))
    if "odds" in body:
        console.print(_odds(body["odds"]))
    console.print(_goals(body["goals"]))
    for what, why in body["did_not_run"].items():
        console.print(f"{what} did not run: {why}")


def _ms(figures: dict[str, Any]) -> str:
    if figures["median"] is None:
        return "-"
    cold = "-" if figures["first"] is None else f"{figures['first'] * _MS:.0f}"
    return f"{figures['median'] * _MS:.4g} ({cold})"


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
    table.add_row("hash", "", "", _ms(part["hash"]), "", "", "", str(part["hash"]["n"]))
    return table


def _recovery(part: dict[str, Any], nbytes: int) -> Table:
    title = f"{format_bytes(nbytes)} after SIGKILL, into a live process"
    caption = (
        "gpuops verifies and copies with all cores of the rank, the others copy with one thread; "
        "out of another process's memory is what any restore must do whose state outlived its "
        "worker: the kernel maps each page"
    )
    table = Table("restore", title=title, title_justify="left", caption=caption)
    table.add_column("milliseconds", justify="right")
    for way in part["ways"]:
        table.add_row(way["way"], _ms(way["seconds"]))
    return table


def _flips(tallies: list[dict[str, Any]]) -> Table:
    table = Table("flipped in", "loaded by", title="single bits", title_justify="left")
    for head in ("flips", "found", "silently wrong", "of no consequence"):
        table.add_column(head, justify="right")
    for tally in tallies:
        counts = (tally[name] for name in ("flips", "found", "silent", "harmless"))
        table.add_row(tally["where"], tally["way"], *map(str, counts))
    return table


def _odds(rows: list[dict[str, Any]]) -> Table:
    table = Table("lost of 16", title="GEMINI, 2 copies", title_justify="left")
    for head in ("published", "counted", "simulated"):
        table.add_column(head, justify="right")
    for row in rows:
        shares = (row[name] for name in ("published", "exact", "simulated"))
        table.add_row(str(row["lost"]), *(f"{100 * share:.1f} %" for share in shares))
    return table


def _goals(rows: list[dict[str, Any]]) -> Table:
    table = Table("goal", "beside", title="against the limits", title_justify="left")
    table.add_column("measured", justify="right")
    table.add_column("wanted")
    table.add_column("met")
    for row in rows:
        value = "-" if row["value"] is None else f"{row['value']:.3g}"
        met = "yes" if row["met"] else "NO"
        table.add_row(row["metric"], row["beside"], value, row["goal"], met)
    return table
