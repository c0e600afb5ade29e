"""What a sweep names, as findings of the suite ``sweep``: for the table, the store, the gate."""

import statistics
from collections.abc import Iterable, Mapping

from gpuops.burnin.blame import BlameKind, BlameVerdict
from gpuops.burnin.pairs import PairOutcome, PairTest
from gpuops.burnin.speed import SpeedLimit
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason

CHECK = "sweep"
_BLAME_SOURCE = "gpuops: failed with two partners that passed elsewhere"


def sweep_findings(
    verdicts: Iterable[BlameVerdict],
    *,
    slow_node: FailureClass,
    limit: SpeedLimit | None = None,
    failed_node: FailureClass = FailureClass.NETWORK_NODE_FAILING,
) -> list[Finding]:
    """Return a finding for each of *verdicts*.

    *slow_node* is the class of a node all of whose bad tests were slow, *failed_node* that of a
    node with a test that failed or timed out. A pair is ``network.pair_slow`` or
    ``network.connection``. *limit*: the one that slow tests were held against. The fabric is a
    shared cause: nobody is drained for it.
    """
    return [_finding(verdict, limit, (slow_node, failed_node)) for verdict in verdicts]


def passed_findings(tests: Iterable[PairTest], named: Iterable[Finding]) -> list[Finding]:
    """Return a ``pass`` for each node that passed with another one, and is not among *named*."""
    passed: dict[str, int] = {}
    for test in tests:
        for node in test.nodes:
            passed[node] = passed.get(node, 0) + (test.outcome is PairOutcome.PASS)
    about = {found.entity.id for found in named}
    return [
        Finding(
            check=CHECK,
            entity=Entity(EntityKind.NODE, node),
            status=Status.PASS,
            value=float(n_passed),
            unit="pair tests",
            message=f"passed {n_passed} pair tests",
        )
        for node, n_passed in sorted(passed.items())
        if n_passed and node not in about
    ]


def untested_findings(nodes: Iterable[str], why: str) -> list[Finding]:
    """Return a ``skip`` for each of *nodes*, of which nothing was tested."""
    return [
        Finding(check=CHECK, entity=Entity(EntityKind.NODE, node), status=Status.SKIP, message=why)
        for node in nodes
    ]


def unmeasured_findings(
    tests: Iterable[PairTest], left: Mapping[str, int] | None = None
) -> list[Finding]:
    """Return an ``unknown`` finding for each node that left, or of which no test measured.

    *left*: in which round a node left, counted from 1. It is not blamed: perhaps gpuops ended.
    """
    texts = {node: f"it left the sweep in round {number}" for node, number in (left or {}).items()}
    measured: dict[str, bool] = {}
    for test in tests:
        for node in test.nodes:
            is_measured = test.outcome is not PairOutcome.UNKNOWN
            measured[node] = measured.get(node, False) or is_measured
    for node, was_measured in measured.items():
        if not was_measured:
            texts.setdefault(node, "no pair test of this node measured anything")
    return [
        Finding(
            check=CHECK,
            entity=Entity(EntityKind.NODE, node),
            status=Status.UNKNOWN,
            message=text,
            unknown_reason=UnknownReason.CRASH,
        )
        for node, text in sorted(texts.items())
    ]


def _finding(
    verdict: BlameVerdict, limit: SpeedLimit | None, of_node: tuple[FailureClass, FailureClass]
) -> Finding:
    rates = [
        test.value
        for test in verdict.evidence
        if test.outcome is PairOutcome.SLOW and test.value is not None
    ]
    is_slow = len(rates) == len(verdict.evidence)
    of_pair = (FailureClass.NETWORK_PAIR_SLOW, FailureClass.NETWORK_CONNECTION)
    slow, failed = of_node if verdict.kind is BlameKind.NODE else of_pair
    shown = limit if is_slow else None
    return Finding(
        check=CHECK,
        entity=verdict.entity,
        status=verdict.status,
        value=float(f"{statistics.median(rates):.4g}") if rates else None,
        unit=verdict.evidence[0].unit if rates else None,
        threshold=shown.text if shown else "passes with two partners",
        source=shown.source if shown else _BLAME_SOURCE,
        message=f"{'slow' if is_slow else 'failed'}: {verdict.why}",
        failure_class=slow if is_slow else failed,
        shared_cause=verdict.kind is BlameKind.FABRIC,
    )
