"""Ranks that stand still: found in time, named, looked at before they are ended.

What tells one kind of standstill from another has tests of its own; here a whole run meets each.
"""

import json
import os
import time

import pytest
from support.accounts import BOUND_S, check_account
from support.faulty import FaultyRun, culprits

pytestmark = [pytest.mark.quick_disk, pytest.mark.torch, pytest.mark.timeout(240)]
HANG = ("--hang-timeout", 10)


def test_a_hang_is_seen_in_time_and_everybody_was_looked_at(tmp_path):
    """Mode 3: one rank of three on two nodes sleeps, the others wait for it in a collective."""
    env = {"JOB_STEPS": "30", "JOB_AT": "1:8:0", "JOB_DEED": "sleep"}
    options = {"n_nodes": 2, "nproc": 2, "script": "elastic_train.py", "env": env}
    with FaultyRun(tmp_path, HANG, (), **options) as run:
        run.start()
        assert run.finish() == {"n0": 0, "n1": 0}, run.said()

    steps = [line for line in run.lines() if line.what == "step" and line.generation == 0]
    stopped = next(e for e in run.events("run.phase") if e["payload"]["phase"] == "gather")
    first = next(line for line in run.lines() if line.generation == 1)
    assert (first.mono_ns - steps[-1].mono_ns) / 1e9 < BOUND_S
    assert stopped["payload"]["generation"] == 0
    incident = run.incident("hang.no_progress")
    assert ("rank", "1") in culprits(incident)
    assert "rank 1 has not called all_reduce(1 Float), call " in incident["culprit_how"]
    assert not {("rank", "0"), ("rank", "2"), ("rank", "3")} & culprits(incident)
    looked_at = {
        item["entity"]["id"]
        for told in run.payloads("incident.recorded")
        for item in told["evidence"]
        if told["id"] == incident["id"] and item["entity"] and item["lines"]
    }
    assert looked_at == {"0", "1", "2", "3"}, "each node tells of its own ranks"
    assert incident["actions"] == ["restart"]
    run.check_ledger(30)


@pytest.mark.parametrize(
    ("deed", "failure_class"),
    [
        ("asleep", "hang.no_progress"),
        pytest.param("interpreter", "hang.gil_held", marks=pytest.mark.soak),
    ],
)
def test_a_rank_without_torch_that_hangs_is_named_by_what_it_does(tmp_path, deed, failure_class):
    """Modes 3 and 4: detected within the limit and some seconds to look; a restart follows."""
    words = (deed, "--rank", 1, "--at", 6, "--generation", 0)
    with FaultyRun(tmp_path, HANG, words) as run:
        run.start()
        assert run.ended() == 0, run.said()

    incident = check_account(run, failure_class, ("rank", "1"), actions=["restart"])
    # The limit of 10 s, up to 8 to look, up to 3 for others to speak; and a busy machine.
    assert incident["lost_seconds_by_phase"]["detect"] < 30
    lines = [line for item in incident["evidence"] for line in item["lines"]]
    assert any("faulty.py" in line for line in lines) or deed == "interpreter"
    run.check_ledger(20)


def test_a_worker_in_the_kernel_takes_its_node_out(tmp_path):
    """Mode 5: nothing can be started where a process cannot be ended; the other node goes on."""
    words = ("kernel", "--rank", 1, "--at", 6, "--generation", 0)
    options = {"n_nodes": 2, "nproc": 1, "nnodes": "1:2"}
    with FaultyRun(tmp_path, HANG, words, **options) as run:
        run.start()
        codes = run.finish()

    assert sorted(codes.values()) == [0, 86], run.said()
    out = next(name for name, code in codes.items() if code == 86)
    blamed = ("rank", "1"), ("node", out)
    check_account(run, "hang.d_state", *blamed, actions=["exclude-node", "restart"])
    assert run.rules() == ["node.excluded"]
    assert {line.rank for line in run.lines() if line.generation == 1} == {0}
    assert run.orphans() == set()


