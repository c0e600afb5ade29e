"""Real workers over gloo: one dies or raises, the job ends as it should, one incident says why."""

import subprocess

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
TRAIN = JOBS / "train.py"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_killed_rank_costs_one_incident_and_the_job_is_done(tmp_path, victim):
    # Every process of this run is started anew, as on a user's machine.
    with Run(tmp_path, TRAIN, "--steps", "40", popen=subprocess.Popen) as run:
        run.kill_rank(victim, at_step=8)
        code = run.finish()

        assert code == 0, run.said()
        assert all(f"rank {rank} done" in run.said() for rank in (0, 1))

    (incident,) = run.incidents()
    assert {"kind": "rank", "id": str(victim)} in incident["culprits"]
    assert {"kind": "rank", "id": str(1 - victim)} not in incident["culprits"]
    assert incident["state"] == "closed"
    assert incident["actions"] == ["restart"]
    phases = {"detect", "decide", "rendezvous", "init", "redo"}
    assert set(incident["lost_seconds_by_phase"]) == phases
    assert [p["outcome"] for p in run.payloads("attempt.ended")] == ["failed", "completed"]
    assert [p["steps_last"] for p in run.payloads("attempt.ended")][1] == 40
    assert [p["outcome"] for p in run.payloads("run.ended")] == ["completed"]
    (killed,) = [p for p in run.payloads("worker.exited") if p["rank"] == victim]
    assert (killed["signal"], killed["terminated"]) == ("SIGKILL", False)
    assert killed["last_step"] >= 8
    assert f"rank {victim} step {killed['last_step']}" in killed["log_tail"][-1]
    (caught_up,) = run.payloads("attempt.caught_up")
    assert caught_up["step"] == max(p["last_step"] for p in run.payloads("worker.exited")) + 1


def test_an_optimizer_without_a_step_leaves_the_step_unknown(tmp_path):
    with Run(tmp_path, TRAIN, "--steps", "20", "--optimizer", "SGD") as run:
        run.kill_rank(1, at_step=5)

        assert run.finish() == 0, run.said()

    first, second = run.payloads("attempt.first_step")
    assert (first["step"], first["step_source"]) == (None, "counted")
    assert run.payloads("attempt.ended")[1]["steps_last"] is None
    assert run.payloads("attempt.ended")[1]["beats"] == 20
    assert run.payloads("attempt.caught_up") == []
    (incident,) = run.incidents()
    assert incident["state"] == "closed"
    assert "redo" not in incident["lost_seconds_by_phase"]
    assert second["first_step_us"] > first["first_step_us"]


def test_a_script_that_raises_once_is_restarted_and_blamed(tmp_path):
    with Run(tmp_path, TRAIN, "--raise-at", "3", "--raise-in-generation", "0") as run:
        assert run.finish() == 0, run.said()

    (incident,) = run.incidents()
    assert incident["failure_class"] == "user_code.exception"
    assert {"kind": "rank", "id": "1"} in incident["culprits"]
    (raised,) = [p for p in run.payloads("worker.exited") if p["rank"] == 1]
    assert raised["exception_type"] == "ValueError"
    assert raised["exception_message"] == "bad batch at step 3"
    assert raised["last_step"] == 2
    assert not any("gpuops/worker" in line for line in raised["traceback"])


def test_a_rank_that_leaves_early_with_code_0_is_the_culprit(tmp_path):
    with Run(tmp_path, "--max-restarts=0", TRAIN, "--leave-at", "3") as run:
        assert run.finish() == 1

    (incident,) = run.incidents()
    assert incident["failure_class"] == "user_code.early_exit"
    assert {"kind": "rank", "id": "1"} in incident["culprits"]


def test_a_worker_that_ignores_sigterm_does_not_hold_the_restart_up(tmp_path):
    words = ("--stubborn", "--steps", "10", "--raise-at", "5", "--raise-in-generation", "0")
    with Run(tmp_path, TRAIN, *words, "--rank", "0", nproc=2) as run:
        assert run.finish() == 0, run.said()

    (failed_us,) = [e["t_us"] for e in run.events("run.phase") if e["payload"]["phase"] == "gather"]
    _, second = run.payloads("attempt.started")
    # torchrun gives a worker 30 s between SIGTERM and SIGKILL.
    assert (second["running_us"] - failed_us) / 1e6 < 25
    (stubborn,) = [p for p in run.payloads("worker.exited") if p["rank"] == 1]
    assert stubborn["signal"] == "SIGKILL"
    (incident,) = run.incidents()
    assert {"kind": "rank", "id": "0"} in incident["culprits"]


def test_a_rank_that_leaves_a_collective_out_on_purpose_hangs_the_first_generation_only(tmp_path):
    drill = {"GPUOPS_DRILL": "skip-collective:rank=1,step=3"}
    words = ("--allow-drills", "--hang-timeout=5", TRAIN, "--steps=6", "--pause=0.01")
    with Run(tmp_path, *words, env=drill) as run:
        assert run.finish() == 0, run.said()

    assert "the fault skip-collective:rank=1,step=3 is injected" in run.said()
    (incident,) = run.incidents()
    assert incident["failure_class"].startswith("hang.")
    assert [p["outcome"] for p in run.payloads("attempt.ended")] == ["failed", "completed"]
