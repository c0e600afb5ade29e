"""A run gets its decision whatever fails on the way there."""

import threading
from dataclasses import replace

import pytest

from gpuops.agent.elastic.decider import decider
from gpuops.errors import EXIT_FAIL
from gpuops.incident.decide import decide
from gpuops.incident.decision import ClusterState, NodeReport, ReportKind, RestartPolicy, RunAction
from gpuops.model import FailureClass

pytestmark = pytest.mark.torch
CLUSTER = ClusterState(policy=RestartPolicy(), generation=3, members=("n0",), live=("n0",))
REPORT = NodeReport(kind=ReportKind.WORKERS_FAILED, node="n0", generation=3)


def breaks_on_reports(reports, *rest):
    if reports:
        raise IndexError("token=0123456789abcdef0123")
    return decide(reports, *rest)


def breaks(*_known):
    raise ZeroDivisionError


def test_our_table_alone_has_nothing_to_add():
    made, note = decider(None, {})([REPORT], CLUSTER, (), 7.0)

    assert made == decide([REPORT], CLUSTER, (), 7.0)
    assert note is None


def test_reports_that_our_table_fails_on_are_left_out_and_that_is_told():
    made, note = decider(None, {}, breaks_on_reports)([REPORT], CLUSTER, (), 7.0)

    assert made.action is RunAction.RESTART
    assert made.failure.is_counted
    assert "IndexError" in note
    assert "without the reports" in note
    assert "0123456789abcdef" not in note


def test_a_table_that_always_fails_ends_the_run_rather_than_leave_it_waiting():
    made, note = decider(None, {}, breaks)([REPORT], CLUSTER, (), 7.0)

    assert (made.action, made.exit_code, made.failure.generation) == (RunAction.FAIL, EXIT_FAIL, 3)
    assert "ZeroDivisionError" in note


def answered(ask, deadline_s=60.0):
    """Ask until there is an answer."""
    pause = threading.Event()
    for _ in range(round(deadline_s / 0.02)):
        if (found := ask()) is not None:
            return found
        pause.wait(0.02)
    raise AssertionError("no answer")


def test_a_site_that_cannot_be_asked_leaves_our_decision_and_that_is_said(caplog):
    asks = decider("there.is.no:module", {})

    made, note = answered(lambda: asks([REPORT], CLUSTER, (), 7.0))

    assert "there.is.no:module was ignored" in caplog.text
    assert made == decide([REPORT], CLUSTER, (), 7.0)
    assert "there.is.no:module" in note


def test_what_was_said_of_a_failed_check_is_not_said_of_a_later_failure():
    asks = decider("there.is.no:module", {})
    gate = replace(REPORT, kind=ReportKind.GATE_FAILED, failure_class=FailureClass.GPU_ROW_REMAP)

    first, _ = answered(lambda: asks([gate], CLUSTER, (), 7.0))
    later, _ = answered(lambda: asks([REPORT], CLUSTER, (), 7.0))

    assert (first.cause.kind, later.cause.kind) == (gate.kind, REPORT.kind)


def test_our_bug_on_the_way_to_the_site_leaves_our_decision():
    asks = decider("there.is.no:module", None)  # no environment: `overruled` raises

    made, note = answered(lambda: asks([REPORT], CLUSTER, (), 7.0))

    assert made == decide([REPORT], CLUSTER, (), 7.0)
    assert note is None or "not taken" in note
