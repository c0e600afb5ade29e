"""What a health check does about a node: drain it, take our drain back, or leave it."""

import os
from dataclasses import replace

import pytest
from support.checks import NODE
from support.fake_slurm import FakeSlurm

from gpuops.checks.core.runner import CheckRun
from gpuops.config.resolve import GateMode
from gpuops.errors import SlurmError
from gpuops.gate.drain import (
    DrainRecord,
    DrainRetry,
    DrainStage,
    RecordedDiagnostic,
    read_drain,
    write_diagnostic,
    write_drain,
)
from gpuops.gate.health_check import HealthContext, NodeAction, act, reason_not_to_drain
from gpuops.gate.hook import GateResult
from gpuops.gate.node_state import change_state
from gpuops.gate.permit import GateSettings
from gpuops.gate.policy import DrainDecision, DrainOutcome
from gpuops.host.clock import FakeClock
from gpuops.host.node_state import Repair
from gpuops.model import FailureClass, Finding, Status
from gpuops.store.fuse import FuseSettings

DRAIN = DrainRecord(
    id="d1",
    node="n1",
    hook="prolog",
    reason="gpuops: fail gpu_lost n1 15 -> drain #1",
    check="gpu_lost",
    failure_class="gpu_sw.driver",
    t_us=1,
    replaces=("Prolog error",),
    stage=DrainStage.SET.value,
)


UID = os.getuid()


class Node:
    """A node whose drain is recorded in a folder, and a slurmctld that knows it."""

    def __init__(self, folder):
        self.folder, self.slurm, self.clock = folder, FakeSlurm(), FakeClock()
        self.gate = GateSettings(
            node="n1",
            cluster="c",
            store_url="sqlite://",
            state_dir=folder,
            uid=UID,
            mode=GateMode.ENFORCE,
            fuse=FuseSettings(),
            passes_to_resume=2,
            resumes_max_per_day=3,
            permit_deadline_s=1.0,
        )

    def ours(self, drain=DRAIN):
        """Have a drain of ours on record, and known to slurmctld."""
        write_drain(self.folder, drain)
        self.slurm.by_somebody(drain.reason)

    @property
    def record(self):
        return read_drain(self.folder, uid=UID)

    def comes_and_goes(self, drain=DRAIN):
        """Return what is done in the end about a node that is drained and then is well again."""
        self.ours(drain)
        self.checked()
        return self.checked()

    def checked(self, status=Status.PASS, drain=None):
        """Return what is done after a check of that status; *drain* is what it wants."""
        return self.result(status, drain).action

    def result(self, status=Status.PASS, drain=None):
        """Return the same with what was said of it."""
        finding = Finding(
            check=self.record.check if self.record else "gpu_lost",
            entity=NODE,
            status=status,
            message="of a test",
            failure_class=FailureClass.GPU_FELL_OFF_BUS if status is Status.FAIL else None,
        )
        ran = CheckRun(suite="health", node="n1", start_us=1, end_us=2, findings=(finding,))
        settled = GateResult(
            check_run=ran, decision=DrainDecision(DrainOutcome.START, "of a test"), drain=drain
        )
        bench = HealthContext(
            gate=self.gate,
            scontrol=self.slurm,
            retry=DrainRetry(limit_s=6.0, pause=self.clock.advance),
            clock=self.clock,
            # These tests are of what is done: on a busy machine a child may wait for its turn.
            write_s=30.0,
        )
        return act(settled, self.record, self.slurm.node("n1"), bench)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_failing_node_is_drained_and_the_record_says_so(node):
    wanted = replace(DRAIN, stage=DrainStage.WANTED.value)
    write_drain(node.folder, wanted)

    assert node.checked(Status.FAIL, drain=wanted) is NodeAction.DRAINED
    assert node.slurm.reason == DRAIN.reason
    assert node.record == DRAIN


def test_our_drain_is_taken_back_after_enough_passes_in_a_row(node):
    node.ours()

    assert node.checked() is NodeAction.NOTHING
    assert node.record.passes == 1
    assert node.checked() is NodeAction.RESUMED
    assert (node.slurm.states, node.record) == ({"IDLE"}, None)


