"""The agent's window: what it shows, to whom, and what it takes from strangers."""

import http.client
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.agent_states import agent_state, kept
from support.decisions import decision, report
from support.runs import wait_until
from support.services import unavailable

from gpuops.agent.status.server import CONNECTIONS_MAX, HEAD_BYTES_MAX, AgentServer, metrics
from gpuops.agent.status.state import (
    CheckpointState,
    RankStatus,
    run_state,
    state_json,
    why_unhealthy,
)
from gpuops.host.clock import FakeClock
from gpuops.host.net.peer import peer_uid
from gpuops.units import NS_PER_S

NOW_NS = 1000 * NS_PER_S
STATE = agent_state(
    main_ns=NOW_NS,
    control_ns=NOW_NS - NS_PER_S,
    generation=2,
    phase_ns=NOW_NS - 90 * NS_PER_S,
    reason="a worker failed",
    world_size=16,
    ranks=(
        RankStatus(rank=0, pid=10, step=57, phase="stepping", beat_ns=NOW_NS - NS_PER_S // 2),
        RankStatus(rank=1, pid=11),
    ),
    excluded={"n9": "Xid 79"},
    doubted={"n8": "slow"},
    decision=decision(report("n9")),
    restarts_used=2,
    restarts_by_class={"gpu_hw.fell_off_bus": 1, "user_code.exception": 1},
    badput_s={"detect": 0.5, "decide": 1.25},
    round_trip_s=0.004,
    fences=1,
    cpu_s=3.5,
    board={"kind": "tcp", "host": "n1", "port": 29400},
    http_port=8080,
    checkpoint=kept(
        since_ns=NOW_NS - 3 * NS_PER_S,
        persisted_step=40,
        verified_step=30,
        committed=17,
        skipped={"in_flight": 2, "no_free_slot": 1},
    ),
)


@pytest.fixture
def serve():
    """Return a function that serves a state on a free port of loopback."""
    opened = []

    def start(state=STATE, **options):
        clock = FakeClock(mono_ns=NOW_NS)
        server = AgentServer("127.0.0.1", 0, lambda: state, clock=clock, **options).start()
        opened.append(server)
        return server

    yield start
    for server in opened:
        server.close()


def get(server, path, *, method="GET", headers=None):
    """Return the status, the content type and the body of one request."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_the_state_says_who_where_and_why(serve):
    status, kind, text = get(serve(), "/state")
    body = json.loads(text)

    assert (status, kind) == (200, "application/json")
    assert body["schema"] == "gpuops.agent-state/1"
    assert (body["generation"], body["phase"], body["phase_seconds"]) == (2, "run", 90.0)
    assert (body["group_rank"], body["world_size"]) == (0, 16)
    assert body["ranks"] == [
        rank | {"steps_counted": None}
        for rank in (
            {"rank": 0, "pid": 10, "step": 57, "phase": "stepping", "silent_seconds": 0.5},
            {"rank": 1, "pid": 11, "step": None, "phase": "starting", "silent_seconds": None},
        )
    ]
    assert (body["excluded"], body["doubted"]) == ({"n9": "Xid 79"}, {"n8": "slow"})
    assert body["decision"]["rule"] == "worker-failed"
    assert body["budget"] == {"used": 2, "max": 3, "window_seconds": None}
    assert body["lost_seconds_by_phase"] == {"detect": 0.5, "decide": 1.25}


def test_the_state_says_where_the_job_would_resume_from(serve):
    body = json.loads(get(serve(), "/state")[2])
    none = json.loads(get(serve(replace(STATE, checkpoint=None)), "/state")[2])

    assert body["checkpoint"] == {
        "step": 57,
        "epoch": 1,
        "age_seconds": 3.0,
        "tier": "memory",
        "persisted_step": 40,
        "verified_step": 30,
        "committed": 17,
        "skipped": 3,
        "skipped_by_reason": {"in_flight": 2, "no_free_slot": 1},
        "copies": 1,
        "keeper": "running",
    }
    assert none["checkpoint"] is None


def test_the_metrics_say_how_old_the_newest_checkpoint_is(serve):
    lines = get(serve(), "/metrics")[2].splitlines()
    gone = replace(STATE, checkpoint=CheckpointState(is_alive=False))
    fewer = get(serve(gone), "/metrics")[2]

    assert "gpuops_checkpoint_step 57.0" in lines
    assert "gpuops_checkpoint_age_seconds 3.0" in lines
    assert "gpuops_checkpoint_persisted_step 40.0" in lines
    assert "gpuops_checkpoints_committed_total 17.0" in lines
    assert 'gpuops_checkpoints_skipped_total{reason="in_flight"} 2.0' in lines
    assert "gpuops_checkpoint_keeper_up 1.0" in lines
    assert "gpuops_checkpoint_keeper_up 0.0" in fewer
    assert "gpuops_checkpoint_step " not in fewer
    assert "gpuops_checkpoint" not in get(serve(replace(STATE, checkpoint=None)), "/metrics")[2]


def test_secrets_in_a_reason_are_not_shown(serve):
    evil = replace(STATE, reason="postgresql://ada:hunter2@db/x")

    assert "hunter2" not in get(serve(evil), "/state")[2]


def test_a_living_agent_is_healthy_and_a_stuck_one_says_why(serve):
    stuck = replace(STATE, main_ns=NOW_NS - 61 * NS_PER_S, control_ns=NOW_NS - 31 * NS_PER_S)

    assert get(serve(), "/healthz")[::2] == (200, "ok\n")
    assert get(serve(stuck), "/healthz")[::2] == (
        503,
        (
            "the main loop is silent for 61 s (limit 60 s)\n"
            "the control thread is silent for 31 s (limit 30 s)\n"
        ),
    )
    assert why_unhealthy(replace(STATE, main_ns=NOW_NS - 60 * NS_PER_S), NOW_NS) == []


def test_promtool_finds_nothing_wrong_with_the_metrics(serve):
    text = get(serve(), "/metrics")[2]

    assert 'gpuops_run_phase{phase="run"} 1.0' in text
    assert 'gpuops_run_phase{phase="gather"} 0.0' in text
    assert 'gpuops_rank_step{rank="0"} 57.0' in text
    assert 'gpuops_run_restarts_total{failure_class="user_code.exception"} 1.0' in text
    assert 'gpuops_run_lost_seconds_total{phase="decide"} 1.25' in text
    assert "gpuops_agent_fences_total 1.0" in text
    if shutil.which("promtool") is None:
        unavailable("promtool is not installed (Debian: prometheus)")
    ran = subprocess.run(
        ["promtool", "check", "metrics"], input=text.encode(), capture_output=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_labels_are_bounded():
    many = tuple(RankStatus(rank=n, pid=n, step=n, beat_ns=1) for n in range(5000))
    classes = {f"class.{n}": 1 for n in range(5000)}
    text = metrics(replace(STATE, ranks=many, restarts_by_class=classes), NOW_NS).decode()

    assert text.count("gpuops_rank_step{") == 64
    assert text.count("gpuops_run_restarts_total{") == 100
    assert len(state_json(replace(STATE, ranks=many), NOW_NS)["ranks"]) == 64


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("127.8.8.8", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("10.0.0.1", 403),
        ("[::1", 200),
        ("[fe80::1]", 403),
        (" ", 403),
    ],
)
def test_on_loopback_only_its_own_names_are_answered(serve, host, status):
    assert get(serve(), "/state", headers={"Host": host})[0] == status


def test_the_state_of_a_run_is_for_its_own_user(serve):
    """The exploit: any account of the node read the run's id, and the last words of a worker."""
    if os.geteuid() != 0:
        unavailable("only root can be another user")
    server = serve()
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()

    def ask_as_another():
        os.setuid(65534)
        answers.put([get(server, path) for path in ("/state", "/state?", "/metrics", "/healthz")])

    other = fork.Process(target=ask_as_another)
    other.start()
    state, spelled, *open_to_all = answers.get(timeout=60)
    other.join(60)

    assert state[::2] == spelled[::2] == (403, "the state of a run is for its own user\n")
    assert [status for status, *_ in open_to_all] == [200, 200]
    assert get(server, "/state")[0] == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_user_of_a_connection_is_known_at_both_ends(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2], 30) as client,
        listener.accept()[0] as accepted,
    ):
        assert peer_uid(accepted) == peer_uid(client) == os.geteuid()
        assert peer_uid(client, Path("/nowhere")) is None


