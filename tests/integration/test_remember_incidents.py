"""A check run becomes events, and its failures become incidents that the node's file keeps."""

import os
from dataclasses import replace

import pytest
from support.runs import wait_until

from gpuops.checks.core.runner import CheckFailure, CheckRun
from gpuops.gate.drain import DrainRecord
from gpuops.gate.hook import record_decision
from gpuops.gate.node_state import change_state, read_state
from gpuops.gate.policy import DrainOutcome
from gpuops.gate.record import (
    CheckOccasion,
    RecordOptions,
    acknowledge,
    apply_to_state,
    record_check_run,
)
from gpuops.host.clock import FakeClock, SystemClock
from gpuops.host.node_state import Repair
from gpuops.model import (
    Entity,
    EntityKind,
    FailureClass,
    Finding,
    IncidentState,
    Side,
    Status,
)
from gpuops.store.spool.format import decode_line
from gpuops.store.spool.segments import find_segments

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.quick_disk,
]

UID = os.geteuid()
T0 = 1_760_000_000_000_000
GPU = Entity(EntityKind.GPU, "GPU-1")
FAILS = Finding(
    check="gpu_lost",
    entity=GPU,
    status=Status.FAIL,
    message="GPU 0 is lost",
    failure_class=FailureClass.GPU_FELL_OFF_BUS,
)
PASSES = replace(FAILS, status=Status.PASS, failure_class=None)
PROLOG = CheckOccasion(trigger="prolog", job_id="17", mode="enforce")


def ran(*findings, at=0, failures=()):
    start_us = T0 + at * 10**6
    return CheckRun(
        suite="prolog",
        node="n1",
        start_us=start_us,
        end_us=start_us + 5,
        findings=findings,
        failures=tuple(failures),
        profile="h100",
    )


@pytest.fixture
def state_dir(tmp_path):
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    return made


def memory(tmp_path, state_dir=None):
    return RecordOptions(
        spool_dir=tmp_path / "spool",
        spool_bytes_max=2**26,
        root=tmp_path,
        config_file=None,
        # The flusher finds no store: what is spooled stays.
        environ={"GPUOPS_STORE": "sqlite:////proc/none/store.db", "GPUOPS_SPOOL": "/proc/none"},
        state_dir=state_dir,
        uid=UID,
    )


def changed_incidents(*args, **more):
    return apply_to_state(*args, **more).incidents


def spooled(tmp_path):
    segments = sorted(find_segments(tmp_path / "spool"), key=lambda item: item.path.stat().st_ino)
    lines = [raw for item in segments for raw in item.path.read_bytes().splitlines()]
    return sorted((decode_line(raw).event for raw in lines), key=lambda event: event.id)


def test_a_run_is_recorded_with_its_job_profile_mode_and_gpus(tmp_path):
    occasion = replace(PROLOG, gpus=frozenset({"1", "0"}))

    assert record_check_run(ran(PASSES), occasion, memory(tmp_path), SystemClock()) is None

    (event,) = spooled(tmp_path)
    told = {key: event.payload[key] for key in ("trigger", "job_id", "profile", "mode", "gpus")}
    assert told == {
        "trigger": "prolog",
        "job_id": "17",
        "profile": "h100",
        "mode": "enforce",
        "gpus": ["0", "1"],
    }


@pytest.mark.parametrize(("at", "n_changed"), [(59, 0), (61, 1)])
def test_what_is_late_changes_no_incident_if_a_newer_check_has_run(state_dir, at, n_changed):
    """It may have looked while the disk kept this one waiting."""
    changed_incidents(ran(FAILS, at=60), PROLOG, state_dir, UID)
    health = replace(PROLOG, trigger="health")

    told = changed_incidents(ran(PASSES, at=at), health, state_dir, UID, is_late=lambda: True)

    assert len(told) == n_changed
    assert len(read_state(state_dir, UID).incidents) == 1 - n_changed


def test_roots_run_tells_of_an_incident_and_keeps_it(tmp_path, state_dir):
    assert record_check_run(ran(FAILS), PROLOG, memory(tmp_path, state_dir), SystemClock()) is None

    # A busy disk takes more than the second that the caller waits; the rest is written after it.
    wait_until(lambda: len(spooled(tmp_path)) == 2, what="the events")
    run, incident = spooled(tmp_path)
    assert (run.kind, incident.kind) == ("check.ran", "incident.recorded")
    (kept,) = read_state(state_dir, UID).incidents.values()
    assert incident.payload == kept.incident.to_json()
    assert kept.incident.side is Side.INFRA
    assert [action.value for action in kept.incident.actions] == ["drain"]


def test_a_users_run_tells_of_no_incident(tmp_path):
    record_check_run(ran(FAILS), PROLOG, memory(tmp_path), SystemClock())

    assert [event.kind for event in spooled(tmp_path)] == ["check.ran"]


def test_our_own_failures_are_told_as_events(tmp_path):
    failed = CheckFailure("judge of check x", "KeyError: 'y'", "Traceback")

    record_check_run(ran(PASSES, failures=[failed]), PROLOG, memory(tmp_path), SystemClock())

    assert sorted(event.kind for event in spooled(tmp_path)) == ["check.ran", "tool.failed"]


