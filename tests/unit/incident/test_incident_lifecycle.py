"""Snapshots of an incident: each change is a new revision, and a closed one stays closed."""

import pytest
from support.exits import NODE, RUN, incident_of, killed, terminated

from gpuops.incident.cancelled import incident_from_cancel
from gpuops.incident.lifecycle import closed, mitigated, with_restart
from gpuops.model import ActionKind, FailureClass, IncidentState, Role, Side


def test_a_recovery_goes_through_restart_mitigated_and_closed():
    opened = incident_of(killed(0), terminated(1))
    restarted = with_restart(opened)
    again = mitigated(restarted, at_us=5, lost_s={"detect": 0.1, "restart": 2.0})
    done = closed(again, at_us=9, lost_s={"redo": 4.0}, resolution="past the highest step")

    assert [item.rev for item in (opened, restarted, again, done)] == [1, 2, 3, 4]
    assert done.actions == (ActionKind.RESTART,)
    assert done.state is IncidentState.CLOSED
    assert dict(done.lost_s) == {"detect": 0.1, "restart": 2.0, "redo": 4.0}
    assert done.lost_seconds == pytest.approx(6.1)
    assert done.resolved_us == 5


def test_a_closed_incident_stays_as_it_is():
    done = closed(incident_of(killed(0)), at_us=9, lost_s={}, resolution="budget spent")

    assert with_restart(done) is done
    assert mitigated(done, at_us=10, lost_s={"redo": 1.0}) is done
    assert closed(done, at_us=10, lost_s={}, resolution="again") is done


def test_the_same_action_is_listed_once():
    once = with_restart(incident_of(killed(0)))

    assert with_restart(once) is once


@pytest.mark.parametrize(
    ("signal", "side"), [("SIGINT", Side.USER), ("SIGTERM", Side.SCHEDULER), ("SIGUSR1", None)]
)
def test_a_cancelled_run_is_closed_at_once_and_blames_nobody(signal, side):
    incident = incident_from_cancel(
        signal,
        [terminated(1), terminated(0)],
        run_id=RUN,
        attempt=0,
        node=NODE,
        detected_us=7,
    )

    assert incident.failure_class is FailureClass.CANCELLED
    assert incident.state is IncidentState.CLOSED
    assert incident.side is (side or Side.SCHEDULER)
    assert incident.culprits == ()
    assert incident.id == incident_of(killed(0)).id
    assert [item.entity.id for item in incident.evidence[1:]] == ["0", "1"]
    assert all(item.role is Role.TEARDOWN for item in incident.evidence[1:])
    assert signal in incident.title
