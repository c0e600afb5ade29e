"""Who is taken for whom: by owner, open files, parent, age, never by a number in a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpuops.drill.find import (
    AgentStateFile,
    ProcessSnapshot,
    Victim,
    why_not_agent,
    why_not_control_store,
    why_not_worker,
)

STATE = AgentStateFile(
    path=Path("/runs/a/state.json"),
    owner_uid=1000,
    run_id="r1",
    node="n0",
    generation=0,
    phase="running",
    agent_pid=100,
    pids={0: 101},
    ring_dir=Path("/shm/rings-1/generation-0"),
)
AGENT = ProcessSnapshot(
    pid=100,
    start_ticks=50,
    uid=1000,
    parent=1,
    env={},
    open_files=frozenset({"/dev/null", "/runs/a/journal/x.jsonl"}),
)
VICTIM = Victim(100, 50, 1000, "the agent")
WORKER = ProcessSnapshot(pid=101, start_ticks=60, uid=1000, parent=100, env={})


def test_the_agent_has_a_file_of_the_run_open():
    assert why_not_agent(STATE, AGENT, 1000) is None
    rings = replace(AGENT, open_files=frozenset({"/shm/rings-1/lock"}))
    assert why_not_agent(STATE, rings, 1000) is None


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (replace(AGENT, uid=0), "belongs to user 0"),
        (replace(AGENT, open_files=frozenset()), "no file of this run"),
        (replace(AGENT, open_files=frozenset({"/runs/ab/x"})), "no file of this run"),
    ],
    ids=["owner", "files", "another run"],
)
def test_another_process_is_not_the_agent(look, why):
    assert why in why_not_agent(STATE, look, 1000)


def test_a_worker_is_a_child_or_knows_its_ring():
    assert why_not_worker(STATE, WORKER, VICTIM) is None
    told = {"GPUOPS_AGENT_PID": "100", "GPUOPS_RING": "/shm/rings-1/generation-0/rank0.ring"}
    assert why_not_worker(STATE, replace(WORKER, parent=77, env=told), VICTIM) is None


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (replace(WORKER, uid=1001), "belongs to user 1001"),
        (replace(WORKER, start_ticks=40), "older than the agent"),
        (replace(WORKER, parent=1), "did not start it"),
        (
            replace(WORKER, parent=1, env={"GPUOPS_AGENT_PID": "100", "GPUOPS_RING": "/else"}),
            "did not start it",
        ),
    ],
    ids=["owner", "age", "parent", "ring"],
)
def test_another_process_is_not_a_worker(look, why):
    assert why in why_not_worker(STATE, look, VICTIM)


def test_the_store_is_known_by_its_module():
    board = replace(WORKER, argv=("python", "-m", "gpuops.control.tcp.serve"))

    assert why_not_control_store(board, 1000) is None
    assert "does not run" in why_not_control_store(WORKER, 1000)
    assert "belongs to" in why_not_control_store(board, 0)
