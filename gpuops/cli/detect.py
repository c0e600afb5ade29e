"""``gpuops detect``: find what slows or stops a job, in what it recorded."""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from gpuops.cli.detect_trace import replay_traces, traces_in
from gpuops.cli.lazy_group import LazyGroup
from gpuops.cli.options import json_option
from gpuops.convert.flight_recorder import BYTES_MAX, KEPT_ENDING, read_dump, read_dumps
from gpuops.detect.recorder_dump import RANKS_MAX, RankDump, parse_dump
from gpuops.detect.slow_rank import (
    GROUP_MIN,
    NOISY_STEPS_MIN,
    STEPS_MIN,
    SlowRank,
    SlowRankDetector,
)
from gpuops.detect.step_table import OwnTimes, TableWorker, own_times, share_saved
from gpuops.detect.wait_graph import CollectiveHang, HangKind, diagnose, ranks_text
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, UsageError
from gpuops.host.records import to_json
from gpuops.log import printable
from gpuops.model import envelope

_EXIT_CODES = {HangKind.NOTHING: EXIT_OK, HangKind.ALL_IN: EXIT_UNKNOWN}
# torch ends the names of its dumps with the rank; an ending may follow.
_RANK = re.compile(r"([0-9]{1,7})(?:\.[A-Za-z]+)?\Z")


_LAZY = {
    "show": ("gpuops.cli.detect_show:show", "Show a run's step time, and what was detected when."),
}


@click.group(cls=LazyGroup, lazy=_LAZY, epilog="Example: gpuops detect replay flight_recorder/")
def detect() -> None:
    """Find what slows or stops a job, in what it recorded."""


@detect.command(epilog="Example: gpuops detect replay flight_recorder_rank_*")
@click.argument(
    "paths", metavar="FILE|DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--ranks",
    type=click.IntRange(1, RANKS_MAX),
    help="How many the job has; default: as many as the dumps name.",
)
@json_option
def replay(paths: Sequence[Path], *, ranks: int | None, as_json: bool) -> int:
    """Say whom a hung job waits for by dumps of torch's flight recorder, or who is slow by steps.

    Dumps, one file a rank, are pickles or JSON of any job, also one that ran without gpuops; their
    names end with the rank. A pickle is read as data: it cannot run anything. A file that `gpuops
    run` kept of a hang has those of a node. A rank that left no dump is named as such. A table (one
    file.csv) has the columns of StragglerAnalysis: dp_rank, stage, step, optype, duration. A trace
    is what `gpuops run --record-steps` wrote: the folder of the run, or its steps-*.jsonl.gz.

    Exit codes: 0 no collective is pending, or nobody is slow; 1 it names ranks; 3 it cannot be
    judged; 64 a mistake on the command line.
    """
    if len(paths) == 1 and paths[0].suffix == ".csv":
        return _replay_table(paths[0], as_json=as_json)
    if traces := traces_in(paths):
        return replay_traces(traces, as_json=as_json)
    dumps, damaged = _read(*_by_rank(paths))
    hang = diagnose(dumps, ranks)
    # Of those without a dump nobody knows whether something is pending.
    is_judged = any(dump.calls for dump in dumps) and (
        hang.kind is not HangKind.NOTHING or not hang.without_dump
    )
    if as_json:
        body = {**to_json(hang), "judged": is_judged, "dumps": len(dumps), "damaged": damaged}
        click.echo(json.dumps(envelope("gpuops.detect-replay/1", body), indent=2))
    else:
        lines = _lines(hang, len(dumps), is_judged=is_judged)
        click.echo("\n".join(map(printable, lines)))
    return _EXIT_CODES.get(hang.kind, EXIT_FAIL) if is_judged else EXIT_UNKNOWN


