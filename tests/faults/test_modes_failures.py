"""Workers that fail: by a code, by a signal, by a collective's watchdog, again and again.

Each is a failure mode with its bound, its incident and its exit code.
"""

import pytest
from support.accounts import check_account
from support.faulty import FaultyRun, culprits

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
ONCE = ("--rank", 1, "--at", 6, "--generation", 0)


def test_an_exit_code_is_one_incident_and_one_restart(tmp_path):
    """Mode 1: on one node; it is the failing rank's, and nobody else's."""
    with FaultyRun(tmp_path, (), ("code", *ONCE)) as run:
        run.start()
        assert run.ended() == 0, run.said()

    assert len(run.incidents()) == 1
    incident = check_account(run, "user_code.exception", ("rank", "1"), actions=["restart"])
    assert ("rank", "0") not in culprits(incident)
    assert incident["state"] == "closed"
    assert "exited with code 7" in incident["title"]
    assert run.generations() == [0, 1]
    run.check_ledger(20)


@pytest.mark.parametrize(
    ("deed", "failure_class"),
    [("exit:7", "user_code.exception"), ("signal:SIGKILL", "host_mem.sigkill_probable")],
)
def test_the_workers_of_another_node_stop_at_once_and_are_not_blamed(tmp_path, deed, failure_class):
    """Mode 1: what gloo's peers raise when they lose the connection is no cause."""
    env = {"JOB_STEPS": "25", "JOB_AT": "1:6:0", "JOB_DEED": deed}
    with FaultyRun(tmp_path, (), (), n_nodes=2, nproc=1, script="elastic_train.py", env=env) as run:
        run.start()
        assert run.finish() == {"n0": 0, "n1": 0}, run.said()

    exits = {ended["rank"]: ended for ended in run.payloads("worker.exited")}
    assert 1 in exits  # the other is stopped where it has not raised a moment later
    ended_us = [event["t_us"] for event in run.events("attempt.ended")]
    assert len(ended_us) == 4
    # Sooner than a node could be taken for lost, after 15 s.
    assert abs(ended_us[0] - ended_us[1]) < 12e6
    assert len(run.incidents()) == 1
    blamed = ("rank", "1"), ("node", exits[1]["node"])
    incident = check_account(run, failure_class, *blamed, actions=["restart"])
    assert ("rank", "0") not in culprits(incident)
    assert run.rules() == ["restart"]
    run.check_ledger(25)


def logs_of(run):
    return [word for word in run.decisions()[-1]["decision"]["reason"].split() if "/rank" in word]


@pytest.mark.parametrize(
    ("at", "rule"), [(1, "software.before_first_step"), (4, "software.same_step")]
)
def test_the_same_exception_twice_stops_the_run(tmp_path, at, rule):
    """Mode 2: its message differs in numbers and addresses only."""
    words = ("fail", "--rank", 1, "--at", at, "--pause", 0.2)
    with FaultyRun(tmp_path, ("--max-restarts", 5), words) as run:
        run.start()
        assert run.ended() == 93, run.said()

    assert run.rules() == ["restart", rule]
    assert "ValueError" in run.said()
    first, second = logs_of(run)
    assert ("generation-0" in first, "generation-1" in second) == (True, True)
    check_account(run, "user_code.exception", ("rank", "1"), actions=["stop"])
    assert run.payloads("run.ended")[0]["exit_code"] == 93


def test_the_same_exception_at_an_unknown_step_stops_the_run_the_third_time(tmp_path):
    """Mode 2: SGD without momentum counts no steps."""
    words = ("--optimizer", "SGD", "--raise-at", 3, "--rank", 1)
    with FaultyRun(tmp_path, ("--max-restarts", 5), words, script="train.py") as run:
        run.start()
        assert run.ended() == 93, run.said()

    assert run.rules() == ["restart", "restart", "software.step_unknown"]
    assert len(run.payloads("attempt.started")) == 3
    check_account(run, "user_code.exception", ("rank", "1"), actions=["stop"])


def test_a_watchdogs_abort_is_a_symptom_and_never_the_softwares_fault(tmp_path):
    """Mode 10: the rank that aborts is the one that waited."""
    words = ("watchdog", "--rank", 0, "--at", 4)
    with FaultyRun(tmp_path, ("--max-restarts", 2), words) as run:
        run.start()
        assert run.ended() == 1, run.said()

    assert run.rules() == ["restart", "restart", "budget.spent"]
    for incident in run.incidents():
        assert incident["failure_class"] == "collective.timeout"
        assert ("rank", "0") not in culprits(incident)
    assert [incident["actions"] for incident in run.incidents()] == [["restart"]] * 2 + [[]]
    check_account(run, "collective.timeout", actions=[])


def test_a_poisoned_checkpoint_is_left_out(tmp_path):
    """Mode 11: twice soon after the same checkpoint; the third attempt uses the one before."""
    words = ("poisoned", "--poison", 10, "--at", 13)
    with FaultyRun(tmp_path, ("--max-restarts", 5), words) as run:
        for step in (5, 10):
            run.job.joinpath(f"saved.{step}").touch()
        run.start()
        assert run.ended() == 0, run.said()

    loads = {x.generation: x.number for x in run.lines() if x.what == "load" and x.rank == 0}
    assert loads == {0: 10, 1: 10, 2: 5}
    assert run.rules() == ["restart", "checkpoint.poisoned"]
    assert run.decisions()[-1]["decision"]["exclude_checkpoint"] == 10
    check_account(run, "checkpoint.poisoned", ("rank", "0"), ("rank", "1"), actions=["restart"])


def test_a_storm_of_restarts_slows_down_and_ends(tmp_path):
    """Mode 17: three restarts within the window, each later than the one before."""
    words = ("kill", "--rank", 1, "--at", 3)
    with FaultyRun(tmp_path, ("--max-restarts", "3/1h"), words) as run:
        run.start()
        assert run.ended() == 1, run.said()

    assert run.rules() == ["restart"] * 3 + ["budget.spent"]
    waits_s = [made["decision"]["backoff_s"] for made in run.decisions()]
    assert waits_s == [0.0, 1.0, 2.0, 0.0]
    begun_ns = {}
    for line in run.lines():
        begun_ns.setdefault(line.generation, line.mono_ns)
    assert begun_ns[3] - begun_ns[2] > 2e9
    check_account(run, "host_mem.sigkill_probable", ("rank", "1"), actions=[])
    assert "within 3600 s are spent" in run.payloads("run.ended")[0]["reason"]
