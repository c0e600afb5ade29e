"""What a health check does about a node: drain it, take our drain back, or leave it."""

from dataclasses import replace

import pytest
from support.checks import NODE
from support.fake_slurm import FakeSlurm

from gpuops.checks.runner import CheckRun
from gpuops.config import Mode
from gpuops.gate.drain_record import DrainRecord, Stage, read_drain, write_drain
from gpuops.gate.health import Bench, Did, act, reason_to_leave
from gpuops.gate.hook import Settled
from gpuops.gate.permit import Gate
from gpuops.gate.publish import Patience
from gpuops.host.clock import FakeClock
from gpuops.incident.gate import Course, Decision
from gpuops.model import FailureClass, Finding, Status

DRAIN = DrainRecord(
    id="d1",
    node="n1",
    hook="prolog",
    reason="gpuops: fail gpu_lost n1 15 -> drain #1",
    check="gpu_lost",
    failure_class="gpu_hw.fell_off_bus",
    t_us=1,
    replaces=("Prolog error",),
    stage=Stage.SET.value,
)


class Node:
    """A node whose drain is recorded in a folder, and a slurmctld that knows it."""

    def __init__(self, folder):
        self.folder, self.slurm = folder, FakeSlurm()
        self.gate = Gate(
            node="n1",
            cluster="c",
            store_url="sqlite://",
            state_dir=folder,
            uid=1,
            mode=Mode.ENFORCE,
            fuse_nodes=3,
            fuse_window_s=600.0,
            passes_to_resume=2,
            permit_deadline_s=1.0,
        )

    def ours(self, drain=DRAIN):
        """Have a drain of ours on record, and known to slurmctld."""
        write_drain(self.folder, drain)
        self.slurm.by_somebody(drain.reason)

    @property
    def record(self):
        return read_drain(self.folder, uid=1)

    def checked(self, status=Status.PASS, drain=None):
        """Return what is done after a check of that status; *drain* is what it wants."""
        clock = FakeClock()
        finding = Finding(
            check="gpu_lost",
            entity=NODE,
            status=status,
            message="of a test",
            failure_class=FailureClass.GPU_FELL_OFF_BUS if status is Status.FAIL else None,
        )
        ran = CheckRun(suite="health", node="n1", start_us=1, end_us=2, findings=(finding,))
        settled = Settled(ran=ran, decision=Decision(Course.START, "of a test"), drain=drain)
        bench = Bench(
            gate=self.gate,
            scontrol=self.slurm,
            patience=Patience(limit_s=6.0, pause=clock.advance),
            clock=clock,
        )
        return act(settled, self.record, self.slurm.node("n1"), bench).did


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_failing_node_is_drained_and_the_record_says_so(node):
    wanted = replace(DRAIN, stage=Stage.WANTED.value)
    write_drain(node.folder, wanted)

    assert node.checked(Status.FAIL, drain=wanted) is Did.DRAINED
    assert node.slurm.reason == DRAIN.reason
    assert node.record == DRAIN


def test_our_drain_is_taken_back_after_enough_passes_in_a_row(node):
    node.ours()

    assert node.checked() is Did.NOTHING
    assert node.record.passes == 1
    assert node.checked() is Did.RESUMED
    assert (node.slurm.states, node.record) == ({"IDLE"}, None)


@pytest.mark.parametrize("between", [Status.FAIL, Status.WARN, Status.SKIP])
def test_a_check_that_does_not_pass_begins_the_row_anew(node, between):
    node.ours()

    assert [node.checked(status) for status in (Status.PASS, between, Status.PASS)] == [
        Did.NOTHING
    ] * 3
    assert node.record.passes == 1


@pytest.mark.parametrize("reason", ["ann: cable", f"{DRAIN.reason}; ann", "Prolog error"])
def test_somebody_elses_drain_is_never_undone_and_ours_is_forgotten(node, reason):
    node.ours()
    node.slurm.by_somebody(reason)

    assert node.checked() is Did.FORGOTTEN
    assert [node.checked() for _ in range(3)] == [Did.NOTHING] * 3
    assert (node.slurm.reason, node.slurm.calls, node.record) == (reason, [], None)


def test_a_drain_without_a_record_is_never_undone_whatever_its_reason(node):
    node.slurm.by_somebody(DRAIN.reason)

    assert [node.checked() for _ in range(3)] == [Did.NOTHING] * 3
    assert node.slurm.calls == []


def test_a_node_that_somebody_resumed_is_no_longer_ours(node):
    node.ours()
    node.slurm.taken_back()

    assert node.checked() is Did.FORGOTTEN
    assert node.record is None


def test_a_reason_that_its_helper_could_not_bring_is_brought(node):
    write_drain(node.folder, replace(DRAIN, stage=Stage.WANTED.value))
    node.slurm.by_somebody("Prolog error")

    assert node.checked() is Did.DRAINED
    assert node.slurm.reason == DRAIN.reason


def test_a_node_that_is_down_is_not_resumed(node):
    node.ours()
    node.slurm.states = {"DOWN", "DRAIN"}

    assert [node.checked() for _ in range(3)] == [Did.NOTHING] * 3
    assert node.slurm.calls == []


def test_a_node_that_slurmctld_does_not_hear_from_is_let_alone(node):
    node.ours()
    node.slurm.states = {"IDLE", "DRAIN", "NOT_RESPONDING"}

    assert [node.checked() for _ in range(3)] == [Did.NOTHING] * 3
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

    assert reason_to_leave(node.slurm.node("n1")) == left
