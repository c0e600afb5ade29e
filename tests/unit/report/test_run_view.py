"""How a run stands, by each of its sources; and what none of them can do to a terminal."""

import io
import json
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.agent_states import RUN, agent_state, kept
from support.decisions import decision, failure, report
from support.history import T0, a_killed_run, us

from gpuops.agent.status.state import (
    CheckpointState,
    RankStatus,
    checkpoint_json,
    run_state,
    state_json,
)
from gpuops.cli.run_status import refresh_without_dead_spares
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import (
    RECORD_KEY,
    ControlKeys,
    ControlRecord,
    Member,
    Roster,
    RunPhase,
    pack,
)
from gpuops.detect.own_time import Measure, RankSteps
from gpuops.detect.step_summary import pack_summary
from gpuops.host.clock import FakeClock
from gpuops.report.render.run_text import status_view
from gpuops.report.run_status import find_run_folder, read_control_store, read_states
from gpuops.report.run_view import (
    RunNodeView,
    RunView,
    from_agent,
    from_files,
    from_store,
)
from gpuops.store.queries.run_queries import ExclusionRow
from gpuops.units import NS_PER_S

KEYS = {
    "run",
    "name",
    "source",
    "generation",
    "phase",
    "phase_seconds",
    "reason",
    "exit_code",
    "world_size",
    "step",
    "step_seconds",
    "nodes",
    "spares",
    "excluded",
    "doubted",
    "restarts_used",
    "restarts_max",
    "decision",
    "notes",
    "checkpoint",
}


def member(number, n_workers=4):
    return Member(
        agent=str(UUID(int=number)), node=f"n{number}", address="10.0.0.1", n_workers=n_workers
    )


def a_board(clock, **changes):
    """Return a board on which n1 and n2 train, n3 waits and n9 is left out."""
    board, keys = MemoryControlStore(clock), ControlKeys(run_id=RUN)
    fields = {
        "run_id": RUN,
        "folder": "20260101T000000Z-train-abcd1234",
        "generation": 1,
        "phase": RunPhase.RUN,
        "since_s": 0.0,
        "reason": "n9: Xid 79",
        "excluded": {"n9": "Xid 79"},
        "suspected": {"n9": "sums: slow", "n2": "sums: slow"},
        "history": (failure(0),),
        "decision": decision(report("n9"), exclude={"n9": "Xid 79"}),
    }
    record = ControlRecord(**{**fields, **changes})
    board.compare_and_set(RECORD_KEY, record.to_bytes(), version=0)
    members = [member(1), member(2)]
    board.put(keys.roster(1), Roster(generation=1, members=tuple(members)).to_bytes())
    for each in [*members, member(3)]:
        board.put(keys.agent(each.agent), pack(each.to_json()))
    for number, step in ((1, 57), (2, 56)):
        beat = {"seq": 9, "step": step, "silent_s": 0.25, "ranks": 4, "first_rank": 0}
        beat["step_seconds"] = {1: 0.41, 2: 0.42}[number]
        board.put(keys.heartbeat(str(UUID(int=number))), pack(beat))
    board.put(keys.heartbeat(str(UUID(int=3))), pack({"seq": 4}))
    return board


