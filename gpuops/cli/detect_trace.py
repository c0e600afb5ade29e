"""Who was slow in a run, by what ``--record-steps`` wrote; for ``gpuops detect replay``."""

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import click

from gpuops.agent.monitors.straggler.fleet import SETTLE_S, StragglerFleetMonitor, is_readable
from gpuops.detect.step_trace import Published, StepTrace
from gpuops.detect.wait_graph import ranks_text
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, UsageError
from gpuops.incident.suspicion import Suspicion
from gpuops.log import printable
from gpuops.model import Json, envelope
from gpuops.report.render.layout import date_time
from gpuops.units import US_PER_S, iso_utc

_ENDING = ".jsonl.gz"
_LINE_BYTES_MAX = 2**16
Found = tuple[int, int, Suspicion]  # generation, time, what was found


def traces_in(paths: Sequence[Path]) -> list[Path]:
    """Return the traces among *paths*, and in those that are folders."""
    folders = [path for path in paths if path.is_dir()]
    found = [path for path in paths if path.name.endswith(_ENDING)]
    return found + sorted(file for folder in folders for file in folder.rglob(f"steps-*{_ENDING}"))


def replay_traces(files: Sequence[Path], *, as_json: bool) -> int:
    """Say which ranks the run in *files* found slow, as its leader judged."""
    trace = StepTrace()
    for file in files:
        try:
            with gzip.open(file) as opened:
                trace.read(_lines_of(opened, file))
        except (OSError, ValueError, zlib.error) as exc:
            raise UsageError(f"cannot read the trace {file}: {exc}") from exc
    notes: list[str] = []
    found, compared = _judge(trace, notes)
    apart = sorted(trace.ranks - compared)
    if as_json:
        slow = [_found_json(*item) for item in found]
        body: Json = {"steps": trace.n_steps, "ranks": len(trace.ranks), "not_compared": apart}
        body |= {"slow": slow, "notes": notes}
        click.echo(json.dumps(envelope("gpuops.detect-trace/1", body), indent=2))
    else:
        click.echo("\n".join(map(printable, (*notes, *_lines(found, apart, trace)))))
    return EXIT_FAIL if found else EXIT_UNKNOWN if apart or not trace.ranks else EXIT_OK


def _lines_of(opened: gzip.GzipFile, file: Path) -> Iterable[str]:
    try:
        while line := opened.readline(_LINE_BYTES_MAX):
            yield line.decode()
    except EOFError:
        click.echo(f"gpuops: {printable(f'the end of {file} is cut off')}", err=True)


def _judge(trace: StepTrace, notes: list[str]) -> tuple[list[Found], set[int]]:
    """Return what a leader finds in *trace*, each once, and the ranks that it could compare.

    What it says besides is added to *notes*.
    """
    monitor = StragglerFleetMonitor(trace.slow_after_s, notes.append)
    found: dict[object, Found] = {}
    compared: set[int] = set()
    ordered = sorted(trace.published, key=lambda item: item[:3])
    if foreign := next((item for item in ordered if not is_readable(item.body)), None):
        raise UsageError(
            f"what was published in the trace cannot be judged: {str(foreign.body)[:200]!r}"
        )
    try:
        for generation, items in groupby(ordered, key=lambda item: item.generation):
            for at_us, published in _moments(items):
                for each in monitor.judge(published, at_us / US_PER_S):
                    key = generation, each.entity, each.failure_class, each.level
                    found.setdefault(key, (generation, at_us, each))
                compared |= monitor.compared()
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UsageError(f"what was published in the trace cannot be judged: {exc!r}") from exc
    return list(found.values()), compared


def _moments(items: Iterable[Published]) -> Iterable[tuple[int, Json]]:
    """Return when something was published, and what all nodes had published then."""
    newest: Json = {}
    at_us = 0
    for item in items:
        at_us = item.time_us
        if newest:
            yield at_us, newest  # by now it may have settled
        newest = {**newest, item.node: item.body}
        yield at_us, newest
    yield at_us + round(SETTLE_S * US_PER_S), newest


def _found_json(generation: int, at_us: int, item: Suspicion) -> Json:
    return {
        "generation": generation,
        "found": iso_utc(at_us),
        "rank": item.entity.id,
        "node": item.node,
        "failure_class": item.failure_class.value,
        "level": item.level.value,
        "ratio": item.value,
        "why": item.why,
    }


def _lines(found: Sequence[Found], apart: Sequence[int], trace: StepTrace) -> Iterable[str]:
    for generation, at_us, item in found:
        where = "" if item.node is None else f" on {item.node}"
        yield (
            f"{date_time(at_us)}, generation {generation}: {item.level.value}"
            f" {item.entity.kind.value} {item.entity.id}{where}: {item.failure_class.value}:"
            f" {item.why}"
        )
    about = f"{trace.n_steps} steps of {len(trace.ranks)} ranks"
    if apart or not trace.ranks:
        which = f"rank {ranks_text(apart)}" if apart else "nobody"
        yield (
            f"{which} cannot be judged: there are no own times of it, or too few, or of no two"
            f" others that do the same ({about})"
        )
    elif not found:
        yield f"nobody is slower than those that do the same work ({about})"
