"""What ends a generation, what is only kept, and what is not about this job at all."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.monitors import report_of, suspects_of

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.gpu import NVML_S, GpuMonitor, xid_catalogue
from gpuops.host.clock import FakeClock
from gpuops.host.gpu_names import GpuName
from gpuops.host.records import to_json
from gpuops.host.xid_watch import LOST, XidEvent, XidSource
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.incident.kernel import JobXidFilter
from gpuops.incident.suspicion import SuspicionLevel, explain
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Role, Side

CATALOGUE = xid_catalogue(None)
NVML, KERNEL = XidSource.NVML, XidSource.KERNEL
NODE = Entity(EntityKind.NODE, "n1")


def uuid(index):
    return f"GPU-{index:08d}"


def gpus(count=4):
    return [
        GpuName(index=index, address=f"0000:1{index}:00.0", uuid=uuid(index))
        for index in range(count)
    ]


def entity(index):
    return Entity(EntityKind.GPU, uuid(index))


class Lines:
    """A source whose lines a test writes."""

    def __init__(self):
        self.waiting = []
        self.closed = False

    def take(self, lines_max):
        taken, self.waiting = self.waiting[:lines_max], self.waiting[lines_max:]
        return taken

    def close(self, wait_s=0.0):
        self.closed = True

    def say(self, **body):
        self.waiting.append(json.dumps(body).encode() + b"\n")


class Stand:
    """A sentry over sources that a test writes."""

    def __init__(self, env=None, **begun):
        self.clock = FakeClock()
        self.lines = {source: Lines() for source in XidSource}
        self.sentry: Monitor = GpuMonitor(env or {}, CATALOGUE, self.clock, self.lines)
        for source in begun.get("begun", XidSource):
            self.lines[source].say(gpus=[to_json(gpu) for gpu in gpus()])
        self.begin()

    def report(self):
        return report_of(self.sentry, generation=self.generation)

    def failure_class(self):
        """Return the class of a failure of workers that is noticed now."""
        failed = NodeReport(kind=ReportKind.WORKERS_FAILED, node="n1", generation=0)
        return explain(failed, self.sentry.poll(), self.clock.mono_ns()).failure_class

    def begin(self, generation=0, pids=(100, 101)):
        self.generation = generation
        self.clock.advance(0.1)
        workers = [SimpleNamespace(pid=pid, local_rank=n) for n, pid in enumerate(pids)]
        self.sentry.begin(
            MonitoredAttempt(generation=generation, node="n1", workers=workers, folder=Path("/"))
        )
        self.clock.advance(0.1)

    def event(self, code, index=1, source=NVML, *, mono_ns=None, **told):
        names = {"address": f"0000:1{index}:00.0", "uuid": uuid(index), "index": index}
        if source is KERNEL:
            told = {"line": f"NVRM: Xid (PCI:0000:1{index}:00): {code}, pid=1", **told}
        event = XidEvent(
            source=source,
            code=code,
            mono_ns=self.clock.mono_ns() if mono_ns is None else mono_ns,
            now_us=self.clock.now_us(),
            **{**names, **told},
        )
        self.lines[source].say(xid=to_json(event))


def test_a_gpu_off_the_bus_ends_the_generation_and_names_gpu_and_node():
    stand = Stand()
    assert stand.report() is None
    stand.event(79)
    report = stand.report()

    assert report == NodeReport(
        kind=ReportKind.GPU_FAULT,
        node="n1",
        generation=0,
        failure_class=FailureClass.GPU_FELL_OFF_BUS,
        side=Side.INFRA,
        confidence=Confidence.CONFIRMED,
        how="Xid 79 (GPU has fallen off the bus) on GPU 1 (GPU-00000001), seen by NVML",
        culprits=(entity(1), NODE),
        blames_node=True,
    )
    assert NodeReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_one_fault_told_by_both_sources_is_one_report_and_one_piece_of_evidence():
    stand = Stand()
    stand.event(79)
    assert stand.report() is not None
    stand.event(79, source=KERNEL, process=1234)
    (suspicion,) = stand.sentry.poll()
    assert stand.report().how == suspicion.why

    (evidence,) = stand.sentry.evidence(1.0)
    assert evidence.role is Role.ROOT
    assert evidence.text == (
        "Xid 79 (GPU has fallen off the bus) on GPU 1 (GPU-00000001), seen by NVML and the"
        " kernel's log"
    )
    assert evidence.lines == ("NVRM: Xid (PCI:0000:11:00): 79, pid=1",)
    assert evidence.entity == entity(1)


def test_what_follows_on_the_same_gpu_is_not_the_cause():
    stand = Stand()
    stand.event(79, source=KERNEL)
    stand.event(154, source=KERNEL, recovery="Node Reboot Required")
    stand.event(119, source=KERNEL)
    report = stand.report()

    assert report.failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert report.culprits == (entity(1), NODE)


def test_another_gpu_is_another_suspicion():
    stand = Stand()
    stand.event(79, 1)
    assert stand.report().culprits == (entity(1), NODE)
    stand.clock.advance(1)
    stand.event(48, 2)
    assert [suspicion.entity for suspicion in stand.sentry.poll()] == [entity(1), entity(2)]
    assert stand.report().culprits == (entity(1), NODE, entity(2))


def test_two_at_once_are_one_report():
    stand = Stand()
    stand.event(79, 1)
    stand.event(LOST, 2)
    report = stand.report()

    assert set(report.culprits) == {entity(1), entity(2), NODE}
    assert report.failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert "the driver reports the GPU lost on GPU 2" in report.how


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 94, 154, 999])
def test_the_rest_is_kept_and_says_what_a_failure_was(code):
    stand = Stand()
    stand.event(code)
    assert stand.report() is None

    (evidence,) = stand.sentry.evidence(1.0)
    assert evidence.role is Role.SYMPTOM
    explains = code not in {63, 154, 999}
    failure_class = CATALOGUE[code].failure_class if explains else FailureClass.UNRESOLVED
    assert stand.failure_class() is failure_class
    found = [(suspicion.level, suspicion.node) for suspicion in stand.sentry.poll()]
    assert found == [(SuspicionLevel.NOTE, None)] * explains


def test_what_is_to_be_drained_works_on_and_its_node_is_doubted():
    stand = Stand()
    stand.event(31)
    stand.event(154, source=KERNEL, recovery="Drain and Reset")
    assert stand.report() is None

    (doubt,) = suspects_of(stand.sentry)
    assert doubt.why.startswith("the driver wants: Drain and Reset (Xid 154")
    assert (doubt.culprits, doubt.node) == ((entity(1), NODE), "n1")
    stand.event(79, 2)
    assert stand.report().culprits == (entity(2), NODE)
    assert len(suspects_of(stand.sentry)) == 1, "what has ended the generation is no doubt"


def test_only_what_is_recent_explains_a_failure_and_the_gravest_does():
    stand = Stand()
    stand.event(31, 0)
    assert stand.failure_class() is FailureClass.GPU_ILLEGAL_ACCESS
    stand.clock.advance(61)
    assert stand.failure_class() is FailureClass.UNRESOLVED
    stand.event(31, 0)
    assert stand.failure_class() is FailureClass.GPU_ILLEGAL_ACCESS, "seen again"
    stand.event(48, 2)
    assert stand.failure_class() is CATALOGUE[48].failure_class
    first = next(iter(stand.sentry.poll()))
    assert (first.entity, first.level) == (entity(2), SuspicionLevel.END)


def test_a_gpu_of_another_job_does_not_count():
    stand = Stand({"CUDA_VISIBLE_DEVICES": "2,3"})
    stand.event(79, 1)
    assert stand.report() is None
    assert stand.sentry.evidence(1.0) == ()
    stand.event(79, 3)
    assert stand.report().culprits == (entity(3), NODE)
    assert stand.sentry.rank_gpus([0, 1]) == {0: uuid(2), 1: uuid(3)}
    assert [gpu.index for gpu in stand.sentry.gpus] == [2, 3]


def test_whose_the_xids_of_the_log_are_is_not_forgotten_with_a_lost_gpu():
    stand = Stand({"CUDA_VISIBLE_DEVICES": "2,3"})
    mine = {"0000:12:00.0", "0000:13:00.0"}
    assert stand.sentry.job_xids(None) == JobXidFilter(addresses=mine)
    assert stand.sentry.own_uuids() == {uuid(2), uuid(3)}

    stand.event(79, 3)
    three = [to_json(gpu) for gpu in gpus() if gpu.index != 1]
    stand.lines[NVML].say(gpus=three)  # begun anew, without one that is lost
    assert stand.sentry.job_xids(None).addresses == mine
    assert stand.sentry.own_uuids() == {uuid(2), uuid(3)}

    unlisted = Stand({"CUDA_VISIBLE_DEVICES": "2,3"}, begun=[])
    unlisted.lines[NVML].say(gpus=three)
    assert unlisted.sentry.job_xids(None) is None
    unlisted.lines[NVML].say(gpus=[])
    assert unlisted.sentry.job_xids(None) is None
    assert unlisted.sentry.own_uuids() is None
    without = Stand({"CUDA_VISIBLE_DEVICES": ""})
    assert without.sentry.own_uuids() == set()
    assert without.sentry.job_xids(None).addresses == set()


def test_an_xid_is_old_once_its_gpu_was_well_after_it():
    stand = Stand()
    stand.event(74, 1, KERNEL)
    stand.event(31, 1, KERNEL)
    assert stand.sentry.job_xids(None).stale == set()
    stand.clock.advance(100)
    stand.event(31, 1, KERNEL)

    now_ns = stand.clock.mono_ns()
    assert stand.sentry.job_xids(now_ns - 10**9).stale == {("0000:11:00.0", 74)}
    assert stand.sentry.job_xids(now_ns - 101 * 10**9).stale == set()


def test_the_jobs_gpus_are_known_before_anything_happens_to_them():
    stand = Stand({"CUDA_VISIBLE_DEVICES": "2,3"})
    stand.sentry.poll()
    assert stand.sentry.listed_uuids == (uuid(2), uuid(3))

    unlisted = Stand({"CUDA_VISIBLE_DEVICES": "2,3"}, begun=[KERNEL])
    unlisted.lines[NVML].say(over="absent", text="no library")
    unlisted.sentry.poll()
    assert [gpu.index for gpu in unlisted.sentry.gpus] == [2, 3]
    assert unlisted.sentry.listed_uuids == ()


def test_what_was_before_the_generation_does_not_end_it():
    stand = Stand()
    stand.event(79)
    stand.begin(1)
    stand.event(48, mono_ns=stand.clock.mono_ns() - 10**9)
    assert stand.sentry.poll() == []


def test_each_generation_reports_a_gpu_anew():
    stand = Stand()
    stand.event(48)
    assert stand.report().generation == 0
    stand.begin(1)
    assert stand.report() is None
    stand.event(48)
    assert stand.report().generation == 1


def test_the_kernels_log_alone_does_where_there_is_no_nvml():
    stand = Stand(begun=[KERNEL])
    stand.lines[NVML].say(over="absent", text="no library")
    stand.event(79, source=KERNEL)

    assert stand.report().culprits == (entity(1), NODE)


def test_a_line_waits_until_nvml_says_whose_gpus_they_are():
    stand = Stand(begun=[KERNEL])
    stand.event(79, source=KERNEL)
    assert stand.report() is None
    stand.lines[NVML].say(gpus=[to_json(gpus()[2])])
    assert stand.report() is None

    stand.event(79, 2, KERNEL)
    assert stand.report().culprits == (entity(2), NODE)


def test_an_nvml_that_hangs_is_not_waited_for_for_ever():
    stand = Stand(begun=[KERNEL])
    stand.event(79, source=KERNEL)
    assert stand.report() is None
    stand.clock.advance(NVML_S)
    assert stand.report().failure_class is FailureClass.GPU_FELL_OFF_BUS


def test_lines_that_are_none_are_left_out():
    stand = Stand()
    for line in (b"", b"{", b"[]", b"7\n", b'{"xid": {}}', b'{"gpus": 3}', b"\xff" * 99):
        stand.lines[NVML].waiting.append(line)
    stand.lines[KERNEL].say(xid={"source": "kernel", "code": "79", "mono_ns": 1, "now_us": 1})
    stand.event(79)

    assert stand.report() is not None


def test_a_flood_takes_no_look_long_and_little_memory():
    stand = Stand()
    for number in range(5000):
        stand.event(1000 + number)
    stand.event(79, source=KERNEL)
    assert stand.report().failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert len(stand.lines[NVML].waiting) > 4000
    while stand.lines[NVML].waiting:
        stand.sentry.poll()
    assert len(stand.sentry.evidence(1.0)) <= 256


def test_a_name_in_a_line_cannot_write_to_the_terminal():
    stand = Stand()
    stand.event(31, source=KERNEL, line="NVRM: Xid (PCI:0000:11:00): 31, name=\x1b[2J")

    assert "\x1b" not in stand.sentry.evidence(1.0)[0].lines[0]


def test_closing_lets_go_of_the_sources():
    stand = Stand()
    stand.sentry.close()

    assert all(lines.closed for lines in stand.lines.values())


def test_a_site_without_a_readable_catalogue_has_the_shipped_one(tmp_path, caplog):
    assert xid_catalogue(tmp_path / "not-there") == CATALOGUE
    assert "not-there" in caplog.text
