"""``gpuops ckpt verify`` and ``prune``: check that states are intact, and remove old ones."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gpuops.checkpoint.storage.api import CheckpointStore, DamagedState, StoredState
from gpuops.checkpoint.storage.inspection import FileProblem, FileProblemKind, verify_state
from gpuops.checkpoint.storage.persist import (
    DEFAULT_BUCKETS,
    RetentionBucket,
    RetentionDecision,
    RetentionPolicy,
    decide_retention,
)
from gpuops.checkpoint.types import CheckpointError, StateId
from gpuops.cli.ckpt.address import (
    address_option,
    find_damaged,
    find_state,
    missing_reason,
    needs_extra,
    open_states,
)
from gpuops.cli.options import json_option
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, UsageError
from gpuops.log import printable
from gpuops.model import Json, envelope
from gpuops.units import format_bytes, parse_seconds


@contextmanager
def bytes_progress(*, quiet: bool) -> Iterator[Progress]:
    """Yield a bar of bytes on standard error; it is hidden in a pipe or if *quiet*."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield progress


def verify_with_progress(
    store: CheckpointStore, stored: StoredState, progress: Progress
) -> list[FileProblem]:
    """Return the problems of one state, and show the progress; the store keeps what was found."""
    task = progress.add_task(str(stored.state), total=stored.manifest.nbytes)
    try:
        problems = verify_state(
            store, stored.state, progress=lambda done, _all: progress.update(task, completed=done)
        )
    finally:
        progress.remove_task(task)
    with suppress(CheckpointError):  # it may not be writable here
        _record_result(store, stored, problems)
    return problems


def _record_result(
    store: CheckpointStore, stored: StoredState, problems: Sequence[FileProblem]
) -> None:
    for record in stored.manifest.shards:
        if any(problem.file.startswith(record.shard.file_name) for problem in problems):
            store.mark_damaged(record, stored.state)
        elif stored.is_damaged:
            store.read_back(record, stored.state)


@click.command(epilog="Example: gpuops ckpt verify newest --dir /scratch/ck1")
@click.argument("states", nargs=-1, metavar="[STATE]...")
@address_option
@click.option("--all", "all_states", is_flag=True, help="Verify all states.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    states: tuple[str, ...],
    address: str | None,
    *,
    all_states: bool,
    as_json: bool,
) -> int:
    """Read each STATE (default: the newest) and check that every bit is what was saved.

    STATE is a step, a name as `gpuops ckpt ls` shows it, or `newest`.

    Exit 0: all are intact; 1: at least one is not; 3: at least one could not be read.
    """
    if all_states and states:
        raise UsageError("--all and STATE exclude each other")
    with needs_extra("gpuops ckpt verify"), open_states(ctx, address) as store:
        try:
            body = _verify_states(store, states, all_states=all_states, as_json=as_json)
        except UsageError:
            raise
        except CheckpointError as exc:
            click.echo(f"gpuops: {printable(str(exc))}", err=True)
            return EXIT_UNKNOWN
    if as_json:
        click.echo(json.dumps(envelope("gpuops.checkpoint-verify/1", body), indent=2))
    else:
        _print_verified(body)
    return _exit_code(body["checkpoints"])


def _verify_states(
    store: CheckpointStore, names: Sequence[str], *, all_states: bool, as_json: bool
) -> Json:
    survey = store.scan()
    chosen: list[StoredState] = []
    damaged: list[DamagedState] = []
    if all_states:
        chosen, damaged = list(survey.states), list(survey.damaged)
    for text in () if all_states else names or ["newest"]:
        # A damaged state that matches is reported.
        bad = find_damaged(survey, text)
        damaged += bad
        chosen += [] if bad else [find_state(store, text)]
    found = [_result(item.name, None, [_damage_problem(item)]) for item in damaged]
    with bytes_progress(quiet=as_json) as progress:
        for stored in chosen:
            problems = verify_with_progress(store, stored, progress)
            found.append(_result(stored.state.name, stored, problems))
    return {"address": store.address, "checkpoints": found}


def _damage_problem(item: DamagedState) -> FileProblem:
    kind = FileProblemKind.MANIFEST if item.is_corrupt else FileProblemKind.UNREADABLE
    return FileProblem(item.name, kind, item.why)


def _result(name: str, stored: StoredState | None, problems: Sequence[FileProblem]) -> Json:
    return {
        "name": name,
        "step": stored and stored.state.step,
        "epoch": stored and stored.state.epoch,
        "size_bytes": stored and stored.manifest.nbytes,
        "whole": not problems,
        "problems": [
            {
                "file": problem.file,
                "kind": problem.kind.value,
                "detail": problem.detail,
                "offsets": list(problem.offsets),
            }
            for problem in problems
        ],
    }


def _print_verified(body: Json) -> None:
    if not body["checkpoints"]:
        click.echo(printable(f"no states in {body['address']}"))
    for item in body["checkpoints"]:
        size = "" if item["size_bytes"] is None else f", {format_bytes(item['size_bytes'])}"
        click.echo(printable(f"{item['name']}: {_result_word(item)}{size}"))
        for problem in item["problems"]:
            click.echo(printable(f"  {problem['file']}: {problem['detail']}"))


