"""``gpuops run --preflight=quick``: the real burn-in, whose program for products is planted."""

import psutil
import pytest
from support.planted_burnin import plant
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
PLAIN = JOBS / "plain.py"


@pytest.fixture
def run(tmp_path):
    """Return what starts a run in which the products of each part are as *planted*."""

    def start(planted):
        env = plant(tmp_path / "site", planted)
        flags = ("--preflight=quick", "--health-gate=off", "--max-restarts=0")
        return Run(tmp_path / "run", *flags, PLAIN, nproc=1, env=env)

    return start


def test_a_node_that_passes_its_burn_in_trains(run):
    with run("right") as started:
        assert started.finish() == 0, started.said()

    assert "testing this node for 20 s before the first start" in started.said()
    assert "gpuops: this node passed its burn-in" in started.said()
    assert started.payloads("run.ended")[0]["exit_code"] == 0


def test_a_burn_in_that_is_late_keeps_nobody_out_and_leaves_nothing_behind(run):
    with run("late") as started:
        assert started.finish() == 0, started.said()

    assert "gpuops: the burn-in gave no answer in 5 s: the node joins" in started.said()
    assert started.payloads("run.ended")[0]["exit_code"] == 0
    planted = str(started.folder.parent / "site")
    assert not [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "gpuops.worker.burnin" in (process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("PYTHONPATH") == planted
    ]


def test_a_node_with_a_wrong_result_does_not_join_and_the_run_says_why(run):
    with run("wrong") as started:
        assert started.finish() == 86, started.said()

    assert "burnin/gemm failed: fp32: 3 elements differ" in started.said()
    assert started.payloads("attempt.started") == []
    (report,) = started.payloads("agent.report")
    (incident,) = started.incidents()
    classes = report["failure_class"], incident["failure_class"]
    assert report["kind"] == "gate_failed"
    assert classes in [("host_hw.cpu",) * 2, ("gpu_hw.wrong_result",) * 2]
    assert {culprit["kind"] for culprit in incident["culprits"]} in [
        {"cpu", "node"},
        {"gpu", "node"},
    ]