def test_an_incident_keeps_its_id_from_prolog_to_prolog_and_closes(state_dir):
    first = changed_incidents(ran(FAILS), PROLOG, state_dir, UID)
    second = changed_incidents(ran(FAILS, at=60), PROLOG, state_dir, UID)
    last = changed_incidents(ran(PASSES, at=120), PROLOG, state_dir, UID)

    assert (len(first), second) == (1, ())
    assert (last[0].id, last[0].state) == (first[0].id, IncidentState.CLOSED)
    assert read_state(state_dir, UID).incidents == {}


def test_a_prolog_of_some_gpus_closes_no_incident_of_the_others(state_dir):
    changed_incidents(ran(FAILS), PROLOG, state_dir, UID)
    node = replace(PASSES, entity=Entity(EntityKind.NODE, "n1"))
    occasion = replace(PROLOG, gpus=frozenset({"1"}))

    assert changed_incidents(ran(node, at=1), occasion, state_dir, UID) == ()
    assert len(changed_incidents(ran(node, at=2), PROLOG, state_dir, UID)) == 1


def test_without_a_file_a_failure_is_the_same_incident_all_day(tmp_path):
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    days = [
        changed_incidents(ran(FAILS, at=at), PROLOG, nowhere, UID)[0].id for at in (0, 60, 86_400)
    ]

    assert days[0] == days[1] != days[2]


def test_an_acknowledged_repair_closes_and_is_kept(state_dir):
    (opened,) = changed_incidents(ran(FAILS), PROLOG, state_dir, UID)
    repair = Repair(
        entity_kind="node", entity_id="n1", t_us=T0 + 10**6, by="ada", what="reseated it"
    )

    (closed,) = acknowledge(state_dir, UID, repair)

    state = read_state(state_dir, UID)
    assert (closed.id, closed.state) == (opened.id, IncidentState.CLOSED)
    assert closed.resolution == "repaired by ada: reseated it"
    assert (state.repairs, state.incidents) == ((repair,), {})


def test_of_each_thing_the_latest_repair_is_kept(state_dir):
    def done(kind, entity, t_us):
        repair = Repair(entity_kind=kind, entity_id=entity, t_us=t_us, by="ada", what="x")
        acknowledge(state_dir, UID, repair)
        return repair

    done("gpu", "GPU-1", 1)
    gpu = done("gpu", "GPU-1", 3)
    node = done("node", "n1", 2)
    done("node", "n1", 1)

    assert read_state(state_dir, UID).repairs == (gpu, node)


def test_what_the_file_holds_besides_is_left_alone(state_dir):
    change_state(state_dir, UID, lambda state: replace(state, profile="h100"))

    changed_incidents(ran(FAILS), PROLOG, state_dir, UID)

    assert read_state(state_dir, UID).profile == "h100"


def test_a_run_that_changes_nothing_extends_the_recorded_one(tmp_path, state_dir):
    clock, options = FakeClock(), memory(tmp_path, state_dir)
    busy = replace(PASSES, check="load", status=Status.WARN, message="load is 9")
    for at, words in ((0, "load is 9"), (300, "load is 8"), (600, "load is 7")):
        record_check_run(ran(PASSES, replace(busy, message=words), at=at), PROLOG, options, clock)
    record_check_run(ran(PASSES, replace(busy, status=Status.PASS), at=900), PROLOG, options, clock)

    first, *unchanged, recovered = sorted(
        spooled(tmp_path), key=lambda item: item.payload["start_us"]
    )

    assert [event.kind for event in unchanged] == ["check.unchanged"] * 2
    assert [(event.payload["run"], event.payload["runs"]) for event in unchanged] == [
        (first.id, 2),
        (first.id, 3),
    ]
    assert [finding["check"] for finding in first.payload["findings"]] == ["load"]
    assert [finding["status"] for finding in recovered.payload["findings"]] == ["pass"]
    assert first.payload["parts"] == [GPU.to_json()]


def test_what_cannot_be_spooled_is_recorded_whole_the_next_time(tmp_path, state_dir):
    options = memory(tmp_path, state_dir)
    options.spool_dir.write_text("no folder")
    record_check_run(ran(FAILS), PROLOG, options, FakeClock())

    state = read_state(state_dir, UID)
    assert (state.recorded, state.incidents) == ({}, {})

    options.spool_dir.unlink()
    record_check_run(ran(FAILS, at=60), PROLOG, options, FakeClock())

    kinds = sorted(event.kind for event in spooled(tmp_path))
    assert kinds == ["check.ran", "incident.recorded"]
    assert len(read_state(state_dir, UID).incidents) == 1


def test_a_decision_that_cannot_be_spooled_is_recorded_the_next_time(tmp_path, state_dir):
    options = memory(tmp_path, state_dir)
    options.spool_dir.write_text("no folder")
    drain = DrainRecord(
        id="x",
        node="n1",
        hook="health",
        reason="of a test",
        check="gpu_lost",
        failure_class="gpu_hw.fell_off_bus",
        t_us=T0,
    )
    for _ in range(2):
        record_decision(options, drain, DrainOutcome.WOULD_DRAIN, FakeClock())
        if options.spool_dir.is_file():
            options.spool_dir.unlink()

    assert [event.kind for event in spooled(tmp_path)] == ["gate.decided"]