FAULTY = replace(DRAIN, failure_class="gpu_hw.fell_off_bus", t_us=FakeClock().now_us())


def test_faulty_gpu_hardware_does_not_return_by_passive_checks(node):
    node.ours(FAULTY)

    assert [node.checked() for _ in range(5)] == [
        NodeAction.NOTHING,
        NodeAction.KEPT,
        *[NodeAction.NOTHING] * 3,
    ]
    assert "no diagnostic has passed since the drain" in node.record.kept
    assert "DRAIN" in node.slurm.states


def test_a_diagnostic_is_started_on_an_idle_node_once_an_hour(node):
    node.ours(FAULTY)
    node.slurm.states = {"ALLOCATED", "DRAIN"}
    assert [node.result().diagnose for _ in range(3)] == [False] * 3
    node.slurm.states = {"IDLE", "DRAIN"}
    assert [node.result().diagnose for _ in range(3)] == [True, False, False]
    node.clock.advance(3599)
    assert not node.result().diagnose
    node.clock.advance(1)

    assert node.result().diagnose


@pytest.mark.parametrize(("later_us", "action"), [(0, "kept"), (1, "resumed")])
def test_a_diagnostic_that_passed_after_the_drain_brings_it_back(node, later_us, action):
    write_diagnostic(node.folder, RecordedDiagnostic(passed_us=FAULTY.t_us + later_us))

    assert node.comes_and_goes(FAULTY) == action


@pytest.mark.parametrize(
    ("passed", "action"),
    [({"passed_us": 1}, "kept"), ({"burnin_us": 0}, "kept"), ({"burnin_us": 1}, "resumed")],
)
def test_a_slow_gpu_is_brought_back_by_a_burn_in_that_a_person_starts(node, passed, action):
    slow = replace(FAULTY, failure_class="gpu_hw.slow")
    after = {name: FAULTY.t_us + later_us for name, later_us in passed.items()}
    write_diagnostic(node.folder, RecordedDiagnostic(**after))

    assert node.comes_and_goes(slow) == action
    if action == "kept":
        assert "no burn-in has passed since the drain: `gpuops burnin`" in node.record.kept
        assert not node.result().diagnose


def test_a_repair_brings_it_back_without_a_diagnostic(node):
    repaired_us = FAULTY.t_us + 1
    repair = Repair(entity_kind="node", entity_id="n1", t_us=repaired_us, by="ann", what="card")
    change_state(node.folder, UID, lambda state: replace(state, repairs=(repair,)))

    assert node.comes_and_goes(FAULTY) is NodeAction.RESUMED


def test_what_only_a_person_may_bring_back_needs_no_diagnostic_and_is_not_helped_by_one(node):
    write_diagnostic(node.folder, RecordedDiagnostic(passed_us=FAULTY.t_us + 1))

    assert node.comes_and_goes(replace(FAULTY, failure_class="gpu_hw.inforom")) is NodeAction.KEPT
    assert "returns by a person" in node.record.kept
    assert not node.result().diagnose


def test_a_node_that_came_back_three_times_in_a_day_stays_out_and_that_is_told_once(node):
    assert [node.comes_and_goes() for _ in range(4)] == [*[NodeAction.RESUMED] * 3, NodeAction.KEPT]
    assert node.record.kept.startswith("resumed 3 times in 24 h after drains for this check")
    assert node.checked() is NodeAction.NOTHING
    assert "DRAIN" in node.slurm.states


def test_other_checks_and_earlier_days_do_not_count(node):
    other = replace(DRAIN, check="gpu_ecc", reason="gpuops: fail gpu_ecc n1 -> drain")
    assert [node.comes_and_goes() for _ in range(3)] == [NodeAction.RESUMED] * 3
    assert node.comes_and_goes(other) is NodeAction.RESUMED
    node.clock.advance(86399)
    assert node.comes_and_goes() is NodeAction.KEPT
    node.clock.advance(1)

    assert node.comes_and_goes() is NodeAction.RESUMED


