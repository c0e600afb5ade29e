"""``gpuops sweep show`` and ``gpuops sweep history``: sweeps out of the store."""

import json
from collections.abc import Iterable, Iterator

import click

from gpuops.burnin.history import POWER, SOURCE, SWEEPS_MAX, PairHistory, history_findings
from gpuops.burnin.pairs import NodePair, PairOutcome, PairTest
from gpuops.cli.history import open_history, print_notes
from gpuops.cli.options import (
    json_option,
    parse_since,
    settings_of,
    since_option,
    store_option,
)
from gpuops.cli.sweep_result import print_sweep, stored_body
from gpuops.config.resolve import Settings
from gpuops.errors import StoreError, UsageError
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import Finding, Json, envelope
from gpuops.report.render.layout import count_noun, date_time
from gpuops.store.engine import open_store
from gpuops.store.queries.burnin_queries import (
    PairTestRow,
    SweepRow,
    last_repairs,
    pair_tests_since,
    sweep_tests,
    sweeps,
    tested_pairs,
)
from gpuops.units import iso_utc

HISTORY_SINCE = "90d"
_KNOWN_PAIRS_S = 10.0


@click.command(epilog="Example: gpuops sweep show last")
@click.argument("sweep_id", metavar="[ID|last]", default="last")
@store_option
@json_option
@click.pass_context
def show(ctx: click.Context, sweep_id: str, store: str | None, *, as_json: bool) -> None:
    """Show a sweep that was recorded: its matrix, what it names, and by which figures.

    Exit codes: 0 shown, whatever it found; 64 no such sweep; 75 the store cannot serve now.
    """
    cluster = settings_of(ctx).cluster
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            found = sweeps(connection, cluster, None if sweep_id == "last" else sweep_id)
            if not found:
                raise UsageError(_no_sweep(sweep_id, sweeps(connection, cluster)))
            body, check_run = stored_body(found[0].payload)
            rows = sweep_tests(connection, cluster, body["sweep"], found[0].uid)
        print_sweep(body, check_run, list(_pair_tests(rows)), as_json=as_json)
        if len(rows) < body["n_tests"]:
            click.echo(
                f"gpuops: the store has {len(rows)} of its {body['n_tests']} tests", err=True
            )
        if found[0].uid:
            click.echo(f"gpuops: user {found[0].uid} made this sweep, not root", err=True)
        print_notes(opened)


def _no_sweep(sweep_id: str, known: Iterable[SweepRow]) -> str:
    newest = ", ".join(f"{row.payload.get('sweep')} ({date_time(row.t_us)})" for row in known)
    if not newest:
        return "the store holds no sweep with a test yet; `gpuops sweep` makes one"
    return f"the store knows no sweep {sweep_id!r}; the newest are {newest}"


def _pair_tests(rows: Iterable[PairTestRow]) -> Iterator[PairTest]:
    for row in rows:
        yield PairTest(
            nodes=(row.node_a, row.node_b),
            outcome=PairOutcome(row.outcome),
            round=row.round,
            value=row.value,
            unit=row.unit or "",
            sweep=row.sweep_id,
            t_us=row.t_us,
        )


def known_pairs(settings: Settings, since_us: int | None = None) -> frozenset[NodePair]:
    """Return the pairs that sweeps since *since_us* tested (None: 90 days), in 10 s at most.

    None, and a line on standard error, if the store cannot be read: what sweeps are for goes on.
    """
    since_us = parse_since(HISTORY_SINCE) if since_us is None else since_us
    try:
        with (
            open_store(
                settings.store_url, mode="read", root=settings.root, deadline_s=_KNOWN_PAIRS_S
            ) as store,
            store.begin() as connection,
        ):
            return tested_pairs(connection, settings.cluster, since_us, current_uid())
    except (StoreError, UsageError) as exc:
        why = f"this sweep does not know which pairs earlier ones tested: {exc}"
        click.echo(f"gpuops: {printable(why)}", err=True)
        return frozenset()


@click.command(epilog="Example: gpuops sweep history --since 28d")
@since_option(HISTORY_SINCE)
@store_option
@json_option
@click.pass_context
def history(ctx: click.Context, since_us: int | None, store: str | None, *, as_json: bool) -> None:
    """Name the nodes and links that fail more often than the fleet over many sweeps.

    A node that fails now and then passes most sweeps. Root's sweeps count, and your own; those of a
    node before its last `gpuops repair` do not. This warns and drains nothing: the exit code is 0
    whoever is named.
    """
    since_us = parse_since(HISTORY_SINCE) if since_us is None else since_us
    cluster = settings_of(ctx).cluster
    with open_history(ctx, store, None) as opened:
        with opened.begin() as connection:
            rows = pair_tests_since(connection, cluster, since_us, current_uid())
            kept = PairHistory(_pair_tests(rows), last_repairs(connection, cluster))
        findings = history_findings(kept.offenders())
        if as_json:
            body = _history_json(kept, findings, since_us, opened.notes)
            click.echo(json.dumps(envelope("gpuops.sweep-history/1", body), indent=2))
            return
        click.echo("\n".join(map(printable, _history_lines(kept, findings, since_us))))
        print_notes(opened)


def _history_json(
    kept: PairHistory, findings: Iterable[Finding], since_us: int, notes: Iterable[str]
) -> Json:
    return {
        "since": iso_utc(since_us),
        "sweeps": kept.n_sweeps,
        "tests": len(kept.trials),
        "failed": sum(kept.trials.values()),
        "findings": [finding.to_json() for finding in findings],
        "power": [
            {"rate": item.rate, "found": item.found, "sweeps": item.sweeps} for item in kept.power()
        ],
        "notes": list(notes),
    }


def _history_lines(kept: PairHistory, findings: Iterable[Finding], since_us: int) -> Iterator[str]:
    n_failed = sum(kept.trials.values())
    yield (
        f"{count_noun(kept.n_sweeps, 'sweep')} since {date_time(since_us)}: {n_failed} of"
        f" {len(kept.trials)} tests of pairs failed"
    )
    named = [f"{item.status.word}  {item.entity}: {item.message}" for item in findings]
    yield from named or ["no node or pair fails more often than the others"]
    for item in kept.power():
        enough = f"after {item.sweeps} sweeps" if item.sweeps else f"not in {SWEEPS_MAX} sweeps"
        yield (
            f"a node that fails {100 * item.rate:g} % of its tests is found by these sweeps with a"
            f" probability of {100 * item.found:.0f} %; with one of {100 * POWER:g} % {enough}"
        )
    yield f"source: {SOURCE}"