def _replay_table(path: Path, *, as_json: bool) -> int:
    """Say which worker of the job in a table is slower than its peers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            own = own_times(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as exc:
        raise UsageError(f"cannot read the table {path}: {exc}") from exc
    workers = {worker for times in own.values() for worker in times}
    detector = SlowRankDetector({worker: worker.stage for worker in workers})
    first: dict[TableWorker, tuple[int, SlowRank[TableWorker]]] = {}
    for step, times in own.items():
        for item in detector.feed(times):
            first.setdefault(item.rank, (step, item))
    apart = sorted({worker.stage for worker in workers if not detector.is_compared(worker)})
    is_judged = bool(workers) and not apart
    if as_json:
        found = [_slow_json(own, *named) for named in first.values()]
        body = {"steps": len(own), "workers": len(workers), "not_compared": apart, "slow": found}
        click.echo(json.dumps(envelope("gpuops.detect-slow/1", body), indent=2))
    else:
        lines = [_slow_line(own, *named) for named in first.values()]
        about = f"{len(own)} steps of {len(workers)} workers"
        if not is_judged:
            lines.append(_not_compared(apart, about))
        elif not first:
            lines.append(f"nobody is slower than those that do the same work ({about})")
        click.echo("\n".join(lines))
    return EXIT_FAIL if first else EXIT_OK if is_judged else EXIT_UNKNOWN


def _not_compared(stages: Sequence[int], about: str) -> str:
    which = f"stage {ranks_text(stages)}" if stages else "no worker"
    return (
        f"{which} cannot be judged: {GROUP_MIN} workers of a stage and {STEPS_MIN} steps in which"
        f" they computed are needed, {NOISY_STEPS_MIN} where steps differ much (there are {about})"
    )


def _slow_json(own: OwnTimes, step: int, item: SlowRank[TableWorker]) -> dict[str, object]:
    return {
        "stage": item.rank.stage,
        "dp_rank": item.rank.dp_rank,
        "ratio": round(item.ratio, 4),
        "n_peers": item.n_peers,
        "since_step": list(own)[item.since - 1],
        "found_at_step": step,
        "share_saved": round(share_saved(own, item.rank), 4),
    }


def _slow_line(own: OwnTimes, step: int, item: SlowRank[TableWorker]) -> str:
    since, saved = list(own)[item.since - 1], share_saved(own, item.rank)
    return (
        f"slow: {item.rank} computes {item.ratio:.2f} times as long as its {item.n_peers} peers,"
        f" since step {since} or before (found at step {step}); if it were as fast as they, the"
        f" longest computation of a step would be {saved:.0%} shorter"
    )


def _by_rank(paths: Iterable[Path]) -> tuple[dict[int, Path], list[Path]]:
    """Return the files of *paths* that are of one rank, and those that an agent has kept."""
    found: dict[int, Path] = {}
    kept: list[Path] = []
    for path in paths:
        try:
            is_folder = path.is_dir()
            files = sorted(filter(Path.is_file, path.iterdir())) if is_folder else [path]
        except OSError as exc:
            raise UsageError(f"cannot list {path}: {exc.strerror}") from exc
        for file in files:
            named = _RANK.search(file.name)
            is_kept = file.name.endswith(KEPT_ENDING)
            if named is None and is_folder and not is_kept:
                continue
            if file.exists() and not file.is_file():
                raise UsageError(f"{file} is no regular file")
            if is_kept:
                kept.append(file)
                continue
            if named is None:
                raise UsageError(f"{file}: its name must end with the rank, as rank_3 or 3.json")
            rank = int(named[1])
            if rank in found:
                raise UsageError(f"{found[rank]} and {file} are both of rank {rank}")
            found[rank] = file
    if not found and not kept:
        raise UsageError(
            f"no file in {', '.join(map(str, paths))} has a name that ends with a rank"
        )
    return found, kept


def _read(files: Mapping[int, Path], kept: Iterable[Path]) -> tuple[list[RankDump], dict[str, str]]:
    """Return the dumps that can be read; what is wrong with others goes to standard error too."""
    dumps: dict[int, RankDump] = {}
    damaged = {}
    for rank, file in [*sorted(files.items()), *((None, file) for file in kept)]:
        try:
            with file.open("rb") as opened:
                data = opened.read(BYTES_MAX + 1)
            bodies = read_dumps(data) if rank is None else {rank: read_dump(data)}
            new = {of: parse_dump(body, of) for of, body in bodies.items()}
        except (OSError, ValueError) as exc:
            damaged[str(file)] = str(exc)
            click.echo(f"gpuops: {printable(f'{file} is no dump: {exc}')}", err=True)
            continue
        if twice := dumps.keys() & new.keys():
            raise UsageError(f"{file} has rank {ranks_text(sorted(twice))}, as another file has")
        dumps |= new
    return [dumps[rank] for rank in sorted(dumps)], damaged


def _lines(hang: CollectiveHang, n_dumps: int, *, is_judged: bool) -> Iterable[str]:
    named = f": rank {ranks_text(hang.ranks)}" if hang.ranks else ""
    kind = hang.kind.value.replace("_", " ") if is_judged else "cannot be judged"
    why = hang.why if is_judged or n_dumps else "no dump can be read"
    yield f"{kind}{named}: {why} ({n_dumps} dumps)"
    call = hang.pending
    if call is not None:
        kind = "send or receive" if call.is_p2p else "call"
        place = f" at {call.place}" if call.place else ""
        who = f"rank {ranks_text(hang.waiting)} waits in" if hang.waiting else "pending:"
        yield f"{who} {kind} {call.number} of group {call.group}: {call}{place}"
    if hang.without_dump:
        lost = ranks_text(hang.without_dump)
        yield f"rank {lost} left no dump that can be read: nothing is known of it"
