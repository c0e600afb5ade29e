"""Two agents on loopback with torchrun's flags for two nodes: one run, one incident."""

import socket
from contextlib import contextmanager

import pytest
from support.runs import JOBS, Run

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


def best_incident(both):
    incidents = [incident for run in both for incident in run.incidents()]
    assert len({incident["id"] for incident in incidents}) == 1
    return max(incidents, key=lambda incident: (incident["authority"], incident["rev"]))


def test_two_agents_share_run_generation_and_incident(tmp_path):
    with two_agents(tmp_path, JOBS / "train.py", "--steps", "30") as both:
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


def run_state(run):
    """Return the state of an agent whose group rank is not known beforehand."""
    import json

    from support.runs import wait_until

    def read():
        assert run.process.poll() is None, run.said()
        found = sorted(run.runs.glob("*/state*.json"))
        return json.loads(found[0].read_text()) if found else None

    return wait_until(read, what="a state file")
