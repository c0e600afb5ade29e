"""The result of a sweep: its findings, its events, and as text and JSON."""

from collections.abc import Sequence

import click

from gpuops.burnin.matrix import matrix_lines
from gpuops.burnin.pairs import PairOutcome, PairTest
from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.text import findings_table
from gpuops.host.clock import Clock
from gpuops.hostlist import compress
from gpuops.log import printable
from gpuops.model import Entity, EntityKind, Event, Finding, Json, Status, UnknownReason
from gpuops.sweep.coordinator import SweepResult


def check_run_of(result: SweepResult, node: str, times_us: tuple[int, int]) -> CheckRun:
    """Return *result* as the check run of its coordinator *node*, from start to end."""
    findings = list(result.findings)
    left_out = {name: f"did not join: {why}" for name, why in result.missing.items()}
    left_out |= {name: f"kept out of the sweep: {why}" for name, why in result.unfit.items()}
    findings += [_not_swept(name, why) for name, why in left_out.items()]
    n_passed = sum(test.outcome is PairOutcome.PASS for test in result.tests)
    share = f"{100 * result.share_tested:.0f} % of all pairs were tested"
    findings.append(
        Finding(
            check="pair_tests",
            entity=Entity(EntityKind.NODE, node),
            status=Status.PASS if n_passed else Status.SKIP,
            value=float(n_passed),
            unit="pairs",
            message=f"{n_passed} of {len(result.tests)} pair tests passed; {share}",
        )
    )
    return CheckRun(
        suite="sweep",
        node=node,
        start_us=times_us[0],
        end_us=times_us[1],
        findings=tuple(findings),
    )


def _not_swept(node: str, why: str) -> Finding:
    return Finding(
        check="sweep",
        entity=Entity(EntityKind.NODE, node),
        status=Status.UNKNOWN,
        message=why,
        unknown_reason=UnknownReason.NOT_SUPPORTED,
    )


def print_round(number: int, tests: Sequence[PairTest]) -> None:
    """Say on standard error that *number* rounds are over, and what came of *tests* so far."""
    bad = sum(test.outcome.is_bad for test in tests)
    click.echo(f"round {number}: {len(tests)} pair tests so far, {bad} bad", err=True)


def pair_events(tests: Sequence[PairTest], node: str, clock: Clock) -> list[Event]:
    """Return an event for each of *tests* that says something of its pair, written by *node*."""
    from gpuops.store.events import PAIR_TESTED, new_event

    return [
        new_event(PAIR_TESTED, node=node, clock=clock, payload=_test_json(test))
        for test in tests
        if test.outcome is not PairOutcome.UNKNOWN
    ]


def _test_json(test: PairTest) -> Json:
    return {
        "sweep": test.sweep,
        "round": test.round,
        "nodes": list(test.nodes),
        "rail": test.rail,
        "outcome": test.outcome.value,
        "value": test.value,
        "unit": test.unit,
        "parameters": "collective=all_reduce",
    }


def result_json(result: SweepResult, check_run: CheckRun) -> Json:
    """Return *result* and the findings in *check_run* for programs."""
    return {
        **check_run.to_json(),
        "sweep": result.sweep,
        "nodes": list(result.nodes),
        "missing": dict(result.missing),
        "unfit": dict(result.unfit),
        "share_tested": result.share_tested,
        "tests": [
            {**_test_json(test), "detail": result.details.get(test.nodes)} for test in result.tests
        ],
        "verdicts": [
            {
                "kind": verdict.kind.value,
                "entity": verdict.entity.to_json(),
                "status": verdict.status.word,
                "why": verdict.why,
            }
            for verdict in result.verdicts
        ],
    }


def result_text(result: SweepResult, check_run: CheckRun, *, width: int | None) -> str:
    """Return the bad pair tests in *result*, then the findings as a table of *width* columns."""
    lines = [f"sweep {result.sweep} of {len(result.nodes)} nodes: {compress(result.nodes)}", ""]
    lines += [*matrix_lines(result.tests), ""]
    for pair, why in sorted(result.details.items()):
        lines.append(f"{','.join(pair)}: {why}")
    table = findings_table(check_run, width=width)
    return "\n".join([*map(printable, lines), "", table])
