"""A hook that fails its node drains it for its own reason, also where the disk is slow or full."""

import os

import pytest
from support.checks import NODE
from support.fake_slurm import FakeSlurm
from support.runs import wait_until

from gpuops.checks.core.runner import CheckRun
from gpuops.config.resolve import GateMode
from gpuops.errors import ProbeError
from gpuops.gate.drain import DrainStage, read_drain
from gpuops.gate.health_check import publish_drain
from gpuops.gate.hook import HookContext, record_and_decide
from gpuops.gate.node_state import read_state
from gpuops.gate.permit import GateSettings
from gpuops.gate.record import LATE_S, RecordOptions
from gpuops.gate.session import CheckRequest, make_plan
from gpuops.host.clock import FakeClock
from gpuops.model import FailureClass, Finding, Status
from gpuops.store.fuse import FuseSettings

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.quick_disk,
]

UID = os.geteuid()
LOST = Finding(
    check="gpu_lost",
    entity=NODE,
    status=Status.FAIL,
    message="GPU 0 is lost",
    failure_class=FailureClass.GPU_FELL_OFF_BUS,
    hardware_reported=True,
)


class Node:
    """A node that fails in its prolog, and a slurmctld that slurmd told "Prolog error"."""

    def __init__(self, home):
        self.state_dir, self.clock, self.slurm = home / "state", FakeClock(), FakeSlurm()
        self.waited_s = 0.0
        self.slurm.by_somebody("Prolog error")

        def pause(seconds):
            self.waited_s += seconds
            self.clock.advance(seconds)

        none = "sqlite:////proc/none/store.db"
        request = CheckRequest(
            suite="prolog", node="n1", root=home / "root", state_dir=self.state_dir, uid=UID
        )
        self.context = HookContext(
            hook="prolog",
            job_id="17",
            job_uid=None,
            plan=make_plan(request),
            gate=GateSettings(
                node="n1",
                cluster="c",
                store_url=none,
                state_dir=self.state_dir,
                uid=UID,
                mode=GateMode.ENFORCE,
                fuse=FuseSettings(),
                passes_to_resume=2,
                resumes_max_per_day=3,
                permit_deadline_s=1.0,
            ),
            options=RecordOptions(
                spool_dir=home / "spool",
                spool_bytes_max=2**26,
                root=home / "root",
                config_file=None,
                # The flusher finds no store.
                environ={"GPUOPS_STORE": none, "GPUOPS_SPOOL": "/proc/none"},
                state_dir=self.state_dir,
                uid=UID,
            ),
            clock=self.clock,
            pause=pause,
            write_s=0.05,
        )

    def fails(self):
        now_us = self.clock.now_us()
        run = CheckRun(
            suite="prolog", node="n1", start_us=now_us, end_us=now_us, findings=(LOST,), profile="x"
        )
        return record_and_decide(self.context, run)

    def publish(self, drain):
        return publish_drain(self.context, drain.id, lambda: self.slurm, drain)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_record_that_a_slow_disk_takes_after_the_hook_has_ended_is_awaited(node):
    node.state_dir.mkdir(mode=0o700)
    record = node.state_dir / "drain.json"
    os.mkfifo(record)  # to read it takes until somebody writes
    result = node.fails()
    assert not result.is_saved
    assert (
        f"gpuops: the drain is not recorded yet: {node.state_dir} gave no answer in 0."
        in result.problems[-1]
    )

    os.close(os.open(record, os.O_WRONLY))
    wait_until(record.is_file, what="the record")
    wait_until(lambda: read_state(node.state_dir, UID).incidents, what="the incident")
    node.publish(result.drain)

    kept = read_drain(node.state_dir, uid=UID)
    assert (kept.id, kept.stage) == (result.drain.id, DrainStage.SET)
    assert node.slurm.reason == kept.reason
    assert kept.reason.startswith(result.drain.reason)


def test_a_drain_that_no_disk_takes_is_sent_for_its_reason_all_the_same(node):
    node.state_dir.write_text("no folder")
    result = node.fails()
    assert not result.is_saved
    assert str(node.state_dir) in result.problems[-1]

    with pytest.raises(ProbeError, match="cannot write the drain record"):
        node.publish(result.drain)

    assert node.slurm.reason == result.drain.reason == "gpuops: fail gpu_lost n1 -> drain"
    assert node.waited_s >= LATE_S
