"""Two agents on loopback with torchrun's flags for two nodes: one run, one incident."""

import re
import socket
from contextlib import contextmanager

import pytest
from support.runs import JOBS, Run, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def two_agents(folder, *words):
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--local-addr=127.0.0.1"),
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    )
    with (
        Run(folder / "a", *flags, *words, nproc=1, env={"SLURMD_NODENAME": "nodea"}) as one,
        Run(folder / "b", *flags, *words, nproc=1, env={"SLURMD_NODENAME": "nodeb"}) as two,
    ):
        yield one, two


# Its ranks do not wait for each other: what makes them stop at one step is the word alone.
ASKS_AT_EACH_STEP = """
import itertools, os, time
import gpuops
for step in itertools.count(1):
    gpuops.progress(step)
    if step == 20:
        print("under way", flush=True)
    if gpuops.should_stop():
        print(f"rank {os.environ['RANK']} stops after {step}", flush=True)
        break
    time.sleep(0.05 if os.environ["RANK"] == "0" else 0.07)
"""


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


def test_all_ranks_stop_at_one_step_when_only_a_spare_is_asked_to_stop(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(ASKS_AT_EACH_STEP)
    flags = ("--nnodes=1", "--spares=1", "--rdzv-backend=c10d", "--rdzv-id=job")
    place = ("--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", script)
    with (
        Run(tmp_path / "a", *flags, *place, env={"SLURMD_NODENAME": "nodea"}) as one,
        Run(tmp_path / "b", *flags, *place, env={"SLURMD_NODENAME": "nodeb"}) as two,
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
