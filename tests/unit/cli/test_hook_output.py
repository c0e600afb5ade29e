"""What the hooks print goes into slurmd's log: in lines that drive no terminal."""

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.checks import NODE

from gpuops.checks.core.runner import CheckRun
from gpuops.cli import slurm
from gpuops.gate.drain import DrainPublication
from gpuops.gate.health_check import NodeAction, NodeActionResult
from gpuops.gate.hook import GateResult
from gpuops.gate.policy import DrainCause, DrainDecision, DrainOutcome
from gpuops.model import ActionKind, FailureClass, Finding, Status

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\u202egnp.exe\x9b31m\nfail gpu_ecc: another line"
SAFE = "another line"


def result():
    finding = Finding(
        check="kernel_log",
        entity=NODE,
        status=Status.FAIL,
        message=f"seen: {HOSTILE}",
        failure_class=FailureClass.HOST_DISK,
    )
    run = CheckRun(suite="prolog", node="n1", start_us=0, end_us=0, findings=(finding,))
    cause = DrainCause(
        finding=finding, failure_class=FailureClass.HOST_DISK, action=ActionKind.DRAIN
    )
    decision = DrainDecision(DrainOutcome.WOULD_DRAIN, f"why: {HOSTILE}")
    return GateResult(check_run=run, decision=decision, cause=cause, problems=(HOSTILE,))


COMMANDS = {
    "prolog": (["prolog", "--verdict", "v"], 3),
    "epilog": (["epilog", "--verdict", "v"], 3),
    "health": (["health"], 4),
    "publish": (["publish", "--id", "x"], 1),
    "followup": (["followup"], 3),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hook_prints_lines_that_drive_no_terminal(monkeypatch, name):
    action = NodeActionResult(NodeAction.KEPT, HOSTILE)
    for function, answer in (
        ("hook_context", None),
        ("scontrol_finder", None),
        ("run_hook", result()),
        ("check_health", (result(), action)),
        ("publish_drain", DrainPublication(None, HOSTILE)),
        ("follow_up", result()),
    ):
        monkeypatch.setattr(slurm, function, lambda *_args, answer=answer: answer)
    arguments, lines = COMMANDS[name]
    told = CliRunner().invoke(slurm.slurm, arguments).stderr

    assert told.count(SAFE) == told.count("\n") == lines
    assert all(char.isprintable() or char == "\n" for char in told), told


def test_no_hook_prints_in_another_way():
    tree = ast.parse(Path(slurm.__file__).read_text())
    to_stderr = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and any(word.arg == "err" for word in call.keywords)
    ]

    assert to_stderr == ["_print_line"]
