"""Ranks that differ where they must be equal: one incident, in the record and for the user."""

import pytest

from gpuops.agent.checkpoint.keeper_events import read_events
from gpuops.agent.checkpoint.record import CheckpointRecord
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.monitors.progress import StepTracker
from gpuops.host.clock import FakeClock
from gpuops.model import Severity

TOLD = {
    "kind": "replicas_differ",
    "state": [1, 12],
    "ranks": "0-2",
    "suspects": [1],
    "is_here": True,
    "outcome": "minority",
    "tensors": ["model.0.weight"],
    "n_tensors": 1,
    "alike": [1, 11],
    "why": "rank 1 differs from ranks 0, 2 in model.0.weight at step 12 (equal at step 11)",
}
AGAIN = {
    "kind": "replicas_alike",
    "state": [2, 20],
    "ranks": "0-2",
    "why": "ranks 0-2 are equal again",
}


class Desk:
    """A record; what it recorded and said."""

    def __init__(self):
        self.clock = FakeClock()
        self.events, self.said = [], []
        chronicle = RunJournal(self.emit, self.clock, run_id="run-1", node="n1", rules=())
        self.record = CheckpointRecord(
            chronicle, StepTracker(), self.clock, self.said.append, n_ranks=3
        )

    def emit(self, *news):
        self.events += [(item.kind, item.payload, item.severity) for item in news]

    def hear(self, *told):
        self.record.record_events(read_events(told))

    def incidents(self):
        return [payload for kind, payload, _ in self.events if kind == "incident.recorded"]


@pytest.fixture
def desk():
    return Desk()


def test_the_incident_names_rank_node_tensor_and_step_and_which_checkpoints_are_suspect(desk):
    desk.hear(TOLD)
    (incident,) = desk.incidents()

    assert incident["failure_class"] == "numerics.replicas_differ"
    assert incident["title"] == TOLD["why"]
    assert incident["culprits"] == [{"kind": "rank", "id": "1"}, {"kind": "node", "id": "n1"}]
    assert (incident["side"], incident["confidence"]) == ("ambiguous", "probable")
    assert (incident["state"], incident["actions"]) == ("open", [])
    words = (
        "checkpoints from step 12 on are affected: the copies of rank 1 are suspect; "
        "that of step 11 was equal on all of them"
    )
    assert [e["text"] for e in incident["evidence"]] == [TOLD["why"], words]
    (said,) = desk.said
    assert said.startswith("replicas of the training state differ: rank 1 differs")
    assert said.endswith("gpuops runbook numerics.replicas_differ")
    assert [s for kind, _, s in desk.events if kind == "checkpoint.replicas_differ"] == [
        Severity.ERROR
    ]


def test_of_two_both_are_named_and_neither_is_blamed(desk):
    desk.hear({**TOLD, "suspects": [0, 1], "outcome": "tie", "ranks": "0-1"})
    (incident,) = desk.incidents()

    assert [c["id"] for c in incident["culprits"]] == ["0", "1", "n1"]
    assert (incident["confidence"], incident["culprit_how"]) == (
        "unknown",
        "one of them may be wrong",
    )


def test_ranks_of_several_nodes_do_not_blame_the_node_that_tells(desk):
    desk.hear({**TOLD, "suspects": [1, 9], "is_here": False})

    assert [c["kind"] for c in desk.incidents()[0]["culprits"]] == ["rank", "rank"]


def test_a_majority_blames_the_nodes_of_all_that_it_outvotes_and_a_tie_none(desk):
    places = {"suspects": [1, 9], "nodes": ["n1", "n4"], "is_here": False}
    desk.hear({**TOLD, **places}, {**TOLD, **places, "outcome": "tie", "state": [1, 13]})
    outvoted, tie = desk.incidents()

    assert [c["id"] for c in outvoted["culprits"]] == ["1", "9", "n1", "n4"]
    assert [c["id"] for c in tie["culprits"]] == ["1", "9"]
    assert [(e["text"], e["entity"]["id"]) for e in tie["evidence"][1:3]] == [
        ("rank 1 is on n1", "n1"),
        ("rank 9 is on n4", "n4"),
    ]


def test_a_tie_within_one_node_blames_that_node(desk):
    desk.hear({**TOLD, "suspects": [0, 1], "nodes": ["n4", "n4"], "outcome": "tie"})

    assert [c["id"] for c in desk.incidents()[0]["culprits"]] == ["0", "1", "n4"]


def test_the_incident_is_closed_when_they_are_equal_again(desk):
    desk.hear(TOLD, AGAIN, AGAIN)
    opened, closed = desk.incidents()

    assert opened["id"] == closed["id"]
    assert (closed["state"], closed["rev"]) == ("closed", 2)
    assert closed["resolution"] == "ranks 0-2 are equal again at step 20"


def test_a_program_that_trains_its_ranks_apart_is_told_and_is_no_incident(desk):
    desk.hear({"kind": "replicas_apart", "state": [1, 1], "why": "ranks 0-1 have values of…"})

    assert desk.incidents() == []
    assert desk.said == ["ranks 0-1 have values of…"]


@pytest.mark.parametrize(
    "nonsense",
    [{"state": None}, {"why": 7}, {"ranks": None}, {"state": [1]}],
    ids=["state", "why", "ranks", "pair"],
)
def test_what_is_not_of_its_form_is_no_incident(desk, nonsense):
    desk.hear({**TOLD, **nonsense})

    assert desk.incidents() == []


def test_suspects_and_tensors_of_any_type_are_bounded(desk):
    odd = ["x" * 10_000, None, {}, *range(100)]
    desk.hear({**TOLD, "suspects": odd, "tensors": odd, "nodes": odd})

    assert len(desk.incidents()[0]["culprits"]) <= 9
