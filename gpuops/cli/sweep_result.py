"""The result of a sweep: its findings, its events, and as text and JSON."""

import json
from collections.abc import Sequence
from dataclasses import replace

import click

from gpuops.burnin.matrix import matrix_lines
from gpuops.burnin.pairs import PairOutcome, PairTest
from gpuops.burnin.sweep_findings import CHECK
from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.text import findings_table
from gpuops.cli.options import terminal_width
from gpuops.errors import GpuopsError
from gpuops.host.clock import Clock
from gpuops.hostlist import compress, expand
from gpuops.log import printable
from gpuops.model import (
    Entity,
    EntityKind,
    Event,
    Finding,
    Json,
    Status,
    UnknownReason,
    envelope,
)
from gpuops.sweep.coordinator import SweepResult
from gpuops.units import parse_iso_utc

_STORED_MAX = 256
_BY_NODE = ("missing", "unfit", "details")
_WORST_FIRST = ("findings", "verdicts")


def check_run_of(result: SweepResult, node: str, times_us: tuple[int, int]) -> CheckRun:
    """Return *result* as the check run of its coordinator *node*, from start to end."""
    findings = list(result.findings)
    left_out = {name: f"did not join: {why}" for name, why in result.missing.items()}
    left_out |= {name: f"not tested: {why}" for name, why in result.unfit.items()}
    findings += [_not_swept(name, why) for name, why in left_out.items()]
    if result.is_interrupted:
        text = f"interrupted: {len(result.tests)} tests of pairs were done, and nobody is judged"
        findings.append(_not_swept(node, text))
    n_passed = sum(test.outcome is PairOutcome.PASS for test in result.tests)
    share = f"{100 * result.share_tested:.3g} % of all pairs are tested, counting earlier sweeps"
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
        check=CHECK,
        entity=Entity(EntityKind.NODE, node),
        status=Status.UNKNOWN,
        message=why,
        unknown_reason=UnknownReason.NOT_SUPPORTED,
    )


def print_round(number: int, tests: Sequence[PairTest]) -> None:
    """Say on standard error that *number* rounds are over, and what came of *tests* so far."""
    bad = sum(test.outcome.is_bad for test in tests)
    click.echo(f"round {number}: {len(tests)} pair tests so far, {bad} bad", err=True)


def sweep_events(body: Json, tests: Sequence[PairTest], node: str, clock: Clock) -> list[Event]:
    """Return the event of a sweep and one for each test that says something of its pair.

    *node* writes them. *body*: `sweep_body`. An event's line is bounded: the last items of a list
    are kept, and those are the worst findings here.
    """
    from gpuops.store.events import PAIR_TESTED, SWEEP_ENDED, new_event

    few = {name: dict(list(body[name].items())[:_STORED_MAX]) for name in _BY_NODE}
    worst_last = {name: body[name][::-1] for name in _WORST_FIRST}
    ended: Json = {**body, **few, **worst_last, "nodes": compress(body["nodes"])}
    return [
        new_event(SWEEP_ENDED, node=node, clock=clock, payload=ended),
        *(
            replace(
                new_event(PAIR_TESTED, node=node, clock=clock, payload=_test_json(test)),
                t_us=test.t_us,
            )
            for test in tests
            if test.outcome is not PairOutcome.UNKNOWN
        ),
    ]


def stored_body(payload: Json) -> tuple[Json, CheckRun]:
    """Return the `sweep_body` that a ``sweep.ended`` holds, and its check run.

    Raises:
        GpuopsError: It holds none.
    """
    try:
        worst_first = {name: payload[name][::-1] for name in _WORST_FIRST}
        body: Json = {**payload, **worst_first, "nodes": list(expand(payload["nodes"]))}
        check_run = CheckRun(
            suite=body["suite"],
            node=body["node"],
            start_us=parse_iso_utc(body["start"]),
            end_us=parse_iso_utc(body["end"]),
            findings=tuple(map(Finding.from_json, body["findings"])),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise GpuopsError(
            f"the store's record of this sweep cannot be read, was it written by another version of"
            f" gpuops? ({type(exc).__name__}: {exc})"
        ) from exc
    return body, check_run


def _test_json(test: PairTest) -> Json:
    return {
        "sweep": test.sweep,
        "round": test.round,
        "nodes": list(test.nodes),
        "outcome": test.outcome.value,
        "value": test.value,
        "unit": test.unit,
        "parameters": "collective=all_reduce",
    }


def sweep_body(result: SweepResult, check_run: CheckRun) -> Json:
    """Return *result* without its tests, and the findings in *check_run*."""
    return {
        **check_run.to_json(),
        "sweep": result.sweep,
        "nodes": list(result.nodes),
        "missing": dict(result.missing),
        "unfit": dict(result.unfit),
        "share_tested": result.share_tested,
        "n_tests": sum(test.outcome is not PairOutcome.UNKNOWN for test in result.tests),
        "details": {",".join(pair): why for pair, why in sorted(result.details.items())},
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


def print_sweep(
    body: Json, check_run: CheckRun, tests: Sequence[PairTest], *, as_json: bool
) -> None:
    """Print a sweep as JSON, or as its matrix, what went wrong, and the table of its findings."""
    if as_json:
        by_round = sorted(tests, key=lambda test: (test.round, test.nodes))
        shown = {**body, "tests": list(map(_test_json, by_round))}
        click.echo(json.dumps(envelope("gpuops.sweep/1", shown), indent=2))
        return
    nodes = body["nodes"]
    lines = [f"sweep {body['sweep']} of {len(nodes)} nodes: {compress(nodes)}", ""]
    lines += [
        *matrix_lines(tests),
        "",
        *(f"{pair}: {why}" for pair, why in body["details"].items()),
    ]
    click.echo("\n".join([*map(printable, lines), ""]))
    # The table of a check does not name its node; here each finding may be of another one.
    findings = tuple(
        replace(item, message=f"{item.entity}: {item.message}")
        if item.check == CHECK and item.entity.kind is EntityKind.NODE
        else item
        for item in check_run.findings
    )
    click.echo(findings_table(replace(check_run, findings=findings), width=terminal_width()))
