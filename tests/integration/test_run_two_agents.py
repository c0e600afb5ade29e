"""Two agents on loopback with torchrun's flags for two nodes: one run, one incident."""

import socket

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_agents_share_run_generation_and_incident(tmp_path):
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--local-addr=127.0.0.1"),
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        *(JOBS / "train.py", "--steps", "30"),
    )
    with (
        Run(tmp_path / "a", *flags, nproc=1, env={"SLURMD_NODENAME": "nodea"}) as one,
        Run(tmp_path / "b", *flags, nproc=1, env={"SLURMD_NODENAME": "nodeb"}) as two,
    ):
        both = (one, two)
        victim = next(run for run in both if "1" in run_state(run)["pids"])
        victim.kill_rank(1, at_step=6)

        assert [run.finish(120) for run in both] == [0, 0], one.said() + two.said()

    events = [event for run in both for event in run.events()]
    assert len({event["run_id"] for event in events if event["run_id"]}) == 1
    assert one.directory.name == two.directory.name
    assert {event["attempt"] for event in events if event["kind"] == "attempt.started"} == {0, 1}
    assert len([event for event in events if event["kind"] == "run.started"]) == 1
    assert len([event for event in events if event["kind"] == "run.ended"]) == 1
    incidents = [incident for run in both for incident in run.incidents()]
    assert len({incident["id"] for incident in incidents}) == 1
    best = max(incidents, key=lambda incident: (incident["authority"], incident["rev"]))
    assert {"kind": "rank", "id": "1"} in best["culprits"]


def run_state(run):
    """Return the state of an agent whose group rank is not known beforehand."""
    import json

    from support.runs import wait_until

    def read():
        assert run.process.poll() is None, run.said()
        found = sorted(run.runs.glob("*/state*.json"))
        return json.loads(found[0].read_text()) if found else None

    return wait_until(read, what="a state file")
