"""A slow rank under `gpuops run`, over gloo: it is named; of a healthy run nobody is."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.runs import Run, wait_until

from gpuops.cli.main import run_command

pytestmark = pytest.mark.torch

PACED = Path(__file__).parents[1] / "support" / "paced_ddp.py"
# Ranks sleep instead of computing, so that they do not compete for the processors of this machine.
WORDS = ("--allow-drills", "--record-steps", "--slow-after", "3", PACED, "1000", "0.15")


def test_an_incident_names_the_slow_rank_and_of_a_healthy_run_nobody_is_named(tmp_path, capsys):
    drill = {"GPUOPS_DRILL": "slow:rank=1,step=5,factor=1.6"}
    with ExitStack() as stack:
        slow = stack.enter_context(Run(tmp_path / "slow", *WORDS, nproc=3, env=drill))
        healthy = stack.enter_context(Run(tmp_path / "healthy", *WORDS, nproc=3))
        (incident,) = wait_until(lambda: slow.directory and slow.incidents(), what="an incident")
        # Its steps are shorter, so that it was read and judged as often by now.
        assert healthy.incidents() == [], healthy.said()
        assert run_command(["run", "status", "--json", "--run-dir", str(slow.directory)]) == 0
        status = json.loads(capsys.readouterr().out)
        for run in (slow, healthy):
            run.signal()
            run.finish()

    assert incident["failure_class"] == "straggler.host"
    assert incident["culprits"][0] == {"kind": "rank", "id": "1"}
    assert "rank 1 takes 1." in incident["title"]
    assert "as long as 2 ranks" in incident["title"]
    assert "suspected" not in healthy.said()
    (node,) = status["nodes"]
    assert "rank 1 takes 1." in status["doubted"][node["node"]]
    assert node["slowdown"] > 1.0
    assert status["step_seconds"] > 0.2
    # What was recorded has the same verdicts.
    assert run_command(["detect", "replay", "--json", str(slow.directory)]) == 1
    named = json.loads(capsys.readouterr().out)["slow"][-1]
    assert (named["rank"], named["level"]) == ("1", "suspect")
    assert named["failure_class"] == incident["failure_class"]
    assert "rank 1 takes 1." in named["why"]
    assert run_command(["detect", "replay", str(healthy.directory)]) == 0
