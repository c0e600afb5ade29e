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
from gpuops.report.run_status import AgentObservation, judge_liveness, observe_agent
from gpuops.report.time_breakdown import AgentLiveness

STATE = {"run_id": RUN, "node": NODE, "agent_pid": 7}
THERE = AgentObservation(
    state=STATE, process=Process(7, "gpuops", "S", 1), started_us=T0 - 1, can_see_all=True
)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (THERE, AgentLiveness.RUNNING),
        (replace(THERE, started_us=None), AgentLiveness.RUNNING),
        (replace(THERE, process=None), AgentLiveness.GONE),
        (replace(THERE, process=Process(7, "gpuops", "Z", 1)), AgentLiveness.GONE),
        (replace(THERE, started_us=T0 + 60_000_000), AgentLiveness.GONE),
        (replace(THERE, process=None, can_see_all=False), AgentLiveness.UNKNOWN),
        (replace(THERE, process=None, state={**STATE, "node": "n042"}), AgentLiveness.UNKNOWN),
        (replace(THERE, process=None, state={**STATE, "run_id": "other"}), AgentLiveness.UNKNOWN),
        (replace(THERE, process=None, state={**STATE, "agent_pid": "7"}), AgentLiveness.UNKNOWN),
        (None, AgentLiveness.UNKNOWN),
    ],
)
def test_what_was_seen_decides_what_became_of_the_agent(seen, expected):
    assert judge_liveness(run_row(ended_us=None, outcome=None), NODE, seen) is expected


def test_a_living_process_is_seen_and_a_dead_one_is_not(tmp_path):
    def of(pid):
        (tmp_path / "state.json").write_text(json.dumps({**STATE, "agent_pid": pid}))
        return observe_agent(tmp_path)

    with subprocess.Popen([sys.executable, "-c", "pass"]) as dead:
        pass

    assert of(os.getpid()).process.pid == os.getpid()
    assert of(os.getpid()).started_us > 0
    assert of(dead.pid).process is None


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_state_file_that_makes_no_sense_says_nothing(tmp_path, text):
    (tmp_path / "state.json").write_text(text, errors="surrogateescape")

    assert observe_agent(tmp_path) is None


def test_a_state_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "state.json")

    assert observe_agent(tmp_path) is None
    assert observe_agent(tmp_path / "nowhere") is None
