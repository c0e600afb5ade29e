"""What becomes of a run whose agent was killed: never "nothing failed", never "still running"."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.exits import NODE, RUN
from support.history import T0, run_row

from gpuops.host.procfs import Process
from gpuops.report.account import Agent
from gpuops.report.liveness import Sighting, judge, look

STATE = {"run_id": RUN, "node": NODE, "agent_pid": 7}
THERE = Sighting(
    state=STATE, process=Process(7, "gpuops", "S", 1), started_us=T0 - 1, sees_all=True
)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (THERE, Agent.RUNNING),
        (replace(THERE, started_us=None), Agent.RUNNING),
        (replace(THERE, process=None), Agent.GONE),
        (replace(THERE, process=Process(7, "gpuops", "Z", 1)), Agent.GONE),
        (replace(THERE, started_us=T0 + 60_000_000), Agent.GONE),
        (replace(THERE, process=None, sees_all=False), Agent.UNKNOWN),
        (replace(THERE, process=None, state={**STATE, "node": "n042"}), Agent.UNKNOWN),
        (replace(THERE, process=None, state={**STATE, "run_id": "other"}), Agent.UNKNOWN),
        (replace(THERE, process=None, state={**STATE, "agent_pid": "7"}), Agent.UNKNOWN),
        (None, Agent.UNKNOWN),
    ],
)
def test_what_was_seen_decides_what_became_of_the_agent(seen, expected):
    assert judge(run_row(ended_us=None, outcome=None), NODE, seen) is expected


def test_a_living_process_is_seen_and_a_dead_one_is_not(tmp_path):
    def of(pid):
        (tmp_path / "state.json").write_text(json.dumps({**STATE, "agent_pid": pid}))
        return look(tmp_path)

    with subprocess.Popen([sys.executable, "-c", "pass"]) as dead:
        pass

    assert of(os.getpid()).process.pid == os.getpid()
    assert of(os.getpid()).started_us > 0
    assert of(dead.pid).process is None


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_state_file_that_makes_no_sense_says_nothing(tmp_path, text):
    (tmp_path / "state.json").write_text(text, errors="surrogateescape")

    assert look(tmp_path) is None


def test_a_state_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "state.json")

    assert look(tmp_path) is None
    assert look(tmp_path / "nowhere") is None