def _result_word(item: Json) -> str:
    if item["whole"]:
        return "intact"
    kinds = {problem["kind"] for problem in item["problems"]}
    return "COULD NOT BE READ" if kinds == {FileProblemKind.UNREADABLE.value} else "DAMAGED"


def _exit_code(results: Sequence[Json]) -> int:
    kinds = {problem["kind"] for item in results for problem in item["problems"]}
    if kinds - {FileProblemKind.UNREADABLE.value}:
        return EXIT_FAIL
    return EXIT_UNKNOWN if kinds else EXIT_OK


@click.command(epilog="Example: gpuops ckpt prune --dir /scratch/ck1 --keep-last 3 --dry-run")
@address_option
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How many of the newest.",
)
@click.option(
    "--keep-every", type=click.IntRange(min=0), default=0, metavar="N", help="Steps that N divides."
)
@click.option(
    "--ladder",
    metavar="EVERY:AGE[,…]",
    help="One in EVERY up to AGE, as in 1h:24h,1d:7d (which `default` means).",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed, and why.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def prune(
    ctx: click.Context,
    address: str | None,
    keep_last: int,
    keep_every: int,
    ladder: str | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove the states that no rule keeps. The newest intact one, and pinned ones, always stay."""
    retention = RetentionPolicy(keep_last, keep_every, _parse_ladder(ladder))
    with needs_extra("gpuops ckpt prune"), open_states(ctx, address) as store:
        states = store.list_states()
        decisions = decide_retention(states, retention, [stored.state for stored in states])
        if not all(decision.is_kept for decision in decisions):
            with bytes_progress(quiet=as_json) as progress:
                states, intact = _find_newest_intact(store, states, progress)
            decisions = decide_retention(states, retention, intact)
        to_remove = [decision for decision in reversed(decisions) if not decision.is_kept]
        if not as_json:
            _print_decisions(decisions, states)
            _print_unjudged(store)
        if to_remove and not dry_run:
            _confirm(len(to_remove), yes=yes, as_json=as_json)
        removed = [] if dry_run else [_remove(store, decision) for decision in to_remove]
        leftovers = () if dry_run else store.sweep()
        if as_json:
            body = _prune_json(store, decisions, removed, leftovers, dry_run=dry_run)
            click.echo(json.dumps(envelope("gpuops.checkpoint-prune/1", body), indent=2))
        elif not dry_run:
            click.echo(f"{len(removed)} removed, {len(states) - len(removed)} kept")
    return EXIT_OK


def _find_newest_intact(
    store: CheckpointStore, states: Sequence[StoredState], progress: Progress
) -> tuple[tuple[StoredState, ...], set[StateId]]:
    """Return *states* with the damage found, and the newest intact one, if any."""
    found = []
    for n, stored in enumerate(states):
        is_damaged = bool(verify_with_progress(store, stored, progress))
        found.append(replace(stored, is_damaged=is_damaged))
        if not is_damaged:
            return (*found, *states[n + 1 :]), {stored.state}
    return tuple(found), set()


def _confirm(n_going: int, *, yes: bool, as_json: bool) -> None:
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise UsageError(f"{n_going} states would be removed: add --yes, or --dry-run")
    click.confirm(f"Remove {n_going} states?", abort=True)


def _remove(store: CheckpointStore, decision: RetentionDecision) -> RetentionDecision:
    store.delete(decision.state)
    return decision


def _print_decisions(decisions: Sequence[RetentionDecision], states: Sequence[StoredState]) -> None:
    sizes = {stored.state: stored.manifest.nbytes for stored in states}
    for decision in decisions:
        word = "keep  " if decision.is_kept else "remove"
        size = format_bytes(sizes[decision.state])
        click.echo(printable(f"{word}  {decision.state.name}  {size:>9}  {decision.why}"))


def _print_unjudged(store: CheckpointStore) -> None:
    """Print the unreadable states, which prune keeps, or that there are no states."""
    survey = store.scan()
    for item in survey.damaged:
        click.echo(printable(f"skipped {item.name}  {item.why}"))
    if not survey.states:
        click.echo(printable(f"no states in {store.address}{missing_reason(store)}"))


def _prune_json(
    store: CheckpointStore,
    decisions: Sequence[RetentionDecision],
    removed: Sequence[RetentionDecision],
    leftovers: Sequence[str],
    *,
    dry_run: bool,
) -> Json:
    gone = {decision.state for decision in removed}
    return {
        "address": store.address,
        "dry_run": dry_run,
        "checkpoints": [
            {
                "name": decision.state.name,
                "step": decision.state.step,
                "epoch": decision.state.epoch,
                "keep": decision.is_kept,
                "why": decision.why,
                "removed": decision.state in gone,
            }
            for decision in decisions
        ],
        "leftovers_removed": list(leftovers),
    }


def _parse_ladder(text: str | None) -> tuple[RetentionBucket, ...]:
    if text is None:
        return ()
    if text == "default":
        return DEFAULT_BUCKETS
    buckets = []
    for item in text.split(","):
        every, _, age = item.partition(":")
        try:
            buckets.append(RetentionBucket(round(parse_seconds(every)), round(parse_seconds(age))))
        except (ValueError, OverflowError) as exc:
            raise UsageError(f"--ladder {item!r}: {exc}; as in 1h:24h,1d:7d") from exc
    return tuple(buckets)