def test_what_was_before_a_repair_does_not_count(node):
    assert [node.comes_and_goes() for _ in range(4)][-1] is NodeAction.KEPT
    now_us = node.clock.now_us()
    repair = Repair(entity_kind="node", entity_id="n1", t_us=now_us, by="ann", what="card")
    change_state(node.folder, UID, lambda state: replace(state, repairs=(repair,)))

    assert node.checked() is NodeAction.RESUMED


def test_what_slurmctld_did_not_hear_of_does_not_count(node):
    node.ours()
    node.checked()
    for _ in range(5):
        node.slurm.refuses_to_resume = True
        with pytest.raises(SlurmError):
            node.checked()
    node.slurm.refuses_to_resume = False

    assert node.checked() is NodeAction.RESUMED


@pytest.mark.parametrize("text", ["", "{}x", '{"items": [{"check": 1}]}'])
def test_a_drain_is_not_taken_back_where_that_cannot_be_counted(node, text):
    (node.folder / "resumes.json").write_text(text)

    assert node.comes_and_goes() is NodeAction.KEPT
    assert "cannot use the record of resumes" in node.record.kept


@pytest.mark.parametrize("between", [Status.FAIL, Status.WARN, Status.SKIP])
def test_a_check_that_does_not_pass_begins_the_row_anew(node, between):
    node.ours()

    assert [node.checked(status) for status in (Status.PASS, between, Status.PASS)] == [
        NodeAction.NOTHING
    ] * 3
    assert node.record.passes == 1


@pytest.mark.parametrize("reason", ["ann: cable", f"{DRAIN.reason}; ann", "Prolog error"])
def test_somebody_elses_drain_is_never_undone_and_ours_is_forgotten(node, reason):
    node.ours()
    node.slurm.by_somebody(reason)

    assert node.checked() is NodeAction.FORGOTTEN
    assert [node.checked() for _ in range(3)] == [NodeAction.NOTHING] * 3
    assert (node.slurm.reason, node.slurm.calls, node.record) == (reason, [], None)


def test_a_drain_without_a_record_is_never_undone_whatever_its_reason(node):
    node.slurm.by_somebody(DRAIN.reason)

    assert [node.checked() for _ in range(3)] == [NodeAction.NOTHING] * 3
    assert node.slurm.calls == []


def test_a_node_that_somebody_resumed_is_no_longer_ours(node):
    node.ours()
    node.slurm.taken_back()

    assert node.checked() is NodeAction.FORGOTTEN
    assert node.record is None


def test_a_reason_that_its_helper_could_not_bring_is_brought(node):
    write_drain(node.folder, replace(DRAIN, stage=DrainStage.WANTED.value))
    node.slurm.by_somebody("Prolog error")

    assert node.checked() is NodeAction.DRAINED
    assert node.slurm.reason == DRAIN.reason


def test_a_node_that_is_down_is_not_resumed(node):
    node.ours()
    node.slurm.states = {"DOWN", "DRAIN"}

    assert [node.checked() for _ in range(3)] == [NodeAction.NOTHING] * 3
    assert node.slurm.calls == []


def test_a_node_that_slurmctld_does_not_hear_from_is_let_alone(node):
    node.ours()
    node.slurm.states = {"IDLE", "DRAIN", "NOT_RESPONDING"}

    assert [node.checked() for _ in range(3)] == [NodeAction.NOTHING] * 3
    assert node.record == DRAIN


@pytest.mark.parametrize(
    ("states", "reason", "left"),
    [
        ({"IDLE"}, None, None),
        ({"MIXED"}, None, None),
        ({"IDLE", "DRAIN"}, "ann", "drained already: ann"),
        ({"DOWN"}, "ann", "down: ann"),
        ({"UNKNOWN"}, None, "slurmctld does not hear from n1"),
    ],
)
def test_a_failing_node_is_left_where_it_takes_no_jobs_anyhow(node, states, reason, left):
    node.slurm.states, node.slurm.reason = states, reason

    assert reason_not_to_drain(node.slurm.node("n1")) == left
