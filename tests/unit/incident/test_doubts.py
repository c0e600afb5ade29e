"""Nodes that are doubted: a restart does without those that can be spared, and that is all."""

from dataclasses import replace

import pytest
from support.decisions import cluster, report, stopped

from gpuops.incident.decide import decide
from gpuops.incident.decision import OnExhausted, ReportKind, RestartPolicy, RunAction
from gpuops.model import FailureClass, Side


def wide(n, spares=0, **terms):
    """Return a cluster of *n* nodes that needs one, with *spares* more that wait."""
    names = [f"n{i}" for i in range(1, n + spares + 1)]
    on = cluster(*names[:n], terms=RestartPolicy(nodes_max=n, **terms))
    return replace(on, live=tuple(names))


def xid(node):
    return report(
        node,
        ReportKind.GPU_FAULT,
        failure_class=FailureClass.GPU_FELL_OFF_BUS,
        side=Side.INFRA,
        blames_node=True,
        how="Xid 79",
    )


def doubting(*nodes, on):
    return replace(on, suspected={node: f"detector sums: {node} is slow" for node in nodes})


@pytest.mark.parametrize(
    ("doubted", "on", "left_out"),
    [
        # A spare takes the seat; without one a run that is not to shrink keeps its nodes.
        (["n2"], wide(2, spares=1, on_exhausted=OnExhausted.REQUEUE), ["n2"]),
        (["n2"], wide(2, on_exhausted=OnExhausted.REQUEUE), []),
        # Without one the run shrinks, down to what it needs, first come first.
        (["n3", "n2"], wide(4), ["n2", "n3"]),
        (["n3", "n2"], wide(4, nodes_min=3), ["n3"]),
        (["n3"], wide(4, nodes_min=4), []),
        # No other node loses its seat for it.
        (["n3"], wide(4, node_unit=2), []),
        (["n3"], wide(4, spares=1, node_unit=2), ["n3"]),
        # A doubt of most nodes is one of whoever doubts; the only node stays.
        (["n1", "n2", "n3"], wide(4), []),
        (["n1"], wide(1), []),
        # Who has gone already is no candidate, and no reason for anything.
        (["n9"], wide(4), []),
        (["n2"], replace(wide(4), live=("n1", "n3", "n4")), []),
    ],
)
def test_a_restart_does_without_doubted_nodes_that_can_be_spared(doubted, on, left_out):
    decision = decide([report("n1")], doubting(*doubted, on=on), (), 100.0)

    assert (decision.action, decision.rule) == (RunAction.RESTART, "restart")
    assert sorted(decision.exclude) == left_out
    for node in left_out:
        assert decision.exclude[node] == f"suspected: detector sums: {node} is slow"
    names = ", ".join(left_out)
    assert decision.reason.endswith(
        f"; restart, and without the suspected {names}" if left_out else "; restart"
    )
    assert decision.failure.is_counted
    assert decision.failure.nodes == ("n1",)


def test_whom_evidence_speaks_against_goes_first_and_doubts_take_what_is_left():
    on = doubting("n3", on=wide(3, nodes_min=2))
    decision = decide([xid("n2"), stopped("n1"), stopped("n3")], on, (), 100.0)

    assert (decision.rule, list(decision.exclude)) == ("node.excluded", ["n2"])
    on = replace(on, live=("n1", "n2", "n3", "n4"))
    decision = decide([xid("n2"), stopped("n1"), stopped("n3")], on, (), 100.0)
    assert set(decision.exclude) == {"n2", "n3"}


def test_a_doubt_is_never_why_a_run_ends_or_what_a_restart_counts_for():
    on = doubting("n2", on=wide(2))
    taken = report("n1", ReportKind.START_FAILED, is_infrastructure=True, ends=())

    assert decide([taken], on, (), 100.0).exclude == {"n2": "suspected: detector sums: n2 is slow"}
    assert not decide([taken], on, (), 100.0).failure.is_counted
    spent = decide([report("n1")], doubting("n2", on=wide(2, restarts_max=0)), (), 100.0)
    assert (spent.action, spent.exclude) == (RunAction.FAIL, {})
