"""What an answer of the preflight suite, or none, means for a node that wants to join."""

import json

import pytest

from gpuops.agent.monitors.preflight import judge_burnin, judge_check
from gpuops.host.process.command import CommandEnd
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason

NODE = Entity(EntityKind.NODE, "n1")
GPU = Entity(EntityKind.GPU, "GPU-1")
WELL = Finding(check="memory", entity=NODE, status=Status.PASS, message="plenty")
LOST = Finding(
    check="gpu_lost",
    entity=GPU,
    status=Status.FAIL,
    message="GPU 1: the driver calls it lost",
    failure_class=FailureClass.GPU_FELL_OFF_BUS,
)
LEFT = Finding(
    check="gpu_processes",
    entity=GPU,
    status=Status.FAIL,
    message="processes are still on it",
    failure_class=FailureClass.HOST_LEFTOVERS,
)
HANG = Finding(
    check="gpu_driver",
    entity=GPU,
    status=Status.UNKNOWN,
    message="nvmlDeviceGetPowerUsage gave no answer in 17.6 s; try 1 of this boot",
    unknown_reason=UnknownReason.TIMEOUT,
)
SLOW_DISK = Finding(
    check="disk_space",
    entity=NODE,
    status=Status.UNKNOWN,
    message="no answer",
    unknown_reason=UnknownReason.TIMEOUT,
)


def judged(exit_code, *findings, **end):
    output = json.dumps({"findings": [item.to_json() for item in findings]}).encode()
    return judge_check(CommandEnd(exit_code=exit_code, output=output, seconds=0.3, **end))


def test_a_healthy_node_joins():
    result = judged(0, WELL)

    assert (result.passed, result.reason, result.findings) == (True, "", ())


def test_a_check_that_fails_keeps_the_node_out_and_names_the_culprit():
    result = judged(1, WELL, LOST)

    assert not result.passed
    assert result.reason == "the check gpu_lost failed: GPU 1: the driver calls it lost"
    report = result.to_report("n1", 4)
    assert (report.kind, report.generation, report.blames_node) == (ReportKind.GATE_FAILED, 4, True)
    assert report.failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert report.culprits == (GPU, NODE)
    assert NodeReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize("listed", [True, False])
def test_a_gpu_that_is_listed_no_more_is_gone_and_one_that_a_user_made_up_is_not(listed):
    gone = Finding(
        check="gpu_lost",
        entity=NODE,
        status=Status.WARN,
        message="asked about GPU-1, which NVML does not list",
        failure_class=FailureClass.GPU_MISSING,
    )
    output = json.dumps({"findings": [gone.to_json()]}).encode()

    assert judge_check(CommandEnd(exit_code=0, output=output), listed=listed).passed is not listed


def test_processes_on_a_gpu_are_not_judged_here():
    assert judged(1, WELL, LEFT).passed
    assert judged(1, WELL, LEFT).findings == ("fail gpu_processes: processes are still on it",)


def test_a_call_that_gave_no_answer_is_a_hang_of_the_driver():
    result = judged(3, WELL, HANG)

    assert (result.passed, result.hung) == (False, True)
    assert result.failure_class is FailureClass.GPU_DRIVER_HANG
    assert result.culprits == (GPU,)
    assert "nvmlDeviceGetPowerUsage gave no answer" in result.reason


def test_a_failure_decides_before_a_hang():
    assert judged(1, HANG, LOST).failure_class is FailureClass.GPU_FELL_OFF_BUS


def test_no_answer_at_all_is_a_hang():
    result = judge_check(CommandEnd(exit_code=None, seconds=20.0))

    assert (result.passed, result.hung) == (False, True)
    assert result.reason == "the health check gave no answer in 20 s"


def test_a_check_without_an_answer_blames_no_driver_where_there_is_no_nvidia_device():
    result = judge_check(CommandEnd(exit_code=None, seconds=20.0), has_device=False)

    assert (result.passed, result.hung) == (True, False)
    assert "no NVIDIA device is on the PCI bus" in result.reason


def test_what_cannot_be_judged_keeps_nobody_out():
    result = judged(3, WELL, SLOW_DISK)

    assert result.passed
    assert result.reason == "not all was judged: unknown disk_space: no answer"


@pytest.mark.parametrize(
    "output",
    [b"", b"{", b"7", b"[]", b"{}", b'{"findings": 3}', b"\xff" * 9, b"[" * 99999],
    ids=["nothing", "half", "number", "list", "empty", "no-list", "bytes", "deep"],
)
@pytest.mark.parametrize("exit_code", [0, 1, 3, 64, 70, 75, 127, -9, -11])
def test_a_failure_of_gpuops_is_no_failure_of_the_node(exit_code, output):
    end = CommandEnd(exit_code=exit_code, output=output, errors=b"x\ngpuops: no such suite\n")
    result = judge_check(end)

    assert result.passed
    how = f"exit code {exit_code}" if exit_code >= 0 else f"ended by signal {-exit_code}"
    assert result.reason == f"the health check gave no result ({how}: gpuops: no such suite)"


@pytest.mark.parametrize("key", ["entity", "status", "failure_class", "message"])
def test_a_finding_of_a_newer_form_is_survived(key):
    body = LOST.to_json() | {key: 7}
    output = json.dumps({"findings": [body, 3, {}]}).encode()
    result = judge_check(CommandEnd(exit_code=1, output=output))

    assert result.passed == (key == "status")


WRONG = Finding(
    check="burnin/gemm",
    entity=GPU,
    status=Status.FAIL,
    message="dtype=bf16: its result differs",
    failure_class=FailureClass.GPU_WRONG_RESULT,
)
IN_USE = Finding(
    check="burnin/parts",
    entity=NODE,
    status=Status.UNKNOWN,
    message="no GPU was tested: none is free",
    unknown_reason=UnknownReason.NOT_SUPPORTED,
)
NO_BASELINE = Finding(check="burnin/baseline", entity=NODE, status=Status.SKIP, message="none")
SLOW = Finding(
    check="burnin/gemm", entity=GPU, status=Status.WARN, message="13 % worse than the others"
)


def burnin_end(exit_code, *findings, **end):
    output = json.dumps({"findings": [item.to_json() for item in findings]}).encode()
    return judge_burnin(CommandEnd(exit_code=exit_code, output=output, seconds=30.0, **end))


def test_a_wrong_result_under_load_keeps_the_node_out_with_its_class():
    result = burnin_end(1, SLOW, WRONG)

    assert result.reason == "the check burnin/gemm failed: dtype=bf16: its result differs"
    report = result.to_report("n1", 0)
    assert (report.kind, report.failure_class) == (
        ReportKind.GATE_FAILED,
        FailureClass.GPU_WRONG_RESULT,
    )
    assert report.culprits == (GPU, NODE)


def test_what_only_warns_under_load_or_is_not_tested_is_said_and_the_node_joins():
    result = burnin_end(3, NO_BASELINE, SLOW, IN_USE)

    assert result.passed
    assert result.reason == (
        "warn burnin/gemm: 13 % worse than the others; "
        "unknown burnin/parts: no GPU was tested: none is free"
    )


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"exit_code": None, "seconds": 30.0}, "gave no answer in 30 s: the node joins"),
        ({"exit_code": 75, "errors": b"burnin (pid 7) holds it"}, "(exit code 75: burnin (pid 7)"),
        ({"exit_code": -9}, "gave no result (ended by signal 9)"),
    ],
)
def test_a_burn_in_that_cannot_be_judged_keeps_nobody_out(end, reason):
    result = judge_burnin(CommandEnd(**end))

    assert result.passed
    assert reason in result.reason
