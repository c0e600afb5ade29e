"""The cause follows from what is suspected and how sure that is, never from who spoke first."""

from dataclasses import replace
from itertools import permutations

import pytest

from gpuops.incident.decision import NodeReport, RankEnd, ReportKind
from gpuops.incident.suspicion import (
    RECENT_S,
    Suspicion,
    SuspicionLevel,
    explain,
    reports_of,
    suspect_report,
)
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Role, Side

END, SUSPECT, NOTE = SuspicionLevel.END, SuspicionLevel.SUSPECT, SuspicionLevel.NOTE
GPU, LINK = Entity(EntityKind.GPU, "GPU-1"), Entity(EntityKind.LINK, "leaf1:7")
RANK, NODE = Entity(EntityKind.RANK, "3"), Entity(EntityKind.NODE, "n1")
XID = Suspicion(
    entity=GPU,
    failure_class=FailureClass.GPU_FELL_OFF_BUS,
    confidence=Confidence.CONFIRMED,
    level=END,
    source="gpu",
    why="Xid 79",
    node="n1",
    side=Side.INFRA,
    kind=ReportKind.GPU_FAULT,
    since_ns=50,
)
HANG = replace(
    XID,
    entity=RANK,
    failure_class=FailureClass.HANG_NO_PROGRESS,
    confidence=Confidence.PROBABLE,
    why="no step",
    node=None,
    kind=ReportKind.HANG,
    since_ns=1,
)
STUCK = replace(
    HANG, failure_class=FailureClass.HANG_D_STATE, node="n1", confidence=Confidence.CONFIRMED
)
VERDICT = replace(
    XID, entity=NODE, failure_class=FailureClass.SITE_CHECK, kind=ReportKind.VERDICT, why="sums"
)
PROBABLE = replace(VERDICT, confidence=Confidence.PROBABLE, since_ns=0)
MILD = replace(XID, node=None, why="Xid 31", failure_class=FailureClass.GPU_ILLEGAL_ACCESS)


def reports(*suspicions):
    return reports_of(suspicions, here="n1", generation=2)


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        (XID, (HANG,)),
        (XID, (STUCK, HANG)),
        (XID, (PROBABLE, MILD, STUCK)),
        (VERDICT, (HANG, PROBABLE)),
        (MILD, (HANG,)),
        (replace(VERDICT, since_ns=10), (XID,)),
    ],
)
def test_in_every_order_the_same_is_the_cause(cause, others):
    found = {reports(*order)[0] for order in permutations((cause, *others))}

    (report,) = found
    assert (report.kind, report.failure_class) == (cause.kind, cause.failure_class)
    assert report.how.startswith(cause.why)
    assert (report.node, report.generation) == ("n1", 2)


def test_only_what_ends_the_generation_is_reported():
    assert reports(replace(XID, level=SUSPECT), replace(HANG, level=NOTE)) == ()


def test_each_node_has_its_report_and_the_cause_comes_first():
    there = replace(VERDICT, node="n7", entity=Entity(EntityKind.NODE, "n7"), why="slow")
    link = replace(there, node=None, entity=LINK, why="flaps")

    first, second = reports(HANG, link, there)

    assert (first.node, first.how, first.blames_node) == ("n7", "slow", True)
    assert first.culprits == (Entity(EntityKind.NODE, "n7"),)
    assert (second.node, second.how, second.blames_node) == ("n1", "flaps", False)
    assert second.culprits == (LINK,)


def test_what_is_alike_is_one_report():
    gpus = [replace(XID, entity=Entity(EntityKind.GPU, f"GPU-{n}"), since_ns=n) for n in range(5)]

    (report,) = reports(*reversed(gpus))

    assert report.how == "Xid 79; Xid 79; Xid 79; and 2 more"
    names = [culprit.id for culprit in report.culprits]
    assert names == ["GPU-0", "n1", "GPU-1", "GPU-2", "GPU-3", "GPU-4"]


def test_a_node_that_is_not_blamed_is_no_culprit():
    assert replace(HANG, entity=NODE).culprits == ()
    assert replace(HANG, also=(RANK, Entity(EntityKind.RANK, "4"))).culprits == (
        RANK,
        Entity(EntityKind.RANK, "4"),
    )
    assert suspect_report(replace(XID, level=SUSPECT), 4).culprits == (GPU, NODE)


FAILED = NodeReport(
    kind=ReportKind.WORKERS_FAILED,
    node="n1",
    generation=2,
    failure_class=FailureClass.ABORT,
    culprits=(RANK,),
)
NOW_NS = 100 * 10**9


@pytest.mark.parametrize("order", list(permutations((MILD, XID, replace(VERDICT, level=NOTE)))))
def test_the_gravest_explains_a_failure(order):
    report = explain(FAILED, order, NOW_NS)

    assert (report.failure_class, report.how) == (FailureClass.GPU_FELL_OFF_BUS, "Xid 79")
    assert (report.kind, report.confidence) == (ReportKind.WORKERS_FAILED, Confidence.PROBABLE)
    assert report.culprits == (GPU, NODE, RANK)
    assert report.blames_node


HUNG = replace(FAILED, kind=ReportKind.HANG, failure_class=FailureClass.HANG_NO_PROGRESS)


def test_a_note_explains_a_hang_of_unknown_cause_which_is_then_no_place_of_the_program():
    end = RankEnd(
        rank=1,
        local_rank=1,
        role=Role.ROOT,
        failure_class=FailureClass.HANG_NO_PROGRESS,
        side=Side.AMBIGUOUS,
        signature="hang at train.py in step",
    )
    report = explain(replace(HUNG, ends=(end,)), [replace(MILD, level=NOTE)], NOW_NS)

    assert (report.kind, report.failure_class) == (
        ReportKind.GPU_FAULT,
        FailureClass.GPU_ILLEGAL_ACCESS,
    )
    assert (report.culprits, report.blames_node) == ((GPU, RANK), False)
    assert [each.signature for each in report.ends] == [None]


def test_what_ends_a_generation_explains_more_than_a_note_on_the_node():
    assert explain(FAILED, [replace(VERDICT, level=NOTE), MILD], NOW_NS).how == "Xid 31"


@pytest.mark.parametrize(
    ("report", "suspicion"),
    [
        (FAILED, PROBABLE),
        (FAILED, STUCK),
        (FAILED, replace(XID, node="n7")),
        (FAILED, replace(XID, last_ns=NOW_NS - round(RECENT_S * 10**9) - 1)),
        (replace(FAILED, side=Side.USER), XID),
        (replace(FAILED, kind=ReportKind.STOPPED), XID),
        (replace(HUNG, failure_class=FailureClass.HANG_STOPPED), XID),
        (HUNG, PROBABLE),
    ],
)
def test_what_explains_nothing_changes_nothing(report, suspicion):
    assert explain(report, [suspicion], NOW_NS) == report