@pytest.mark.soak
def test_a_worker_in_the_kernel_on_the_only_node_has_the_job_go_elsewhere(tmp_path):
    """Mode 5: exit 86."""
    words = ("kernel", "--rank", 1, "--at", 6, "--generation", 0)
    with FaultyRun(tmp_path, HANG, words) as run:
        run.start()
        assert run.ended() == 86, run.said()

    assert run.rules() == ["node.unhealthy"]
    blamed = ("rank", "1"), ("node", "n0")
    check_account(run, "hang.d_state", *blamed, actions=["exclude-node", "requeue"])
    assert run.generations() == [0]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("deed", "failure_class"), [("asleep", "hang.no_progress"), ("interpreter", "hang.gil_held")]
)
def test_a_hang_is_found_by_a_learned_limit_in_little_more_than_its_minute(
    tmp_path, deed, failure_class
):
    """The patience with who is at work does not put off who is not."""
    with FaultyRun(tmp_path, (), (deed, "--rank", 1, "--at", 12, "--generation", 0)) as run:
        run.start()
        assert run.ended(limit_s=200) == 0, run.said()

    incident = run.incident(failure_class)
    assert ("rank", "1") in culprits(incident)
    # The limit of 60 s, samples until 2 s after it; and a busy machine.
    assert 60 <= incident["lost_seconds_by_phase"]["detect"] < 80


DETECTORS = """
import os, time
from pathlib import Path

def sums(told):
    while told["node"] == "n1":
        time.sleep(0.02)
        if Path(os.environ["JOB_DIR"], "condemned").exists():
            (rank,) = map(int, told["ranks"])
            yield {"why": "its sums differ", "ranks": [rank], "blames_node": True, "ends": True}
            return

def pace(told):
    if told["node"] == "n2":
        yield {"why": "slower than the others", "blames_node": True}

def chatter(told):
    while True:
        yield {"why": [told] * 100, "ends": True}

def broken(told):
    os.kill(os.getpid(), 11)
"""


def installed(folder):
    """Install the detectors in *folder*; return the environment that finds them."""
    metadata = folder / "sums-1.dist-info"
    metadata.mkdir(parents=True)
    (folder / "site_sums.py").write_text(DETECTORS)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sums\nVersion: 1\n")
    names = ("sums", "pace", "chatter", "broken")
    lines = ["[gpuops.detectors]", *(f"{name} = site_sums:{name}" for name in names)]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}:{before}" if before else str(folder)}


def test_detectors_take_out_a_node_at_once_and_another_at_that_restart(tmp_path):
    """Mode 21: of three nodes one is doubted, which ends nothing, then one is condemned.

    The restart, in seconds, does without both, whatever other detectors do.
    """
    options = {"n_nodes": 3, "nproc": 1, "nnodes": "1:3", "env": installed(tmp_path / "site")}
    with FaultyRun(tmp_path, (), ("none", "--steps", 5000, "--pause", 0.05), **options) as run:
        run.start()
        (doubt,) = run.wait(lambda: run.events("node.doubted"), "a doubt")
        told = run.host.gpuops("run", "status", "--json", "--run-dir", run.host.runs)
        (run.job / "condemned").touch()
        condemned_ns = time.monotonic_ns()
        took_s = run.seconds_to_generation(1, condemned_ns)
        run.enough()
        assert run.finish() == {"n0": 0, "n1": 86, "n2": 86}, run.said()

    status = json.loads(told.stdout)
    assert (status["generation"], status["phase"]) == (0, "run")
    assert status["doubted"] == {"n2": "pace: slower than the others"}
    assert took_s < 30
    ranks = {told["node"]: str(told["rank"]) for told in run.payloads("worker.exited")}
    doubted, condemned = [i for i in run.incidents() if i["failure_class"] == "site.check"]
    assert culprits(condemned) == {("rank", ranks["n1"]), ("node", "n1")}
    assert condemned["title"] == "a detector reports n1: sums: its sums differ"
    assert condemned["actions"] == ["exclude-node", "restart"]
    (made,) = run.decisions()
    assert made["decision"]["rule"] == "node.excluded"
    assert set(made["decision"]["exclude"]) == {"n1", "n2"}
    assert made["cluster"]["doubted"] == {"n2": doubt["payload"]["reason"]}
    assert doubted["title"] == "n2 is suspected: pace: slower than the others"
    assert culprits(doubted) == {("node", "n2")}
    assert (doubted["state"], doubted["actions"]) == ("closed", ["exclude-node"])
    assert "the run failed" not in run.said(), "it goes on"
    assert "detector chatter failed: a verdict without `why`" in run.said()
    assert run.orphans() == set()
