"""Snapshots of an incident: each change is a new revision, and a closed one stays closed."""

import pytest
from support.exits import (
    NODE,
    PEER_CLOSED,
    RULES,
    RUN,
    S,
    finished,
    incident_of,
    killed,
    raised,
    terminated,
    worker,
)
from support.history import us

from gpuops.incident.incidents.cancelled import incident_from_cancel
from gpuops.incident.lifecycle import close, mitigate, with_action
from gpuops.model import ActionKind, FailureClass, IncidentState, Role, Side


def test_a_recovery_goes_through_restart_mitigated_and_closed():
    opened = incident_of(killed(0), terminated(1))
    restarted = with_action(opened, ActionKind.RESTART)
    again = mitigate(restarted, at_us=5, lost_s={"detect": 0.1, "restart": 2.0})
    done = close(again, at_us=9, lost_s={"redo": 4.0}, resolution="past the highest step")

    assert [item.rev for item in (opened, restarted, again, done)] == [1, 2, 3, 4]
    assert done.actions == (ActionKind.RESTART,)
    assert done.state is IncidentState.CLOSED
    assert dict(done.lost_s) == {"detect": 0.1, "restart": 2.0, "redo": 4.0}
    assert done.lost_seconds == pytest.approx(6.1)
    assert done.resolved_us == 5


def test_a_closed_incident_stays_as_it_is():
    done = close(incident_of(killed(0)), at_us=9, lost_s={}, resolution="budget spent")

    assert with_action(done, ActionKind.RESTART) is done
    assert mitigate(done, at_us=10, lost_s={"redo": 1.0}) is done
    assert close(done, at_us=10, lost_s={}, resolution="again") is done


def test_the_same_action_is_listed_once():
    once = with_action(incident_of(killed(0)), ActionKind.RESTART)

    assert with_action(once, ActionKind.RESTART) is once


def cancelled(*exits, signal="SIGINT", seen_s=None):
    return incident_from_cancel(
        signal,
        exits,
        run_id=RUN,
        attempt=0,
        node=NODE,
        rules=RULES,
        detected_us=us(101),
        detected_mono_ns=101 * S,
        signal_seen_mono_ns=None if seen_s is None else round(seen_s * S),
    )


@pytest.mark.parametrize(
    ("signal", "side"), [("SIGINT", Side.USER), ("SIGTERM", Side.SCHEDULER), ("SIGUSR1", None)]
)
def test_a_cancelled_run_is_closed_at_once_and_blames_nobody(signal, side):
    incident = cancelled(terminated(1), terminated(0), signal=signal)

    assert incident.failure_class is FailureClass.CANCELLED
    assert incident.state is IncidentState.CLOSED
    assert incident.side is (side or Side.SCHEDULER)
    assert incident.culprits == ()
    assert incident.id == incident_of(killed(0)).id
    assert [item.entity.id for item in incident.evidence[1:]] == ["0", "1"]
    assert all(item.role is Role.TEARDOWN for item in incident.evidence[1:])
    assert signal in incident.title


@pytest.mark.parametrize("failed", [killed(1), worker(1), raised(1, at_s=99.9)])
@pytest.mark.parametrize("seen_s", [None, 100.5])
def test_a_worker_that_had_failed_by_itself_before_a_cancellation_is_to_blame(failed, seen_s):
    incident = cancelled(failed, terminated(0), seen_s=seen_s)
    alone = incident_of(failed, terminated(0))

    assert (incident.failure_class, incident.culprits) == (alone.failure_class, alone.culprits)
    assert incident.title == alone.title
    assert incident.state is IncidentState.CLOSED
    assert incident.resolution.startswith("cancelled by SIGINT while ending or restarting")
    assert ActionKind.STOP in incident.actions
    assert incident.rev > 1


def test_what_failed_after_the_signal_came_is_no_teardown_and_not_to_blame():
    incident = cancelled(worker(1), terminated(0), seen_s=99.5)

    assert incident.failure_class is FailureClass.CANCELLED
    assert incident.culprits == ()
    assert [item.role for item in incident.evidence[1:]] == [Role.TEARDOWN, Role.SYMPTOM]
    assert "not ended by its agent" in incident.evidence[2].text


@pytest.mark.parametrize(
    "reached", [killed(1, signal="SIGINT"), raised(1, "KeyboardInterrupt: ", at_s=99.9)]
)
def test_a_signal_that_reached_workers_as_well_is_no_failure_of_theirs(reached):
    incident = cancelled(reached, killed(2, at_s=100.2, signal="SIGSEGV"), finished(0))

    assert incident.failure_class is FailureClass.CANCELLED
    roles = [item.role for item in incident.evidence[1:]]
    assert roles == [Role.NOISE, Role.CONFIRMATION, Role.SYMPTOM]
    assert "reached it as well" in incident.evidence[2].text


def test_losing_a_peer_while_a_run_is_cancelled_is_no_failure():
    incident = cancelled(raised(0, f"RuntimeError: {PEER_CLOSED}"), terminated(1))

    assert incident.failure_class is FailureClass.CANCELLED
