"""Contracts that users script against: changing one of these is a breaking change."""

import pytest

from gpuops import errors
from gpuops.cli.main import COMMANDS
from gpuops.model import (
    ActionKind,
    Confidence,
    Entity,
    EntityKind,
    Event,
    Evidence,
    FailureClass,
    Finding,
    Incident,
    IncidentState,
    Role,
    Severity,
    Side,
    Status,
    UnknownReason,
    envelope,
    uuid7,
)

NODE = Entity(EntityKind.NODE, "n041")


def test_exit_codes_are_frozen():
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}

    assert codes == {
        "EXIT_OK": 0,
        "EXIT_FAIL": 1,
        "EXIT_UNKNOWN": 3,
        "EXIT_USAGE": 64,
        "EXIT_INTERNAL": 70,
        "EXIT_TRY_LATER": 75,
        "EXIT_REQUEUE": 85,
        "EXIT_NODE_UNHEALTHY": 86,
        "EXIT_DO_NOT_REQUEUE": 93,
    }


def test_every_error_ends_with_a_documented_exit_code():
    tree = [errors.GpuopsError, *_subclasses(errors.GpuopsError)]

    assert {cls.exit_code for cls in tree if cls is not errors.DrillError} <= {64, 70, 75}
    assert errors.DrillError.exit_code == 1


def _subclasses(cls):
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from _subclasses(child)


def test_the_commands_are_frozen():
    assert set(COMMANDS) == {
        "baseline",
        "burnin",
        "check",
        "ckpt",
        "config",
        "db",
        "demo",
        "detect",
        "drill",
        "facts",
        "incident",
        "node",
        "profile",
        "repair",
        "report",
        "run",
        "runbook",
        "slurm",
        "sweep",
    }


def test_statuses_are_ordered_and_unknown_lies_between_warn_and_fail():
    assert [status.word for status in sorted(Status)] == ["pass", "skip", "warn", "unknown", "fail"]


def test_a_finding_has_the_documented_keys():
    finding = Finding(check="memory", entity=NODE, status=Status.PASS, message="fine")

    assert set(finding.to_json()) == {
        "check",
        "entity",
        "status",
        "value",
        "unit",
        "threshold",
        "source",
        "message",
        "failure_class",
        "unknown_reason",
        "hardware_reported",
        "shared_cause",
    }
    assert finding.to_json()["entity"] == {"kind": "node", "id": "n041"}


def test_a_failing_finding_without_a_failure_class_cannot_be_made():
    with pytest.raises(ValueError, match="failure class"):
        Finding(check="memory", entity=NODE, status=Status.FAIL, message="bad")


def test_an_unknown_finding_without_a_reason_cannot_be_made():
    with pytest.raises(ValueError, match="say why"):
        Finding(check="memory", entity=NODE, status=Status.UNKNOWN, message="?")


def incident(**changes):
    fields = {
        "id": "i1",
        "failure_class": FailureClass.SIGKILL_PROBABLE,
        "side": Side.AMBIGUOUS,
        "confidence": Confidence.PROBABLE,
        "state": IncidentState.OPEN,
        "title": "rank 1 was ended by SIGKILL",
        "first_us": 1_700_000_000_000_001,
        "detected_us": 1_700_000_000_100_002,
        "run_id": "r1",
        "attempt": 0,
        "culprits": (Entity(EntityKind.RANK, "1"), NODE),
        "evidence": (Evidence(role=Role.ROOT, text="SIGKILL", entity=NODE, lines=("last",)),),
        "actions": (ActionKind.RESTART,),
        "lost_s": {"detect": 0.1, "restart": 2.0},
    }
    return Incident(**{**fields, **changes})


def test_an_incident_has_the_documented_keys():
    documented = {
        "id",
        "failure_class",
        "side",
        "state",
        "run",
        "attempt",
        "culprits",
        "first_seen",
        "evidence",
        "actions",
        "lost_seconds",
    }

    assert documented <= set(incident().to_json())
    assert incident().to_json()["lost_seconds"] == pytest.approx(2.1)


def test_an_incident_survives_its_json_form():
    for case in (incident(), incident(resolved_us=5, resolution="ran again", run_id=None)):
        assert Incident.from_json(case.to_json()) == case


def test_an_event_survives_its_json_form():
    event = Event(id="e", kind="run.started", t_us=1, node="n", severity=Severity.ERROR)

    assert Event.from_json(event.to_json()) == event


@pytest.mark.parametrize("broken", [{}, {"payload": []}, {"payload": {}, "id": 1, "kind": "x"}])
def test_what_is_not_an_event_is_refused(broken):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Event.from_json(broken)


def test_failure_classes_are_category_dot_subcause():
    for failure_class in FailureClass:
        category, _, subcause = failure_class.value.partition(".")

        assert category == failure_class.category
        assert subcause


def test_unknown_reasons_are_frozen():
    assert {reason.value for reason in UnknownReason} == {
        "missing_tool",
        "no_permission",
        "not_supported",
        "not_recorded",
        "timeout",
        "crash",
    }


def test_json_output_names_its_schema():
    assert envelope("gpuops.check/1", {"findings": []})["schema"] == "gpuops.check/1"


def test_uuid7_sorts_by_time_down_to_the_microsecond():
    ids = [uuid7(1_700_000_000_000_000 + us, bytes([255 - us] * 10)) for us in range(200)]

    assert ids == sorted(ids)
    assert {value[14] for value in ids} == {"7"}
    assert {value[19] for value in ids} <= set("89ab")
