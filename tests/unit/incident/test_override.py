"""A site's own decision: real plug-ins in real processes, and whatever they do wrong."""

import os
import time
from pathlib import Path

import pytest
from support.decisions import cluster, decision, failure, report

from gpuops.config.resolve import environ
from gpuops.incident.decision import ClusterState, RestartPolicy, RunAction
from gpuops.incident.override import RULE, apply_site_decision, merge_answer

OURS = decision(report("n1"), rule="restart", exclude={"n2": "Xid 79"}, backoff_s=4.0)
ON = ClusterState(
    policy=RestartPolicy(nodes_min=2, nodes_max=3),
    generation=0,
    members=("n1", "n2", "n3"),
    live=("n1", "n2", "n3", "n4"),
)


def asked(tmp_path, body, *, deadline_s=60.0, plugin=None, env=None):
    """Return what becomes of our decision beside a plug-in whose function has *body*."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path = tmp_path / "policy.py"
    path.write_text(f"import os, sys, time\n\ndef decide(situation):\n{lines}\n")
    return apply_site_decision(
        OURS,
        plugin=plugin or str(path),
        reports=[report("n1")],
        cluster=ON,
        history=(failure(),),
        now_s=500.0,
        env={"PATH": "/usr/bin:/bin", **(env or {})},
        deadline_s=deadline_s,
    )


def test_it_may_choose_another_verdict(tmp_path):
    found = asked(tmp_path, "return {'verdict': 'requeue', 'reason': 'the night is over'}")

    assert found.decision.action is RunAction.REQUEUE
    assert found.decision.exit_code == 85
    assert found.decision.rule == RULE
    assert found.decision.failure.rule == RULE
    assert "the night is over" in found.decision.reason
    assert "our rule: restart" in found.decision.reason
    assert "replaces restart" in found.note


def test_it_sees_everything_that_was_decided_on(tmp_path):
    body = (
        "assert situation['reports'][0]['node'] == 'n1'\n"
        "assert situation['cluster']['terms']['nodes_min'] == 2\n"
        "assert situation['history'][0]['at_s'] == 100.0\n"
        "assert situation['now_s'] == 500.0\n"
        "return {'backoff_s': situation['decision']['backoff_s'] + 1}"
    )

    assert asked(tmp_path, body).decision.backoff_s == 5.0


@pytest.mark.parametrize("body", ["return None", "return {}"])
def test_without_an_opinion_ours_stands_silently(tmp_path, body):
    found = asked(tmp_path, body)

    assert found.decision is OURS
    assert found.note == ""


def test_a_module_and_a_function_can_be_named(tmp_path):
    (tmp_path / "site_policy.py").write_text("def mine(s):\n    return {'verdict': 'stop'}\n")
    found = asked(tmp_path, "pass", plugin="site_policy:mine", env={"PYTHONPATH": str(tmp_path)})

    assert (found.decision.action, found.decision.exit_code) == (RunAction.STOP, 93)


def test_a_function_of_a_file_can_be_named(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("def mine(s):\n    return {'verdict': 'fail'}\n")

    assert asked(tmp_path, "pass", plugin=f"{path}:mine").decision.action is RunAction.FAIL


def test_what_it_prints_is_not_its_answer(tmp_path):
    body = "print('{\"verdict\": \"stop\"}')\nos.write(1, b'garbage')\nreturn {'verdict': 'fail'}"

    assert asked(tmp_path, body).decision.action is RunAction.FAIL


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('no idea')", "no idea"),
        ("os._exit(3)", "ended with 3"),
        ("os.kill(os.getpid(), 11)", "ended with -11"),
        ("os._exit(0)", "Expecting value"),
        ("return 'stop'", "answered str"),
        ("return ['stop']", "answered list"),
        ("return object()", "not JSON serializable"),
        ("return {'verdict': 'shrug'}", "shrug"),
        ("return {'verdikt': 'stop'}", "unknown keys: verdikt"),
        ("return {'exclude': {'n9': 'x'}}", "unknown nodes: n9"),
        ("return {'exclude': ['n1']}", "reasons by node"),
        ("return {'exclude': {'n1': 'x', 'n2': 'x', 'n3': 'x'}}", "fewer nodes"),
        ("return {'backoff_s': 1e9}", "back-off"),
        ("return {'backoff_s': -1}", "back-off"),
        ("return {'backoff_s': float('nan')}", "not JSON compliant"),
        ("return {'exclude_checkpoint': 'newest'}", "not a whole number"),
        ("return {'reason': 'x' * 10**7}", "more than is read"),
    ],
)
def test_whatever_is_wrong_with_it_ours_stands(tmp_path, body, why):
    found = asked(tmp_path, body)

    assert found.decision is OURS
    assert why in found.note


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        ("no_such_module:decide", "no_such_module"),
        ("json:no_such", "no_such"),
        ("/nonexistent/policy.py", "nonexistent"),
        ("json:__name__", "is not a function"),
        ("json", "decide"),
    ],
)
def test_a_plug_in_that_is_not_there(tmp_path, plugin, why):
    found = asked(tmp_path, "pass", plugin=plugin)

    assert found.decision is OURS
    assert why in found.note


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition):
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_one_that_sleeps_is_killed_at_its_deadline(tmp_path):
    note = tmp_path / "pid"
    body = f"open({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    begin = time.monotonic()
    found = asked(tmp_path, body, deadline_s=3.0)

    assert found.decision is OURS
    assert "did not answer within 3 s" in found.note
    assert time.monotonic() - begin < 60
    assert not note.exists() or not alive(int(note.read_text() or 0))


def test_one_that_ignores_signals_and_prints_for_ever_is_killed_too(tmp_path):
    body = (
        "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "while True: print('x' * 1000)"
    )

    assert "did not answer" in asked(tmp_path, body, deadline_s=3.0).note


def test_a_child_that_it_forks_holds_nobody_up_and_is_killed(tmp_path):
    note = tmp_path / "pid"
    body = (
        "pid = os.fork()\n"
        "if pid == 0:\n    time.sleep(600)\n"
        f"open({str(note)!r}, 'w').write(str(pid))\n"
        "return {'verdict': 'stop'}"
    )
    begin = time.monotonic()
    found = asked(tmp_path, body, deadline_s=300.0)

    assert found.decision.action is RunAction.STOP
    assert time.monotonic() - begin < 200
    wait_for(lambda: not alive(int(note.read_text())))


def test_it_leaves_no_zombie_and_no_open_file(tmp_path):
    note = tmp_path / "pid"
    before = sorted(Path("/proc/self/fd").iterdir())
    for rest in ("return {}", "raise ValueError"):
        asked(tmp_path, f"open({str(note)!r}, 'w').write(str(os.getpid()))\n{rest}")
        with pytest.raises(ChildProcessError):
            os.waitpid(int(note.read_text()), os.WNOHANG)

    assert len(sorted(Path("/proc/self/fd").iterdir())) <= len(before)


def test_a_secret_or_control_character_in_its_error_is_not_in_the_note(tmp_path):
    note = asked(tmp_path, "raise ValueError('\\x1b[31m password=hunter2')").note

    assert "hunter2" not in note
    assert "\x1b" not in note


def test_our_own_exit_code_is_kept_where_it_agrees_on_the_verdict():
    ours = decision(report("n1"), RunAction.REQUEUE, exit_code=86)

    assert (
        merge_answer({"verdict": "requeue", "reason": "yes"}, ours, cluster("n1")).exit_code == 86
    )


def test_environment_is_that_of_the_caller(tmp_path):
    body = "return {'reason': os.environ['SITE']}"

    assert "eleven" in asked(tmp_path, body, env={"SITE": "eleven"}).decision.reason
    assert "SITE" not in environ()


def test_a_plug_in_in_the_runs_folder_is_found_and_no_other_module_there(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)

    answered = asked(tmp_path, "return {'reason': 'found'}", plugin="policy:decide")

    assert answered.note == "the site's decision policy:decide replaces restart"
    assert "found" in answered.decision.reason
