"""What an agent reports of its node: the node is blamed only by evidence on the node itself."""

import random
from dataclasses import replace

import pytest
from support.exits import NODE, PEER_CLOSED, RULES, finished, killed, raised, terminated, worker

from gpuops.incident.cause import judge_exits
from gpuops.incident.decision import EXITS_MAX, NodeReport, ReportKind
from gpuops.incident.kernel import JobXidFilter, job_lines
from gpuops.incident.report import build_node_report
from gpuops.model import Confidence, FailureClass, Role, Side

XID_79 = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
OOM = "Memory cgroup out of memory: Killed process 4001 (python) total-vm:1kB"
PORT = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local"
    " network address. port: 29500, code: -98, name: EADDRINUSE, message: address already in use"
)


def reported(*exits, **changes):
    seen = {k: changes.pop(k) for k in ("kernel_lines", "own_gpus") if k in changes}
    judged = judge_exits(exits, changes.pop("rules", RULES), **seen)
    return build_node_report(judged, **{"node": NODE, "generation": 3, **changes})


def names(report):
    return [str(entity) for entity in report.culprits]


def test_an_exception_names_its_rank_and_not_the_node():
    report = reported(raised(1), terminated(0), checkpoint_step=50, gpu_uuids={1: "GPU-b"})

    assert report.kind is ReportKind.WORKERS_FAILED
    assert (report.node, report.generation) == (NODE, 3)
    assert report.failure_class is FailureClass.USER_EXCEPTION
    assert report.side is Side.USER
    assert names(report) == ["rank 1"]
    assert not report.blames_node
    assert (report.last_step, report.checkpoint_step, report.has_stepped) == (57, 50, True)
    first, second = report.ends
    assert (first.rank, first.role, first.step, first.gpu_uuid) == (1, Role.ROOT, 57, "GPU-b")
    assert first.signature == "ValueError at train.py:88 in main: bad batch"
    assert first.summary == "rank 1 raised ValueError: bad batch"
    assert first.log_path.endswith("rank1/stderr.log")
    assert (second.role, second.signature) == (Role.TEARDOWN, None)


def test_a_sigkill_does_not_blame_the_node():
    report = reported(killed(1), terminated(0))

    assert report.failure_class is FailureClass.SIGKILL_PROBABLE
    assert not report.blames_node
    assert report.ends[0].signature is None


@pytest.mark.parametrize(
    ("what", "blames"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("RuntimeError: GPU is lost", True),
        ("RuntimeError: Driver/library version mismatch", True),
        ("RuntimeError: CUDA error: invalid device ordinal", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("RuntimeError: CUDA error: unspecified launch failure", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False),
        ("OSError: [Errno 5] Input/output error: '/shared/x'", False),
        ("OSError: [Errno 30] Read-only file system: '/shared/x'", False),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("KeyError: 'x'", False),
        (f"RuntimeError: {PEER_CLOSED}", False),
    ],
)
def test_an_exception_blames_the_node_only_with_the_hardware_s_own_words(what, blames):
    report = reported(raised(1, what), terminated(0))

    assert report.blames_node is blames
    assert (f"node {NODE}" in names(report)) is blames


def test_the_kernel_log_blames_the_node():
    report = reported(killed(1), terminated(0), kernel_lines=[XID_79])

    assert report.failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert report.blames_node


def test_of_a_node_that_was_only_stopped_the_log_tells_by_the_jobs_own_gpus():
    for own_gpus in ((), ["0000:5e:00.0"]):
        report = reported(terminated(0), kernel_lines=[XID_79], own_gpus=own_gpus)
        assert (report.kind, report.blames_node) == (ReportKind.STOPPED, False)
        assert report.failure_class is FailureClass.UNRESOLVED

    report = reported(terminated(0), kernel_lines=[XID_79], own_gpus=["0000:3b:00.0"])
    assert (report.failure_class, report.blames_node) == (FailureClass.GPU_FELL_OFF_BUS, True)


def test_xids_of_other_jobs_gpus_and_old_ones_are_left_out_of_the_log():
    others = XID_79.replace("3b", "5e")
    lines = ["eth0: up", others, XID_79, OOM]
    mine = JobXidFilter(addresses=frozenset({"0000:3b:00.0"}))

    assert job_lines(lines, None) == tuple(lines)
    assert job_lines(lines, mine) == ("eth0: up", XID_79, OOM)
    old = replace(mine, stale=frozenset({("0000:3b:00.0", 79), ("0000:3b:00.0", 31)}))
    assert job_lines(lines, old) == ("eth0: up", OOM)


def test_an_out_of_memory_kill_does_not():
    report = reported(killed(1), terminated(0), kernel_lines=[OOM])

    assert report.failure_class is FailureClass.CGROUP_OOM
    assert not report.blames_node


def test_a_taken_port_is_infrastructure():
    kind, _, message = PORT.partition(": ")
    report = reported(raised(0, f"{kind}: {message}"), terminated(1))

    assert report.failure_class is FailureClass.PORT_TAKEN
    assert report.is_infrastructure


def test_symptoms_are_only_that():
    report = reported(raised(0, f"RuntimeError: {PEER_CLOSED}"), terminated(1))

    assert report.confidence is Confidence.SYMPTOM_ONLY
    assert report.culprits == ()
    assert {end.role for end in report.ends} == {Role.SYMPTOM, Role.TEARDOWN}


def test_what_follows_from_the_first_failure_is_no_root():
    report = reported(raised(0, at_s=100.0), raised(1, "TypeError: y", at_s=105.0))

    assert [end.role for end in report.ends] == [Role.ROOT, Role.SYMPTOM]


def test_without_a_failure_the_node_was_stopped_or_done():
    assert reported(terminated(0), terminated(1)).kind is ReportKind.STOPPED
    assert reported(finished(0), finished(1)).kind is ReportKind.DONE
    assert reported(finished(0), terminated(1)).kind is ReportKind.STOPPED
    assert reported().kind is ReportKind.STOPPED


def test_the_sentry_s_kind_stays():
    report = reported(terminated(0), kind=ReportKind.HANG)

    assert report.kind is ReportKind.HANG
    assert reported(kind=ReportKind.START_FAILED).is_infrastructure


def test_before_the_first_step():
    report = reported(worker(0, beats=0, last_step=None, exit_code=3))

    assert not report.has_stepped
    assert report.last_step is None
    assert reported(worker(0, last_step=None, beats=3)).has_stepped


def test_the_order_of_the_exits_does_not_matter():
    exits = [raised(1), killed(2, at_s=101.0), terminated(0), finished(3)]
    wanted = reported(*exits)
    for seed in range(10):
        random.Random(seed).shuffle(exits)
        assert reported(*exits) == wanted


def test_a_report_survives_the_board_and_keeps_the_culprits():
    exits = [terminated(rank) for rank in range(200)] + [raised(200)]
    back = NodeReport.from_json(reported(*exits).to_json())

    assert len(back.ends) == EXITS_MAX
    assert back.ends[0].rank == 200
