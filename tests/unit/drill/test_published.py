"""State files are claims: what makes no sense is left out, what is ambiguous is refused."""

import json
import os
from pathlib import Path

import pytest

from gpuops.drill.find import AgentStateFile, choose_state, newest_step, read_states
from gpuops.errors import DrillError
from gpuops.report.run_status import observe_agent
from gpuops.report.run_status import read_states as read_states_of_report

BODY = {
    "run_id": "r1",
    "node": "n0",
    "generation": 2,
    "phase": "running",
    "agent_pid": 100,
    "pids": {"0": 101, "1": 102},
    "ring_dir": "/dev/shm/rings-1/generation-2",
}


def write(folder, name="state.json", **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({**BODY, **changes}))


def published(node, *ranks):
    return AgentStateFile(
        path=Path("/runs/a/state.json"),
        owner_uid=0,
        run_id="r1",
        node=node,
        generation=0,
        phase="running",
        agent_pid=100,
        pids=dict.fromkeys(ranks, 200),
        ring_dir=Path("/rings/g"),
    )


def test_a_state_is_read_with_its_owner(tmp_path):
    write(tmp_path)

    (state,) = read_states(tmp_path)

    assert (state.node, state.generation, state.pids) == ("n0", 2, {0: 101, 1: 102})
    assert state.owner_uid == tmp_path.stat().st_uid
    assert state.folder == tmp_path


def test_of_several_runs_the_newest_counts_with_all_its_agents(tmp_path):
    write(tmp_path / "20250101-old", node="old")
    write(tmp_path / "20260101-new")
    write(tmp_path / "20260101-new", "state-1.json", node="n1")

    assert [state.node for state in read_states(tmp_path)] == ["n1", "n0"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent_pid": 1},
        {"agent_pid": -5},
        {"agent_pid": True},
        {"agent_pid": 2**40},
        {"pids": {"0": 0}},
        {"pids": {"zero": 5}},
        {"pids": [5]},
        {"generation": None},
    ],
    ids=str,
)
def test_a_file_that_makes_no_sense_is_left_out(tmp_path, wrong):
    write(tmp_path, **wrong)

    assert read_states(tmp_path) == []


def test_the_only_agent_need_not_be_named():
    assert choose_state([published("n0", 0)], node=None, rank=None).node == "n0"


def test_the_agent_is_found_by_its_node_or_by_a_rank():
    states = [published("n0", 0, 1), published("n1", 2, 3)]

    assert choose_state(states, node="n1", rank=None).node == "n1"
    assert choose_state(states, node=None, rank=1).node == "n0"


@pytest.mark.parametrize(
    ("node", "rank", "why"),
    [
        (None, None, "several agents fit"),
        ("n7", None, "nothing of this run has node n7; there is node n0 with ranks 0, 1"),
        (None, 9, "nothing of this run has rank 9"),
        ("n0", 2, "nothing of this run has node n0 and rank 2"),
    ],
)
def test_what_is_not_clear_is_refused(node, rank, why):
    states = [published("n0", 0, 1), published("n1", 2, 3)]

    with pytest.raises(DrillError, match=why):
        choose_state(states, node=node, rank=rank)


def test_where_nothing_runs_it_says_so():
    with pytest.raises(DrillError, match="no run publishes its state"):
        choose_state([], node=None, rank=None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "deep", "link"])
def test_a_state_that_would_hang_or_end_its_reader_is_left_out(tmp_path, kind):
    path = tmp_path / "a" / "state.json"
    write(tmp_path / "b")
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "deep":
        path.write_bytes(b"[" * 2**19)
    else:
        path.symlink_to(tmp_path / "b" / "state.json")

    assert read_states(path.parent) == []
    assert list(read_states_of_report(path.parent)) == []
    assert observe_agent(path.parent) is None


@pytest.mark.timeout(60)
def test_a_ring_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank0.ring")

    assert newest_step(0, 0, 1, tmp_path / "rank0.ring") is None
