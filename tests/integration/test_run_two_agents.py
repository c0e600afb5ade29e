"""Two agents on loopback with torchrun's flags for two nodes: one run, one incident."""

import re
from contextlib import contextmanager
from stat import S_IMODE

import pytest
from support import mock_nvml
from support.ports import free_port
from support.runs import JOBS, Run, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
TOKEN = {"GPUOPS_TOKEN": "4f" * 16}


@contextmanager
def two_agents(folder, *words):
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--local-addr=127.0.0.1"),
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    )
    home = {"GPUOPS_STATE": str(folder / "home")}  # which the nodes share, and so its token
    with (
        Run(folder / "a", *flags, *words, nproc=1, env=home | {"SLURMD_NODENAME": "nodea"}) as one,
        Run(folder / "b", *flags, *words, nproc=1, env=home | {"SLURMD_NODENAME": "nodeb"}) as two,
    ):
        yield one, two


# Its ranks do not wait for each other: what makes them stop at one step is the word alone.
ASKS_AT_EACH_STEP = """
import itertools, os, time
import gpuops
for step in itertools.count(1):
    gpuops.progress(step)
    if step == 60:  # for some seconds, so that the agents know the pace
        print("under way", flush=True)
    if gpuops.should_stop():
        print(f"rank {os.environ['RANK']} stops after {step}", flush=True)
        break
    time.sleep(0.05 if os.environ["RANK"] == "0" else 0.07)
"""


def holds(path, token):
    return path.name != "token" and token.encode() in path.read_bytes()


def test_a_node_with_a_token_of_its_own_ends_at_once_and_says_what_to_do(tmp_path):
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--health-gate=off")
    place = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    words = (*flags, place, JOBS / "plain.py")
    with Run(tmp_path / "a", *words, nproc=1) as one, Run(tmp_path / "b", *words, nproc=1) as two:
        refused = wait_until(lambda: ended(one, two), what="the end of one of them")
        assert refused.process.returncode == 64, refused.said()

    (line,) = refused.err.read_text().splitlines()
    assert "it has another token" in line
    assert f"is in {refused.folder}/state/token, which this node does not share" in line
    assert "export GPUOPS_TOKEN=$(openssl rand -hex 32) before srun" in line


def ended(*runs):
    return next((run for run in runs if run.process.poll() is not None), None)


def best_incident(both):
    incidents = [incident for run in both for incident in run.incidents()]
    assert len({incident["id"] for incident in incidents}) == 1
    return max(incidents, key=lambda incident: (incident["authority"], incident["rev"]))


def test_two_agents_share_run_generation_and_incident(tmp_path):
    with two_agents(tmp_path, JOBS / "train.py", "--steps", "200") as both:
        one, two = both
        victim = next(run for run in both if "1" in run_state(run)["pids"])
        victim.kill_rank(1, at_step=6)

        assert [run.finish(120) for run in both] == [0, 0], one.said() + two.said()

    assert S_IMODE((tmp_path / "home" / "token").stat().st_mode) == 0o600
    token = (tmp_path / "home" / "token").read_text().strip()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and holds(path, token)]
    events = [event for run in both for event in run.events()]
    assert len({event["run_id"] for event in events if event["run_id"]}) == 1
    assert one.directory.name == two.directory.name
    assert {event["attempt"] for event in events if event["kind"] == "attempt.started"} == {0, 1}
    assert len([event for event in events if event["kind"] == "run.started"]) == 1
    assert len([event for event in events if event["kind"] == "run.ended"]) == 1
    assert {"kind": "rank", "id": "1"} in best_incident(both)["culprits"]


def test_a_node_whose_rank_leaves_with_code_0_while_others_train_is_the_culprit(tmp_path):
    """It reports success, and the others only that a peer is gone."""
    words = ("--max-restarts=0", JOBS / "train.py", "--leave-at", "3")
    with two_agents(tmp_path, *words) as both:
        assert [run.finish(120) for run in both] == [1, 1], "".join(run.said() for run in both)

    best = best_incident(both)
    assert best["failure_class"] == "user_code.early_exit"
    assert {"kind": "rank", "id": "1"} in best["culprits"]
    assert {"kind": "rank", "id": "0"} not in best["culprits"]
    assert best["state"] == "closed"


@pytest.mark.cc
def test_a_node_that_fails_its_check_ends_a_job_of_fixed_size_with_its_finding(tmp_path):
    """Nobody can take its place: the others wait neither for it nor for the join timeout."""
    mock, healthy = mock_nvml.build(tmp_path), mock_nvml.shape("h100", 2)
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--local-addr=127.0.0.1")
    words = (*flags, f"--rdzv-endpoint=127.0.0.1:{free_port()}", JOBS / "plain.py")
    well = {**TOKEN, "SLURMD_NODENAME": "nodea", **mock.env(healthy)}
    sick = {**TOKEN, "SLURMD_NODENAME": "nodeb", **mock.env(healthy + "\nset 1 remapped_failure 1")}
    with (
        Run(tmp_path / "a", *words, nproc=1, env=well) as one,
        Run(tmp_path / "b", *words, nproc=1, env=sick) as two,
    ):
        assert [one.finish(), two.finish()] == [85, 86], one.said() + two.said()

    assert "the run was preempted: gpu_hw.row_remap on nodeb: the check" in one.said()
    (made,) = [p["decision"] for run in (one, two) for p in run.payloads("decision.made")]
    assert (made["rule"], made["cause"]["kind"]) == ("nodes.exhausted", "gate_failed")
    classes = {incident["failure_class"] for run in (one, two) for incident in run.incidents()}
    assert classes == {"gpu_hw.row_remap"}


def test_all_ranks_stop_at_one_step_when_only_a_spare_is_asked_to_stop(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(ASKS_AT_EACH_STEP)
    flags = ("--nnodes=1", "--spares=1", "--rdzv-backend=c10d", "--rdzv-id=job")
    place = ("--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", script)
    with (
        Run(tmp_path / "a", *flags, *place, env=TOKEN | {"SLURMD_NODENAME": "nodea"}) as one,
        Run(tmp_path / "b", *flags, *place, env=TOKEN | {"SLURMD_NODENAME": "nodeb"}) as two,
    ):
        both = [one, two]
        seated = wait_until(
            lambda: next((run for run in both if "under way" in run.said()), None), what="a step"
        )
        seated.wait_for_output("[default1]:under way")
        (spare,) = (run for run in both if run is not seated)
        spare.signal()

        assert [run.finish(60) for run in both] == [85, 85], one.said() + two.said()

    ends = re.findall(r"rank (\d) stops after (\d+)", seated.out.read_text())
    assert {rank for rank, _step in ends} == {"0", "1"}
    assert len({step for _rank, step in ends}) == 1, ends


def run_state(run):
    """Return the state of an agent whose group rank is not known beforehand."""
    import json

    from support.runs import wait_until

    def read():
        assert run.process.poll() is None, run.said()
        found = sorted(run.runs.glob("*/state*.json"))
        return json.loads(found[0].read_text()) if found else None

    return wait_until(read, what="a state file")
