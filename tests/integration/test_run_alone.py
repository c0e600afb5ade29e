"""A run on one node, as the network sees it."""

import gzip
import json

import psutil
import pytest
from support.runs import JOBS, Run, wait_until

from gpuops.cli.main import run_command

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
TRAIN = JOBS / "train.py"


def listeners(pid):
    found = psutil.Process(pid).net_connections("tcp")
    return {tuple(entry.laddr) for entry in found if entry.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("flags", "n_listeners"),
    [([], 1), pytest.param(["--standalone"], 1, marks=pytest.mark.soak), (["--http=off"], 0)],
    ids=["plain", "standalone", "without http"],
)
def test_the_agent_only_answers_this_machine_and_a_killed_rank_recovers(
    tmp_path, flags, n_listeners
):
    with Run(tmp_path, *flags, "--record-steps", TRAIN, "--steps", "60") as run:
        run.kill_rank(1, at_step=8)
        leader = run.state(generation=1)["pids"]["0"]
        # The workers' own store is as torchrun would have it.
        wait_until(lambda: listeners(leader), what="the store of rank 0")

        ours = listeners(run.process.pid)
        assert {address for address, _port in ours} <= {"127.0.0.1"}
        assert len(ours) == n_listeners
        assert run.finish() == 0, run.said()

    assert [p["outcome"] for p in run.payloads("attempt.ended")] == ["failed", "completed"]
    assert run.state()["phase"] == "ended"
    # Both generations have a trace, of which step times alone name nobody.
    for generation, step_last in ((0, 8), (1, 60)):
        path = run.directory / f"generation-{generation}" / "steps-0.jsonl.gz"
        head, *lines = [
            json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()
        ]
        steps = [line for line in lines if "monitor" not in line]
        assert (head["generation"], head["ranks"]) == (generation, [0, 1])
        assert max(step["step"] for step in steps) >= step_last
        assert {step["rank"] for step in steps} == {0, 1}
        assert all(step["optimizer_us"] > 0 for step in steps)
        assert path.stat().st_mode & 0o777 == 0o600
    assert run_command(["detect", "replay", str(run.directory)]) == 3


def test_two_runs_at_once_do_not_meet(tmp_path):
    with (
        Run(tmp_path / "a", TRAIN, "--steps", "20") as one,
        Run(tmp_path / "b", TRAIN, "--steps", "20") as two,
    ):
        assert [run.finish() for run in (one, two)] == [0, 0], one.said() + two.said()

    for run in (one, two):
        assert [p["world_size"] for p in run.payloads("attempt.started")] == [2]


def test_standalone_with_several_nodes_is_refused_at_once(tmp_path):
    with Run(tmp_path, "--standalone", "--nnodes=2", TRAIN) as run:
        assert run.finish() == 64

    (line,) = run.err.read_text().splitlines()
    assert "--nnodes=2" in line
