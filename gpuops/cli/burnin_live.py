"""What a burn-in does now, on a terminal: each part with its last result and its faults."""

import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuops.burnin.measurement import Measurement
from gpuops.burnin.plan import BurninTest
from gpuops.burnin.results import ProgramNote, ProgramOutput, WrongResult, shown
from gpuops.gate.burnin import BurninWatcher
from gpuops.units import format_seconds

_EVERY_S = 0.25


class LiveDisplay:
    """Shows the test that runs, below the lines about those that were done."""

    def __init__(self, console: Console) -> None:
        # No thread refreshes it: the burn-in must have a single one.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._test: BurninTest | None = None
        self._started_s = self._shown_s = 0.0

    def watcher(self, lines: BurninWatcher) -> BurninWatcher:
        """Return what shows the running test besides what *lines* print."""

        def on_start(test: BurninTest, parts: int) -> None:
            lines.on_start(test, parts)
            self._test, self._started_s = test, time.monotonic()
            self._live.start()

        def on_ended() -> None:
            self._live.stop()

        return replace(lines, on_start=on_start, on_turn=self._on_turn, on_ended=on_ended)

    def _on_turn(self, outputs: Sequence[ProgramOutput]) -> None:
        now_s = time.monotonic()
        if self._test is not None and now_s - self._shown_s >= _EVERY_S:
            self._shown_s = now_s
            since = format_seconds(now_s - self._started_s)
            title = f"{self._test.name}: {since} of about {format_seconds(self._test.seconds)}"
            self._live.update(outputs_table(title, outputs), refresh=True)


def outputs_table(title: str, outputs: Sequence[ProgramOutput]) -> Table:
    """Return a row for each of *outputs*: what was measured last, what is wrong so far."""
    table = Table("part", "last result", "wrong", "note", title=title, title_justify="left")
    for output in outputs:
        measured = [item for item in output.of(Measurement) if item.is_measured][-1:]
        texts = [f"{x.parameters_text}: {x.median:.4g} {x.unit}" for x in measured]
        notes = [note.message for note in output.of(ProgramNote)][-1:]
        wrong = len(output.of(WrongResult))
        row = (str(output.part), shown("".join(texts)), str(wrong), shown("".join(notes)))
        table.add_row(*map(Text, row), style="red" if wrong else "")
    return table
