"""``gpuops run status`` as people call it: over a real board's server, an agent, files, a store."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from support.agent_states import FOLDER, RUN, agent_state
from support.decisions import failure
from support.history import T0, a_killed_run, record_run
from support.listening import Listening

from gpuops.agent.status.server import AgentServer
from gpuops.agent.status.state import run_state
from gpuops.cli.main import run_command
from gpuops.cli.run_status import StatusHistory
from gpuops.control.record import (
    RECORD_KEY,
    ControlKeys,
    ControlRecord,
    Member,
    Roster,
    RunPhase,
    pack,
)
from gpuops.control.tcp.process import start_server
from gpuops.control.tcp.store import TcpControlStore
from gpuops.host.clock import FakeClock
from gpuops.report.run_view import RunNodeView, RunView
from gpuops.store.spool.record import spool_recorder
from gpuops.units import NS_PER_S

AGENT = "00000000-0000-0000-0000-000000000001"
RUN_KEY = "job-17"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Return a function that runs ``gpuops run status`` on the runs in ``tmp_path / "runs"``."""
    monkeypatch.setenv("GPUOPS_STORE", f"sqlite:///{tmp_path / 'store.db'}")
    monkeypatch.setenv("GPUOPS_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("GPUOPS_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("GPUOPS_TOKEN", raising=False)

    def command(*words):
        code = run_command(["run", "status", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def publish(tmp_path, state):
    """Write the state file that an agent with *state* would."""
    folder = tmp_path / "runs" / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    told = {"run_id": RUN, "name": FOLDER, "node": state.node, "generation": 1}
    told |= {"phase": "running", "pids": {"0": 5, "1": 6}, **run_state(state)}
    (folder / "state.json").write_text(json.dumps(told))
    return folder


@pytest.fixture
def board(monkeypatch):
    """Start a board's server with a run on it; return where it is."""
    token = secrets.token_hex(16)
    server = start_server("127.0.0.1", 0, run_key=RUN_KEY, token=token)
    try:
        with closing(
            TcpControlStore("127.0.0.1", server.port, run_key=RUN_KEY, token=token)
        ) as told:
            fill(told)
        monkeypatch.setenv("GPUOPS_TOKEN", token)
        yield {"kind": "tcp", "host": "127.0.0.1", "port": server.port, "run_key": RUN_KEY}
    finally:
        server.kill()


def fill(board, **changes):
    keys = ControlKeys(run_id=RUN)
    fields = {"run_id": RUN, "folder": FOLDER, "generation": 1, "phase": RunPhase.RUN}
    fields |= {"since_s": 0.0, "history": (failure(0),), "excluded": {"n9": "Xid 79"}}
    record = ControlRecord(**{**fields, **changes})
    version = board.get(RECORD_KEY).version
    assert board.compare_and_set(RECORD_KEY, record.to_bytes(), version=version)[0]
    me = Member(agent=AGENT, node="n1", address="127.0.0.1", n_workers=2)
    board.put(keys.agent(AGENT), pack(me.to_json()))
    board.put(keys.roster(1), Roster(generation=1, members=(me,)).to_bytes())
    beat = {"seq": 3, "step": 57, "silent_s": 0.5, "step_seconds": 0.25}
    board.put(keys.heartbeat(AGENT), pack(beat))


def test_the_board_is_asked_where_the_folder_says_it_is(call, board, tmp_path):
    publish(tmp_path, agent_state(board=board))
    code, out, _ = call("--json")
    body = json.loads(out)

    assert code == 0
    assert body["schema"] == "gpuops.run-status/1"
    assert (body["source"], body["phase"], body["step"]) == ("board", "run", 57)
    assert (body["restarts_used"], body["restarts_max"]) == (1, 3)
    assert body["excluded"] == {"n9": "Xid 79"}
    assert body["nodes"][0] == {
        "node": "n1",
        "group_rank": 0,
        "first_rank": 0,
        "ranks": 2,
        "step": 57,
        "steps_counted": None,
        "silent_seconds": 0.5,
        "step_seconds": 0.25,
        "slowdown": None,
    }
    assert body["notes"] == []


@pytest.mark.parametrize("words", [["abcd1234"], ["0190f6a0"], [], [FOLDER]])
def test_a_run_is_named_by_an_end_of_its_id(call, board, tmp_path, words):
    folder = publish(tmp_path, agent_state(board=board))

    assert "steps       57" in call(*words)[1]
    assert "steps       57" in call("--run-dir", str(folder))[1]
    assert "steps       57" in call(*words, "--run-dir", str(folder.parent))[1]


@pytest.mark.parametrize("words", [[], ["abcd1234"]])
def test_a_folder_without_the_run_is_not_answered_with_a_run_of_the_store(call, tmp_path, words):
    code, _, err = call(*words, "--run-dir", str(tmp_path / "nowhere"))

    assert code == 64
    assert f"there is no {' '.join(['run', *words])} in {tmp_path / 'nowhere'}" in err


def test_with_another_token_the_files_are_shown_and_it_is_said(call, board, tmp_path, monkeypatch):
    publish(tmp_path, agent_state(board=board))
    monkeypatch.setenv("GPUOPS_TOKEN", secrets.token_hex(16))
    code, out, _ = call("--json")
    body = json.loads(out)

    assert (code, body["source"], body["phase"]) == (0, "file", "running")
    assert "the control store does not answer" in body["notes"][0]
    assert board["run_key"] in json.dumps(run_state(agent_state(board=board)))


def test_a_board_that_holds_another_run_is_not_believed(call, board, tmp_path):
    folder = publish(tmp_path, agent_state(board=board))
    path = folder / "state.json"
    path.write_text(path.read_text().replace(RUN, "0190f6a0-0000-7000-8000-0000eeee0000"))
    body = json.loads(call("--json")[1])

    assert body["source"] == "file"
    assert body["notes"][0] == "the control store is used by another run now"


def test_on_its_own_node_a_private_run_is_asked_over_http(call, tmp_path):
    state = agent_state()
    with closing(AgentServer("127.0.0.1", 0, lambda: state).start()) as server:
        publish(tmp_path, replace(state, http_port=server.port))
        body = json.loads(call("--json")[1])

    assert (body["source"], body["step"], body["restarts_max"]) == ("agent", 40, 3)
    assert body["nodes"][0]["node"] == "n1"


def test_what_listens_there_may_be_anything(call, tmp_path):
    state = agent_state(run_id="another")
    with closing(AgentServer("127.0.0.1", 0, lambda: state).start()) as server:
        publish(tmp_path, replace(state, http_port=server.port))

        assert json.loads(call("--json")[1])["source"] == "file"


class _Dripping(Listening):
    """Sends one byte of an answer after the other, each in time."""

    has_ended = False

    def serve(self, sock):
        for byte in b"HTTP/1.0 200 OK" + 200 * b" ":
            sock.sendall(bytes([byte]))
            if self.ends.wait(0.1):
                break
        self.has_ended = True


def test_a_stranger_on_the_port_of_an_ended_agent_does_not_hold_the_command(
    call, tmp_path, monkeypatch
):
    monkeypatch.setattr("gpuops.report.run_status.QUERY_TIMEOUT_S", 0.5)
    with _Dripping() as stranger:
        publish(tmp_path, agent_state(http_port=stranger.port))
        assert json.loads(call("--json")[1])["source"] == "file"
        assert stranger.n_calls == 1
        assert not stranger.has_ended


def test_an_agent_that_does_not_answer_leaves_the_files(call, tmp_path):
    publish(tmp_path, agent_state(http_port=1))
    code, out, _ = call()

    assert code == 0
    assert "phase       running, generation 1" in out
    assert "note        from the run's folder, which may be out of date" in out


def test_of_a_run_that_has_ended_the_folder_says_when_and_how(call, board, tmp_path):
    dead = {**board, "port": 1}
    folder = publish(tmp_path, agent_state(board=dead))
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"running"', '"ended"'))
    assert "note        its journal cannot be read" in call()[1]

    run, rows, incidents = a_killed_run()
    run = replace(run, id=RUN, exit_code=93, reason="the same KeyError twice", ended_us=T0)
    recorder = spool_recorder(
        tmp_path / "spool",
        node="n1",
        boot_id="b",
        bytes_max=2**24,
        clock=FakeClock(T0),
        journal=folder / "journal",
    )
    record_run(recorder, run, rows, incidents, FakeClock(T0))
    recorder.close()
    code, out, _ = call()

    assert code == 0
    assert re.search(r"phase       ended .* ago, generation 1, exit code 93", out)
    assert "why         the same KeyError twice" in out
    assert "nodes       n1\n" in out
    assert "note" not in out


def test_of_a_folder_of_several_runs_it_is_said_which_are_there(call, tmp_path):
    newest = publish(tmp_path, agent_state(http_port=1))
    older = newest.with_name(f"2020{newest.name[4:]}-other")
    shutil.copytree(newest, older)

    out = " ".join(call("--run-dir", str(newest.parent))[1].split())
    assert "the newest of 2 runs in" in out
    assert out.endswith(f"the others: {older.name}")
    code, _, err = call("ffffffff", "--run-dir", str(newest.parent))
    assert code == 64
    assert f"there is no run ffffffff in {newest.parent}, but {newest.name}, {older.name};" in err


def test_without_a_folder_the_store_is_read(call, tmp_path):
    run, rows, incidents = a_killed_run()
    recorder = spool_recorder(
        tmp_path / "spool", node="n041", boot_id="b", bytes_max=2**24, clock=FakeClock(T0)
    )
    record_run(recorder, run, rows, incidents, FakeClock(T0))
    recorder.close()
    body = json.loads(call("abcd1234", "--json")[1])

    assert (body["source"], body["phase"]) == ("store", "completed")
    assert body["notes"][0] == "from the store, which may be out of date"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ffffffff"], "no run has an id"),
        (["a", "b"], "unexpected extra argument"),
        (["--steps"], "No such option"),
    ],
)
def test_bad_input_is_one_clear_line(call, tmp_path, words, message):
    record_run_once(tmp_path)
    code, _, err = call(*words)

    assert code == 64
    assert message in err
    assert "Traceback" not in err


def record_run_once(tmp_path):
    recorder = spool_recorder(
        tmp_path / "spool", node="n041", boot_id="b", bytes_max=2**24, clock=FakeClock(T0)
    )
    record_run(recorder, *a_killed_run(), FakeClock(T0))
    recorder.close()


def test_watching_ends_with_the_run(call, board, tmp_path):
    folder = publish(tmp_path, agent_state(board=board))
    out = tmp_path / "watched"
    with (
        out.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-m", "gpuops", "run", "status", "--watch", "--run-dir", str(folder)],
            stdout=file,
        ) as watching,
    ):
        token = os.environ["GPUOPS_TOKEN"]
        place = (board["host"], board["port"])
        with closing(TcpControlStore(*place, run_key=RUN_KEY, token=token)) as told:
            fill(told, phase=RunPhase.STOP, exit_code=93, reason="the same KeyError twice")
        assert watching.wait(60) == 0
    text = out.read_text()

    assert "phase       stop" in text
    assert "exit code 93" in text
    assert "the same KeyError twice" in text


