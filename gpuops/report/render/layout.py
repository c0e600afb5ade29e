"""Plain text in 100 columns, safe for a terminal whatever the logs contain."""

import textwrap
from collections.abc import Sequence

from gpuops.log import printable
from gpuops.units import US_PER_S, iso_utc

WIDTH = 100
LABEL_WIDTH = 11


def one_line(text: str) -> str:
    """Return *text* as one line without control characters."""
    return printable(text.replace("\n", " ").replace("\t", " "))


def truncate(text: str, width: int) -> str:
    """Return *text*, flat, in at most *width* characters."""
    text = one_line(text)
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def labelled(label: str, text: str, indent: int = 0) -> str:
    """Return *text* wrapped to the right of *label*."""
    head = f"{' ' * indent}{label:<{LABEL_WIDTH}}"
    return textwrap.fill(
        one_line(text),
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )


def quoted(lines: Sequence[str], indent: int) -> list[str]:
    """Return log *lines*, each on one line after a bar."""
    head = f"{' ' * indent}| "
    return [f"{head}{truncate(line, WIDTH - len(head))}" for line in lines]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    width: int = WIDTH,
) -> str:
    """Return a table; the columns in *right* are right-aligned, the last one may be truncated."""
    cells = [list(map(one_line, row)) for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    widths[-1] = min(widths[-1], width - sum(w + 2 for w in widths[:-1]))
    return "\n".join(_row(row, widths, right) for row in cells)


def _row(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    parts = []
    for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
        text = truncate(cell, width)
        parts.append(text.rjust(width) if index in right else text.ljust(width))
    return "  ".join(parts).rstrip()


def date_time(time_us: int | None) -> str:
    """Return ``"2026-03-02 09:14:00 UTC"``, or a dash."""
    if time_us is None:
        return "-"
    return f"{iso_utc(time_us // US_PER_S * US_PER_S)[:19].replace('T', ' ')} UTC"


def time_of_day(time_us: int | None) -> str:
    """Return ``"09:14:00"``, or a dash."""
    return "-" if time_us is None else iso_utc(time_us)[11:19]


def short_id(identifier: str) -> str:
    """Return the last eight characters of an id, which differ where the first ones do not."""
    return identifier[-8:]


def count_noun(number: int, noun: str) -> str:
    """Return ``"1 restart"`` or ``"2 restarts"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