def shown(view, width=100, **options):
    """Return what a terminal would show."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(status_view(view, **options))
    return out.getvalue()


def test_the_board_knows_seats_steps_spares_and_why():
    clock = FakeClock()
    board = a_board(clock)
    clock.advance(90.0)
    view = read_control_store(board)
    text = shown(view, rate=2.5, silent_s={"n1": 0.5, "n2": 8.0})

    assert (view.source, view.generation, view.phase) == ("board", 1, "run")
    assert view.phase_s == pytest.approx(90.0, abs=0.1)
    assert (view.world_size, view.step, view.spares) == (8, 56, ("n3",))
    assert [(n.node, n.group_rank, n.first_rank, n.step) for n in view.nodes] == [
        ("n1", 0, 0, 57),
        ("n2", 1, 4, 56),
    ]
    assert (view.excluded, view.restarts_used) == ({"n9": "Xid 79"}, 1)
    assert set(view.to_json()) == KEYS
    assert json.dumps(view.to_json())
    assert "phase       run for 90.0 s, generation 1" in text
    assert "why         n9: Xid 79" in text
    assert "steps       56, 2.50 steps/s, 0.415 s a step" in text
    assert (view.step_s, view.nodes[1].step_s) == (pytest.approx(0.415), 0.42)
    assert "4-7" in text
    assert "silent for 8.00 s" in text
    assert "spare       n3" in text
    assert "excluded    n9: Xid 79" in text
    assert view.suspected == {"n2": "sums: slow"}, "who is left out is beyond doubt"
    assert "suspect     n2: sums: slow; a restart excludes it, if it can be spared" in text
    assert "decided     restart (worker-failed): a worker failed" in text


def test_the_own_time_of_a_node_is_that_of_its_slowest_rank_beside_its_peers():
    board = a_board(FakeClock())
    keys = ControlKeys(run_id=read_control_store(board).run_id)

    def publish(number, generation, **own_s):
        ranks = {
            rank[1:]: {"steps": pack_summary(steps_of(seconds))} for rank, seconds in own_s.items()
        }
        body = {"generation": generation, "published": {"ranks": ranks}}
        board.put(keys.published("straggler", str(UUID(int=number))), pack(body))

    publish(1, 1, r0=1.0, r1=1.01)
    publish(2, 0, r4=9.0, r5=9.0)
    view = read_control_store(board)
    # An older generation says nothing of this one, and of two nobody can say which is slow.
    assert [node.slowdown for node in view.nodes] == [None, None]
    assert "own time" not in shown(view)

    publish(2, 1, r4=1.0, r5=1.5)
    view = read_control_store(board)
    assert [node.slowdown for node in view.nodes] == [
        pytest.approx(1.0, abs=0.02),
        pytest.approx(1.5, abs=0.02),
    ]
    assert view.to_json()["nodes"][1]["slowdown"] == pytest.approx(1.5, abs=0.02)
    assert "1.49x" in shown(view) or "1.50x" in shown(view)


def steps_of(seconds):
    own_s = dict.fromkeys(range(100, 116), seconds)
    return RankSteps(role=3, measure=Measure.OWN, seconds=own_s, step_s=1.5)


def test_steps_that_are_only_counted_are_shown_as_that():
    board = a_board(FakeClock())
    key = ControlKeys(run_id=read_control_store(board).run_id).heartbeat(str(UUID(int=1)))
    board.put(key, pack({"seq": 10, "step": None, "steps_counted": 57}))
    view = read_control_store(board)

    assert (view.step, view.nodes[0].step, view.nodes[0].steps_counted) == (None, None, 57)
    assert view.to_json()["nodes"][0]["steps_counted"] == 57
    assert "57 counted" in shown(view)
    assert "steps       ?, 0.42 s a step" in shown(view)  # of the node that knows it


def test_what_is_long_goes_on_behind_its_label_and_is_said_once():
    why = "rank 1 on vm made no progress for 11 s, is stopped by a signal (state T); restart"
    board = a_board(FakeClock(), reason=why, decision=decision(report("n9"), reason=why))
    lines = shown(read_control_store(board), width=60).splitlines()

    start = next(n for n, line in enumerate(lines) if line.startswith("why "))
    told = [line.rstrip() for line in lines[start : start + 2]]
    assert told[0].startswith("why         rank 1 on vm made no progress")
    assert told[1].startswith(" " * 12)
    assert " ".join(part[12:] for part in told) == why
    assert "decided     restart (worker-failed)" in [line.rstrip() for line in lines]


def test_a_decision_that_is_called_like_its_rule_is_named_once():
    view = RunView(run_id=RUN, name="x", source="file", decision={"verdict": "a", "rule": "a"})

    assert "decided     a: None" in shown(view)


def test_looking_disturbs_no_agent():
    board = a_board(FakeClock())
    keys = ControlKeys(run_id=RUN)
    before = (
        board.get(RECORD_KEY),
        dict(board.list(keys.heartbeat())),
        dict(board.list(keys.agent())),
    )
    read_control_store(board)

    assert before == (
        board.get(RECORD_KEY),
        dict(board.list(keys.heartbeat())),
        dict(board.list(keys.agent())),
    )


@pytest.mark.parametrize(("later", "spares"), [(5, ("n3",)), (4, ())])
def test_a_spare_whose_agent_does_not_beat_is_none(later, spares):
    clock = FakeClock()
    board = a_board(clock)
    key = ControlKeys(run_id=RUN).heartbeat(str(UUID(int=3)))

    def wait(seconds):
        clock.advance(seconds)
        board.put(key, pack({"seq": later}))

    view = refresh_without_dead_spares(
        read_control_store(board), lambda: read_control_store(board), clock, wait
    )

    assert view.spares == spares
    assert ("not in the run, without heartbeats: n3" in shown(view)) == (not spares)


def test_while_seats_are_given_out_the_last_ones_are_shown():
    view = read_control_store(a_board(FakeClock(), generation=2, phase=RunPhase.RENDEZVOUS))

    assert (view.generation, view.phase) == (2, "form")
    assert [node.node for node in view.nodes] == ["n1", "n2"]


def test_an_empty_board_has_no_run_and_strange_entries_are_skipped():
    clock = FakeClock()
    assert read_control_store(MemoryControlStore(clock)) is None
    board, keys = a_board(clock), ControlKeys(run_id=RUN)
    board.put(keys.agent("x"), b"\xff")
    board.put(keys.heartbeat(str(UUID(int=1))), b"[]")
    view = read_control_store(board)

    assert view.nodes[0].step is None
    assert view.step is None


STATE = agent_state(
    generation=3,
    phase="gather",
    phase_ns=5 * NS_PER_S,
    reason="n1: a worker failed",
    ranks=(
        RankStatus(rank=4, pid=1, step=9, beat_ns=8 * NS_PER_S),
        RankStatus(rank=5, pid=2, step=8, beat_ns=9 * NS_PER_S),
    ),
    excluded={"n9": "sick"},
    doubted={"n8": "slow"},
    decision=decision(),
)


def test_an_agent_knows_its_own_node():
    state = replace(STATE, step_s=0.25, slowdown=1.25)
    view = from_agent(json.loads(json.dumps(state_json(state, 10 * NS_PER_S))))

    assert (view.source, view.generation, view.phase, view.phase_s) == ("agent", 3, "gather", 5.0)
    assert view.nodes == (
        RunNodeView(
            node="n1",
            group_rank=0,
            first_rank=4,
            ranks=2,
            step=8,
            silent_s=1.0,
            step_s=0.25,
            slowdown=1.25,
        ),
    )
    assert (view.restarts_used, view.restarts_max, view.excluded) == (1, 3, {"n9": "sick"})
    assert view.suspected == {"n8": "slow"}
    assert "restarts    1 of 3" in shown(view)


def a_file(node, generation, **changes):
    told = {"run_id": RUN, "name": "f", "node": node, "generation": generation, "phase": "running"}
    return {**told, "pids": {"0": 1, "1": 2}, **run_state(STATE), **changes}


def test_files_tell_of_the_newest_generation():
    view = from_files([a_file("n1", 2), a_file("n2", 2, phase="restarting"), a_file("n3", 1)])

    assert (view.source, view.generation, view.phase) == ("file", 2, "running")
    assert [(node.node, node.ranks) for node in view.nodes] == [("n1", 2), ("n2", 2)]
    assert (view.excluded, view.restarts_used, view.restarts_max) == ({"n9": "sick"}, 1, 3)
    assert view.suspected == {"n8": "slow"}


def test_the_store_tells_of_what_is_over():
    run, rows, _ = a_killed_run()
    gone = ExclusionRow(excluded="n9", t_us=us(41), ordinal=0, reason="sick", told_by="n1")
    view = from_store(run, rows, [], [gone], T0 + 200_000_000)

    assert (view.source, view.phase, view.phase_s) == ("store", "completed", 100.0)
    assert (view.generation, view.step, view.exit_code) == (1, 120, 0)
    assert view.excluded == {"n9": "sick"}
    assert view.is_over


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
NAMES = (
    *("ranks", "rank", "step", "budget", "excluded", "doubted", "decision", "node", "generation"),
    "pids",
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_whatever_a_file_or_an_agent_says_can_be_shown(state):
    for view in (from_agent(state), from_files([state])):
        assert shown(view)
        assert json.dumps(view.to_json())


def test_hostile_text_stays_text():
    evil = "\x1b]0;owned\x07\x1b[2J\r[red]x[/red]"
    view = RunView(
        run_id=evil,
        name=evil,
        source=evil,
        phase=evil,
        reason=evil,
        nodes=(RunNodeView(node=evil, ranks=1, step=3),),
        spares=(evil,),
        excluded={evil: evil},
        suspected={evil: evil},
        decision={"verdict": evil, "rule": evil, "reason": [evil]},
        notes=(evil,),
    )
    text = shown(view, silent_s={evil: 9.0})

    assert not any(ord(char) < 32 and char != "\n" for char in text)
    assert "[red]x[/red]" in text


def test_very_many_nodes_are_counted():
    nodes = tuple(RunNodeView(node=f"n{n}", ranks=8, step=1) for n in range(500))
    text = shown(replace(RunView(run_id=RUN, name="x", source="board"), nodes=nodes))

    assert "and 460 more" in text
    assert len(text.splitlines()) < 60


def test_a_run_s_folder_is_found_by_an_end_of_its_id_or_is_the_newest(tmp_path):
    for name, run_id in (("20260101T-a", "aaaa-1111"), ("20260102T-b", "bbbb-2222")):
        (tmp_path / name).mkdir()
        text = json.dumps({"run_id": run_id, "generation": 0})
        (tmp_path / name / "state.json").write_text(text)
    (tmp_path / "20260103T-empty").mkdir()

    assert find_run_folder(tmp_path, None).name == "20260102T-b"
    assert find_run_folder(tmp_path, "1111").name == "20260101T-a"
    assert find_run_folder(tmp_path, "AAAA").name == "20260101T-a"
    assert find_run_folder(tmp_path, "20260101T-a").name == "20260101T-a"
    assert find_run_folder(tmp_path, "cccc") is None
    assert find_run_folder(tmp_path / "nowhere", None) is None


def test_state_files_that_are_none_are_skipped_and_the_first_rank_s_comes_first(tmp_path):
    for name, text in (
        ("state-10.json", '{"node": "n10"}'),
        ("state-2.json", '{"node": "n2"}'),
        ("state.json", '{"node": "n0"}'),
        ("state-3.json", "{"),
        ("state-4.json", "[]"),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "state-5.json").symlink_to("state.json")

    assert [state["node"] for state in read_states(tmp_path)] == ["n0", "n2", "n10"]


def beats_of(board, **states):
    """Let n1 and n2 say with their heartbeats which states they keep."""
    for number, state in enumerate(states.values(), start=1):
        told = checkpoint_json(state, 3 * NS_PER_S)
        beat = {"seq": 10, "step": 57, "checkpoint": told}
        board.put(KEYS_OF_RUN.heartbeat(str(UUID(int=number))), pack(beat))


KEYS_OF_RUN = ControlKeys(run_id=RUN)


def test_the_newest_checkpoint_is_the_one_that_every_node_has():
    board = a_board(FakeClock())
    beats_of(
        board,
        n1=kept(skipped={"in_flight": 1}, copies=3, verified_step=30),
        n2=kept(step=55, persisted_step=40, verified_step=20, skipped={"in_flight": 4}, copies=2),
    )
    view = read_control_store(board)

    assert view.to_json()["checkpoint"] == {
        "step": 55,
        "age_seconds": 3.0,
        "tier": "memory",
        "persisted_step": 40,
        "verified_step": 30,
        "skipped": 4,
        "keeper": "running",
        "copies": 2,
    }
    said = "step 55 in memory (2 copies), 3.00 s ago; step 40 persisted; step 30 verified"
    assert f"checkpoint  {said}; 4 skipped" in shown(view)


def test_a_keeper_that_is_gone_is_said():
    board = a_board(FakeClock())
    beats_of(board, n1=kept(), n2=CheckpointState(is_alive=False))

    assert "nothing is saved until another one has started" in shown(read_control_store(board))


def test_a_run_whose_script_saves_nothing_has_no_line_of_it():
    board = a_board(FakeClock())
    beats_of(board, n1=CheckpointState(), n2=CheckpointState())

    assert "checkpoint" not in shown(read_control_store(board))
    assert read_control_store(a_board(FakeClock())).checkpoint is None


def test_an_agent_tells_of_its_own_checkpoints():
    state = agent_state(checkpoint=CheckpointState(committed=9))
    view = from_agent(state_json(state, NS_PER_S))

    assert view.checkpoint.keeper == "running"
    assert "checkpoint" not in shown(view)
    alone = from_agent(state_json(replace(state, checkpoint=kept()), NS_PER_S))
    assert "step 57 in memory (1 copy)" in shown(alone)
    later = from_agent(state_json(replace(state, checkpoint=kept(tier="persistent")), NS_PER_S))
    assert "checkpoint  step 57 persistent, 1.00 s ago" in shown(later)