def test_only_reading_is_allowed_and_only_what_is_there(serve):
    server = serve()

    assert get(server, "/state", method="POST")[0] == 405
    assert get(server, "/state", method="DELETE")[0] == 405
    assert get(server, "/../../etc/passwd")[0] == 404
    assert get(server, "/metrics?x=1")[0] == 200


def spoken(server, data, *, ends=False):
    """Send *data* as it is and return all that comes back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            return b""
        return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nX: " + b"a" * (2 * HEAD_BYTES_MAX) + b"\r\n\r\n",
        b"GET /" + b"a" * (2 * HEAD_BYTES_MAX),
        b"a" * 10**6,
    ],
)
def test_a_request_that_is_too_long_is_dropped(serve, data):
    server = serve()

    assert spoken(server, data) == b""
    assert get(server, "/healthz")[0] == 200


@pytest.mark.parametrize("data", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET /x HTTP/9.9\r\n\r\n"])
def test_what_is_no_request_gets_no_state(serve, data):
    server = serve()
    answer = spoken(server, data)

    assert b"run_id" not in answer
    assert b" 200 " not in answer
    assert get(server, "/healthz")[0] == 200


def test_a_request_that_drips_in_is_cut_off_as_a_whole(serve):
    server = serve(request_s=0.3)

    assert spoken(server, b"GET /state HT") == b""
    assert spoken(server, b"GET /state HT", ends=True) == b""


def test_connections_that_say_nothing_keep_nobody_out(serve):
    """The exploit: eight slow connections, renewed each 5 s, and a watcher sees no agent."""
    server = serve(request_s=60.0)
    held = [
        socket.create_connection(("127.0.0.1", server.port), timeout=30)
        for _ in range(CONNECTIONS_MAX)
    ]
    try:
        held[-1].sendall(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n")
        assert [get(server, "/healthz")[0] for _ in range(3)] == [200] * 3
        assert held[0].recv(1) == b""
        held[-1].sendall(b"\r\n")
        assert held[-1].recv(15) == b"HTTP/1.0 200 OK"
    finally:
        for connection in held:
            connection.close()


def test_a_state_that_cannot_be_read_is_an_error_and_the_next_request_is_answered(serve):
    def broken():
        raise RuntimeError("no state")

    with closing(AgentServer("127.0.0.1", 0, broken).start()) as server:
        for _ in range(2 * CONNECTIONS_MAX):
            assert get(server, "/state")[0] == 500
        assert get(server, "/nothing")[0] == 404


def test_a_port_that_is_taken_is_a_warning(serve, caplog):
    taken = serve()
    server = AgentServer("127.0.0.1", taken.port, lambda: STATE).start()

    assert server.port is None
    assert "cannot listen on 127.0.0.1" in caplog.text
    server.close()


@pytest.mark.parametrize(("address", "port"), [("203.0.113.7", 0), ("no such host", 0), ("::", -1)])
def test_an_address_that_is_not_ours_is_a_warning(address, port, caplog):
    assert AgentServer(address, port, lambda: STATE).start().port is None
    assert "cannot listen on" in caplog.text


def test_threads_and_the_port_are_given_back(serve):
    server = serve()
    port = server.port
    server.close()

    again = AgentServer("127.0.0.1", port, lambda: STATE).start()
    assert again.port == port
    again.close()
    wait_until(
        lambda: not any(t.name == "gpuops-http" for t in threading.enumerate()),
        what="the threads' end",
    )


def test_what_the_run_folder_says_holds_no_secret_and_where_to_ask():
    assert run_state(STATE) == {
        "board": {"kind": "tcp", "host": "n1", "port": 29400},
        "http_port": 8080,
        "control_phase": "run",
        "excluded": {"n9": "Xid 79"},
        "doubted": {"n8": "slow"},
        "budget": {"used": 2, "max": 3},
    }
