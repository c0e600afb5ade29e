"""Agents that did not come together leave an incident like any other failure."""

from gpuops.incident.incidents.rendezvous import incident_from_lost_store, incident_from_rendezvous
from gpuops.model import ActionKind, FailureClass, IncidentState


def incident(reason="1 of at least 2 nodes came within 600 s: n1"):
    return incident_from_rendezvous(reason, run_id="r", attempt=2, node="n1", at_us=7)


def test_it_is_closed_because_nothing_follows():
    made = incident()

    assert made.failure_class is FailureClass.RENDEZVOUS
    assert made.state is IncidentState.CLOSED
    assert (made.first_us, made.detected_us, made.resolved_us) == (7, 7, 7)
    assert made.attempt == 2


def test_it_says_who_waited_for_what_and_blames_nobody():
    made = incident()

    assert "n1: 1 of at least 2 nodes" in made.evidence[0].text
    assert made.culprits == ()


def test_a_secret_in_an_answer_is_not_recorded():
    made = incident("no answer from postgresql://app:hunter2@db/x")

    assert "hunter2" not in str(made)


def test_a_lost_board_asks_to_be_requeued():
    made = incident_from_lost_store("no answer for 60 s", run_id="r", attempt=3, node="n1", at_us=7)

    assert (made.failure_class, made.attempt) == (FailureClass.STORE_LOST, 3)
    assert made.actions == (ActionKind.REQUEUE,)
    assert made.state is IncidentState.CLOSED
    assert "n1: no answer for 60 s" in made.evidence[0].text
