"""What comes off the board is bounded field by field, and refused where it is something else."""

import json

import pytest
from support.decisions import decision, failure, rank_end, report

from gpuops.incident.decision import (
    CULPRITS_MAX,
    EXITS_MAX,
    REASON_CHARS_MAX,
    TEXT_CHARS_MAX,
    ClusterState,
    NodeReport,
    OnExhausted,
    PastFailure,
    RankEnd,
    RestartDecision,
    RestartPolicy,
)
from gpuops.incident.fields import NAME_CHARS_MAX
from gpuops.model import Entity, EntityKind

TERMS = RestartPolicy(
    nodes_min=2,
    nodes_max=8,
    node_unit=2,
    restarts_max=5,
    restarts_window_s=3600.0,
    on_exhausted=OnExhausted.REQUEUE,
    benign_exit_codes=frozenset({16, 17}),
)
CLUSTER = ClusterState(
    policy=TERMS,
    generation=3,
    members=("n1",),
    live=("n1", "n2"),
    excluded={"n3": "Xid 79"},
    suspected={"n2": "slow"},
)
PAST = failure(
    signature="KeyError at a.py:1",
    step=5,
    checkpoint_step=4,
    nodes=("n1",),
    gpu_uuids=("GPU-a",),
    log_path="/a",
    rule="restart",
    is_infrastructure=True,
    counted_total=2,
    highest_step=6,
    excluded_checkpoint=4,
    earlier_failures_s=(1.5, 2.0),
)
DECISION = decision(
    report(), exclude={"n1": "Xid"}, exclude_checkpoint=4, backoff_s=2.0, exit_code=85
)
VALUES = [rank_end(), report(), PAST, TERMS, CLUSTER, DECISION]


def kind(value):
    return type(value).__name__


@pytest.mark.parametrize("value", VALUES, ids=kind)
def test_it_survives_its_json_form(value):
    assert type(value).from_json(json.loads(json.dumps(value.to_json()))) == value


def test_a_report_without_bounds_is_cut():
    big = report(
        how="x" * 10_000,
        culprits=tuple(Entity(EntityKind.RANK, "9" * 1000) for _ in range(500)),
        ends=tuple(rank_end(i, summary="y" * 9000, signature="z" * 9000) for i in range(500)),
    )
    back = NodeReport.from_json(json.loads(json.dumps(big.to_json())))

    assert len(back.how) == TEXT_CHARS_MAX
    assert len(back.culprits) == CULPRITS_MAX
    assert len(back.culprits[0].id) == NAME_CHARS_MAX
    assert len(back.ends) == EXITS_MAX
    assert len(back.ends[0].summary) == TEXT_CHARS_MAX
    assert len(back.ends[0].signature) == NAME_CHARS_MAX
    assert len(json.dumps(back.to_json())) < 200_000


def test_a_decision_without_bounds_is_cut():
    data = DECISION.to_json() | {"reason": "x" * 10**6, "exclude": {"n": "y" * 10**6}}
    back = RestartDecision.from_json(data)

    assert len(back.reason) == REASON_CHARS_MAX
    assert len(back.exclude["n"]) == TEXT_CHARS_MAX


@pytest.mark.parametrize(
    ("cls", "good", "field", "bad"),
    [
        (RankEnd, rank_end(), "step", "57"),
        (RankEnd, rank_end(), "step", 10**30),
        (RankEnd, rank_end(), "step", True),
        (RankEnd, rank_end(), "rank", None),
        (RankEnd, rank_end(), "signature", ["x"]),
        (RankEnd, rank_end(), "failure_class", "no.such"),
        (NodeReport, report(), "node", ""),
        (NodeReport, report(), "node", 5),
        (NodeReport, report(), "kind", "nonsense"),
        (NodeReport, report(), "last_step", 1.5),
        (NodeReport, report(), "arrival", "first"),
        (PastFailure, PAST, "at_s", float("nan")),
        (PastFailure, PAST, "at_s", float("inf")),
        (PastFailure, PAST, "earlier_s", ["soon"]),
        (PastFailure, PAST, "nodes", "n1"),
        (PastFailure, PAST, "nodes", [{}]),
        (ClusterState, CLUSTER, "live", None),
        (ClusterState, CLUSTER, "excluded", ["n1"]),
        (RestartPolicy, TERMS, "nodes_min", "2"),
        (RestartDecision, DECISION, "backoff_s", "soon"),
        (RestartDecision, DECISION, "exclude", ["n1"]),
        (RestartDecision, DECISION, "rule", None),
        (RestartDecision, DECISION, "verdict", "maybe"),
    ],
)
def test_what_is_something_else_is_refused(cls, good, field, bad):
    with pytest.raises((KeyError, TypeError, ValueError)):
        cls.from_json(good.to_json() | {field: bad})