def test_the_pace_needs_two_looks_and_begins_anew_when_steps_are_made_again():
    pace = StatusHistory()
    view = RunView(run_id=RUN, name="x", source="board", nodes=(RunNodeView(node="n1", seq=1),))

    assert pace.rate(10, 0) is None
    assert pace.rate(15, 2 * NS_PER_S) == 2.5
    assert pace.rate(3, 3 * NS_PER_S) is None
    assert pace.rate(4, 4 * NS_PER_S) == 1.0
    assert pace.rate(None, 5 * NS_PER_S) is None
    assert pace.silent_s(view, 0) == {"n1": 0.0}
    assert pace.silent_s(view, 7 * NS_PER_S) == {"n1": 7.0}
    moved = replace(view, nodes=(RunNodeView(node="n1", seq=2),))
    assert pace.silent_s(moved, 8 * NS_PER_S) == {"n1": 0.0}


def test_it_imports_no_torch():
    program = "import sys, gpuops.cli.run_status; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )

    assert ran.stdout == "False\n"


@pytest.fixture
def readmit(call, capsys):
    """Return a function that runs ``gpuops run readmit``."""

    def command(*words):
        code = run_command(["run", "readmit", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def test_a_repaired_node_is_readmitted(call, readmit, board, tmp_path):
    publish(tmp_path, agent_state(board=board))

    assert readmit("n9") == (0, f"node n9 may join the run {FOLDER} again\n", "")
    assert json.loads(call("--json")[1])["excluded"] == {}
    code, _out, err = readmit("n9")
    assert (code, err) == (64, "gpuops: the run has not left n9 out; left out: none\n")


def test_a_run_that_cannot_be_reached_readmits_nobody(readmit, tmp_path):
    code, _out, err = readmit("n9")
    assert code == 64
    assert "no run in" in err

    publish(tmp_path, agent_state())
    code, _out, err = readmit("n9")
    assert code == 64
    assert "it is on one node" in err
