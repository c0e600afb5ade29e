"""The server process and its client under attack and misfortune."""

import asyncio
import contextlib
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.boards import (
    DEADLINE_S,
    RUN_KEY,
    TOKEN,
    Proxy,
    eventually,
    server,
    tcp_board,
)
from support.lateness import again_if_late
from support.ports import free_port

from gpuops.control import signing
from gpuops.control.store import (
    VALUE_BYTES_MAX,
    ControlStoreError,
    ControlStoreResetError,
    ControlStoreUnreachableError,
    Entry,
)
from gpuops.control.tcp import wire
from gpuops.control.tcp.client_connection import OpenedSocket
from gpuops.control.tcp.process import start_server
from gpuops.control.tcp.server import ControlStoreServer
from gpuops.control.tcp.server_connection import ServerLimits, ServerState
from gpuops.host.net import frames
from gpuops.host.net import job_proof as proof
from gpuops.host.process.sidecar import Sidecar

SECRET = b"the record of the run"


@pytest.fixture(scope="module")
def shared():
    """One server for the tests that leave it as it was."""
    with server() as process, contextlib.closing(tcp_board(process.port)) as board:
        board.put("control", SECRET)
        yield process


def still_serves(process):
    with contextlib.closing(tcp_board(process.port)) as board:
        assert board.get("control").value == SECRET
    return True


class Stranger:
    """A connection that says what it likes."""

    def __init__(self, port, token=TOKEN, run_key=RUN_KEY):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.key = signing.token_key(token)
        self.run = signing.run_digest(run_key)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def say(self, body):
        self.socket.sendall(frames.framed(body))

    def hear(self):
        """Return the next frame, None where there is none any more."""
        with contextlib.suppress(ConnectionError):
            head = self._exactly(4)
            return self._exactly(frames.LENGTH.unpack(head)[0])
        return None

    def _exactly(self, number):
        data = b""
        while len(data) < number:
            chunk = self.socket.recv(number - len(data))
            if not chunk:
                raise ConnectionResetError
            data += chunk
        return data

    def greet(self, client=None):
        """Say hello; return the handshake. A server that ends meanwhile is a ConnectionError."""
        hello = wire.ControlHello(
            self.run, client or secrets.token_bytes(16), 0, proof.nonce()
        ).to_bytes()
        self.say(hello)
        if (challenge := self.hear()) is None:
            raise ConnectionResetError
        return proof.JobHandshake(self.key, hello + challenge)

    def enter(self, client=None):
        """Prove the token; return the tags of our frames."""
        shake = self.greet(client)
        self.say(shake.proof("client"))
        assert self.hear()[0] == proof.ProofWelcome.ACCEPTED
        return shake.channel("client")

    def was_cut_off(self):
        return self.hear() is None


def request(what=wire.Operation.GET, key="control", number=1, **more):
    return wire.ControlRequest(number, what, key, **more).to_bytes()


@pytest.mark.parametrize(
    ("token", "words"), [("another", "token"), ("", "token")], ids=["wrong", "none"]
)
def test_without_the_token_nothing_is_read_or_written(shared, token, words):
    with contextlib.closing(tcp_board(shared.port, token=token)) as board:
        for call in (
            lambda: board.get("control"),
            lambda: board.list(""),
            lambda: board.put("control", b"mine"),
            lambda: board.compare_and_set("control", b"mine", version=1),
            lambda: board.heartbeat("control", b"mine", watch="control", seen_version=0, hold_s=0),
            lambda: board.delete(""),
        ):
            with pytest.raises(ControlStoreError, match=words) as caught:
                call()
            assert not isinstance(caught.value, ControlStoreUnreachableError)
    assert still_serves(shared)


def test_the_board_of_another_run_says_so(shared):
    with (
        contextlib.closing(tcp_board(shared.port, run_key="other")) as board,
        pytest.raises(ControlStoreError, match="another run"),
    ):
        board.get("control")
    with contextlib.closing(tcp_board(shared.port)) as board:
        (note,) = board.list("refused/").values()
        assert note.value == b"an agent at 127.0.0.1 was refused: it has another --rdzv-id"


def test_a_request_before_the_proof_is_not_answered(shared):
    for early in (request(), bytes(16) + request()):
        with Stranger(shared.port) as stranger:
            stranger.say(early)
            assert stranger.was_cut_off()
        with Stranger(shared.port) as stranger:
            stranger.greet()
            stranger.say(early)
            assert stranger.hear()[0] == proof.ProofWelcome.WRONG_TOKEN
            assert stranger.was_cut_off()


def test_an_overheard_proof_opens_no_second_connection(shared):
    with Stranger(shared.port) as first, Stranger(shared.port) as second:
        overheard = first.greet().proof("client")
        second.greet()
        second.say(overheard)
        assert second.hear()[0] == proof.ProofWelcome.WRONG_TOKEN


def test_the_servers_own_proof_is_no_clients(shared):
    with Stranger(shared.port) as stranger:
        stranger.say(stranger.greet().proof("server"))
        assert stranger.hear()[0] == proof.ProofWelcome.WRONG_TOKEN


@pytest.mark.parametrize("how", ["no tag", "another's tag", "the same again", "changed"])
def test_a_frame_put_into_a_proved_connection_is_refused(shared, how):
    message = request(wire.Operation.PUT, "control", value=b"mine")
    with Stranger(shared.port) as stranger:
        channel = stranger.enter()
        harmless = request()
        frame = channel.tag(harmless) + harmless
        if how == "no tag":
            stranger.say(bytes(proof.TAG_BYTES) + message)
        elif how == "another's tag":
            stranger.say(proof.ProofChannel(bytes(32)).tag(message) + message)
        elif how == "changed":
            stranger.say(channel.tag(harmless)[: proof.TAG_BYTES] + message)
        else:
            stranger.say(frame)
            assert stranger.hear() is not None
            stranger.say(frame)
        assert stranger.was_cut_off()
    assert still_serves(shared)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(10_000),
        b"\xff" * 10_000,
        struct.pack(">I", 2**31) + b"x",
        struct.pack(">I", wire.HANDSHAKE_BYTES_MAX + 1),
        struct.pack(">I", 0) * 2,
        struct.pack(">I", 128) + b"gpuopsb1" + bytes(120),
        b"\x80\x04\x95pickle",
    ],
    ids=["http", "zeros", "ones", "huge", "over", "empty", "hello", "pickle"],
)
def test_garbage_is_cut_off_and_harms_nobody(shared, garbage):
    with Stranger(shared.port) as stranger:
        stranger.socket.sendall(garbage)
        stranger.socket.shutdown(socket.SHUT_WR)
        while stranger.hear():
            pass
    assert still_serves(shared)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        bytes(5),
        b"\xff" * 60,
        request()[:-3],
        request().replace(b"control", b"c\xffntrol"),
        request(wire.Operation.HEARTBEAT, "a", watch="b", hold_s=float("nan"))[:10],
    ],
    ids=["empty", "zeros", "ones", "short", "not ascii", "cut"],
)
def test_a_proved_client_that_talks_nonsense_loses_only_itself(shared, message):
    with Stranger(shared.port) as stranger:
        channel = stranger.enter()
        stranger.say(channel.tag(message) + message)
        assert stranger.was_cut_off()
    assert still_serves(shared)


@pytest.mark.parametrize("hold_s", [float("nan"), float("inf"), -1.0])
def test_a_hold_that_is_no_time_is_no_hold(shared, hold_s):
    with Stranger(shared.port) as stranger:
        channel = stranger.enter()
        message = request(wire.Operation.HEARTBEAT, "alive/x", watch="w", hold_s=hold_s)
        stranger.say(channel.tag(message) + message)
        assert stranger.hear() is not None


def test_a_line_that_its_client_gave_up_is_read_no_more(shared):
    client = secrets.token_bytes(16)
    with Stranger(shared.port) as before, Stranger(shared.port) as after:
        before.enter(client)
        after.enter(client)
        assert before.was_cut_off()


def test_an_oversized_frame_of_a_proved_client_is_cut_off(shared):
    with Stranger(shared.port) as stranger:
        stranger.enter()
        stranger.socket.sendall(frames.LENGTH.pack(wire.FRAME_BYTES_MAX + 1))
        assert stranger.was_cut_off()
    assert still_serves(shared)


def test_who_does_not_prove_the_token_in_time_is_cut_off(shared):
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(Stranger(shared.port)) for _ in range(20)]
        for stranger in silent[:10]:
            stranger.socket.sendall(b"\0\0")
        assert still_serves(shared)
        for stranger in silent:
            assert stranger.was_cut_off()


@contextlib.contextmanager
def few_places(**limits):
    """Yield the port of a server in a thread: nobody is cut off for being slow, unless *limits*."""
    endless = {"handshake_timeout_s": 600.0, "unknown_handshake_s": 600.0}
    bounds = ServerLimits(**{**endless, "connections_max": 8, **limits})
    state = ServerState(run_key=RUN_KEY, token=TOKEN, limits=bounds)
    ports, loop = queue.Queue(), asyncio.new_event_loop()
    ends = asyncio.Event()

    async def serve():
        async with await ControlStoreServer(state).listen("127.0.0.1", 0) as listener:
            ports.put(listener.sockets[0].getsockname()[1])
            await ends.wait()
            for connection in tuple(state.clients.values()):
                connection.abort()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        yield ports.get(timeout=30), state, loop
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.mark.parametrize("said", [b"", b"\0\0", b"\0\0\0\x38gpuopsb1"])
def test_strangers_in_number_keep_no_agent_out(said):
    with few_places(unauthenticated_per_address_max=4) as (port, state, _):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stranger = stack.enter_context(Stranger(port))
                with contextlib.suppress(ConnectionError):
                    stranger.socket.sendall(said)
            with contextlib.closing(tcp_board(port)) as board:
                board.put("k", b"v")
                assert board.get("k").value == b"v"
        assert state.counters.n_cut_off >= 17
        assert state.counters.n_rejected == 0


def test_a_burst_of_strangers_does_not_overtake_an_agent():
    with few_places(connections_max=1024, unauthenticated_per_address_max=256) as places:
        port, _state, loop = places
        is_over = threading.Event()
        loop.call_soon_threadsafe(is_over.wait)
        with contextlib.ExitStack() as stack:
            # All of this is in the kernel's queue when the server begins to accept.
            stack.callback(is_over.set)
            agent = stack.enter_context(Stranger(port))
            hello = wire.ControlHello(agent.run, bytes(16), 0, proof.nonce()).to_bytes()
            agent.say(hello)
            for _ in range(256 + 40):
                stack.enter_context(Stranger(port))
            is_over.set()
            agent.say(proof.JobHandshake(agent.key, hello + agent.hear()).proof("client"))
            assert agent.hear()[0] == proof.ProofWelcome.ACCEPTED


def test_agents_that_proved_the_token_outlast_any_number_of_strangers():
    with few_places() as (port, state, _), contextlib.ExitStack() as stack:
        boards = [stack.enter_context(contextlib.closing(tcp_board(port))) for _ in range(7)]
        for number, board in enumerate(boards):
            board.put(f"k/{number}", b"v")
        for _ in range(20):
            stack.enter_context(Stranger(port))
        eventually(lambda: state.counters.n_cut_off == 19, "strangers displace strangers")
        boards.append(stack.enter_context(contextlib.closing(tcp_board(port))))
        for board in boards:
            assert len(board.list("k/")) == 7
        assert state.counters.n_cut_off == 20
        # Every place is an agent's.
        with Stranger(port) as stranger:
            assert stranger.hear()[0] == proof.ProofWelcome.BUSY


def test_an_agent_that_is_slow_to_come_back_keeps_its_place():
    with few_places(unknown_handshake_s=0.05) as (port, state, _):
        with Stranger(port) as agent:
            shake = agent.greet()
            assert agent.was_cut_off()
        state.admission.add_known("127.0.0.1")
        with Stranger(port) as agent, contextlib.ExitStack() as stack:
            shake = agent.greet()
            for _ in range(20):
                # 127.0.0.2 is another address of this machine.
                to, place = ("127.0.0.1", port), ("127.0.0.2", 0)
                stack.enter_context(socket.create_connection(to, 30, source_address=place))
            eventually(lambda: state.admission.n_waiting == 1, "strangers are cut off")
            agent.say(shake.proof("client"))
            assert agent.hear()[0] == proof.ProofWelcome.ACCEPTED


def test_a_client_that_does_not_read_holds_back_only_itself():
    with server() as process, contextlib.closing(tcp_board(process.port)) as board:
        board.put("control", SECRET)
        board.put("big", bytes(VALUE_BYTES_MAX))
        with Stranger(process.port) as stranger:
            channel = stranger.enter()
            message = request(key="big")
            messages = [channel.tag(message) + message for _ in range(500)]
            # All at once, so that the server has them before it can stop reading.
            stranger.socket.sendall(b"".join(frames.framed(each) for each in messages))
            assert still_serves(process)
            # 500 answers are 2 GB; what it does not fetch is not made.
            assert psutil.Process(process.pid).memory_info().rss < 300 * 2**20


def test_a_full_board_says_so_and_goes_on():
    with server() as process, contextlib.closing(tcp_board(process.port)) as board:
        big = bytes(VALUE_BYTES_MAX)
        # 63 of 4 MiB, each with what an entry costs, are all that 256 MiB hold.
        for number in range(63):
            board.put(f"k/{number}", big)
        with pytest.raises(ControlStoreError, match="full"):
            board.put("k/63", big)
        board.delete("k/")
        board.put("k/0", big)


def serve_command(*words):
    return [sys.executable, "-P", "-m", "gpuops.control.tcp.serve", "--run-key", RUN_KEY, *words]


def test_a_server_whose_agent_died_before_it_handed_the_token_over_does_not_serve_openly():
    """The exploit: SIGKILL an agent as it starts, and anyone is an agent of its control store."""
    ran = subprocess.run(
        serve_command("--token-fd", "0"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert (ran.returncode, ran.stdout) == (75, b"failed the agent ended: no token came\n")


def test_a_burst_of_strangers_does_not_use_up_the_servers_files():
    """The exploit: a server without a file for the next connection accepts none for a second."""
    limited = ["sh", "-c", 'ulimit -n 700; exec "$@"', "sh"]
    command = serve_command("--port", "0", "--token-env", "T")
    environment = {**os.environ, "T": TOKEN}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*limited, *command], env=environment, **pipes) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        port = int(process.stdout.readline().split()[1])
        process.send_signal(signal.SIGSTOP)
        for number in range(900):
            source = (f"127.0.0.{2 + number // 300}", 0)
            to = ("127.0.0.1", port)
            stack.enter_context(socket.create_connection(to, 30, source_address=source))
        process.send_signal(signal.SIGCONT)
        with contextlib.closing(tcp_board(port)) as board:
            board.put("k", b"v")
        process.kill()
        assert process.stderr.read() == ""


def test_the_token_is_not_on_the_command_line_and_no_secret_in_what_is_shown(shared):
    words = psutil.Process(shared.pid).cmdline()

    assert not any(TOKEN in word for word in words)
    assert TOKEN not in repr(shared)


def test_the_server_imports_neither_torch_nor_a_database():
    code = (
        "import sys, gpuops.control.tcp.serve, gpuops.control.tcp.process\n"
        "print([m for m in ('torch', 'sqlalchemy', 'psycopg', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


# Misfortune.


def test_a_frozen_server_costs_its_deadline_and_is_used_again_when_it_thaws():
    with (
        server() as process,
        contextlib.closing(tcp_board(process.port)) as patient,
        contextlib.closing(tcp_board(process.port, deadline_s=1)) as board,
    ):
        eventually(lambda: written(board, b"1"), "it is connected")
        os.kill(process.pid, signal.SIGSTOP)
        for call in (
            lambda: board.get("k"),
            lambda: board.put("k", b"old"),
            lambda: board.heartbeat("alive/a", b"", watch="w", seen_version=0, hold_s=0.1),
        ):
            began_s = time.monotonic()
            with pytest.raises(ControlStoreUnreachableError, match="in time"):
                call()
            assert time.monotonic() - began_s < 15
        os.kill(process.pid, signal.SIGCONT)

        eventually(lambda: written(board, b"new"), "the thawed server is used again")
        # Nothing of what was given up on comes after it.
        for _ in range(3):
            assert patient.get("k").value == b"new"


def written(board, value):
    """Say whether *value* could be written within the board's own short time."""
    with contextlib.suppress(ControlStoreUnreachableError):
        board.put("k", value)
        return True
    return False


def test_lost_packets_cost_the_deadline():
    with (
        server() as process,
        Proxy(process.port) as proxy,
        contextlib.closing(tcp_board(proxy.port, deadline_s=1)) as board,
    ):
        eventually(lambda: written(board, b"1"), "it is connected")
        proxy.frozen.set()
        with pytest.raises(ControlStoreUnreachableError, match="in time"):
            board.get("k")
        with pytest.raises(ControlStoreUnreachableError, match="in time"):
            board.get("k")
        proxy.frozen.clear()
        eventually(lambda: reaches(board), "it heals")


def reaches(board):
    with contextlib.suppress(ControlStoreUnreachableError):
        return board.get("k").value == b"1"
    return False


def test_an_address_that_does_not_even_accept_costs_the_deadline():
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            line = stack.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(full.getsockname())
        board = stack.enter_context(
            contextlib.closing(tcp_board(full.getsockname()[1], deadline_s=1))
        )
        began_s = time.monotonic()
        with pytest.raises(ControlStoreUnreachableError):
            board.get("k")
        assert time.monotonic() - began_s < 15


def test_an_answer_that_takes_two_seconds_is_an_answer():
    pause = threading.Event()

    def slow(direction, data):
        if direction == "down" and len(data) > 60:
            pause.wait(2)
        return data

    with (
        server() as process,
        Proxy(process.port, slow) as proxy,
        contextlib.closing(tcp_board(proxy.port)) as board,
    ):
        board.put("k", bytes(100))
        assert board.get("k").value == bytes(100)
        assert proxy.accepted == 1


def beat(board, name="agent"):
    return board.heartbeat(f"alive/{name}", b"1", watch="control", seen_version=0, hold_s=0)


def test_the_heartbeat_of_a_process_that_ends_without_a_word_is_removed():
    with (
        few_places(closed_dead_s=0.05) as (port, _state, _),
        contextlib.closing(tcp_board(port)) as other,
    ):
        beat(other, "other")
        with contextlib.closing(tcp_board(port)) as board:
            beat(board)
            assert other.list("alive/").keys() == {"alive/other", "alive/agent"}

        eventually(lambda: other.list("alive/").keys() == {"alive/other"}, "it counts as dead")


@pytest.mark.parametrize("comes_back", ["", "it is connected", "it beats on another connection"])
def test_a_client_that_comes_back_in_time_keeps_its_heartbeat(comes_back):
    async def close():
        state = ServerState(run_key=RUN_KEY, token=TOKEN, limits=ServerLimits(closed_dead_s=0.0))
        state.kv_map.put("alive/agent", b"1")
        state.on_closed(b"client", "alive/agent", has_ended=True)
        if comes_back == "it is connected":
            state.clients[b"client", 1] = None
        elif comes_back:
            state.kv_map.put("alive/agent", b"2")
        for _ in range(3):
            await asyncio.sleep(0)
        return state.kv_map.get("alive/agent").version > 0

    assert asyncio.run(close()) == bool(comes_back)


@pytest.mark.parametrize("end", ["reset", "closed"])
def test_a_process_that_had_not_read_all_is_known_by_its_other_connection(end):
    """Its kernel resets such a connection; a reset alone may come from anywhere."""

    async def close():
        state = ServerState(run_key=RUN_KEY, token=TOKEN, limits=ServerLimits(closed_dead_s=0.0))
        state.kv_map.put("alive/agent", b"1")
        state.clients[b"client", 0] = None
        state.on_closed(b"client", "alive/agent", has_ended=False)
        del state.clients[b"client", 0]
        state.on_closed(b"client", "", has_ended=end == "closed")
        for _ in range(3):
            await asyncio.sleep(0)
        return state.kv_map.get("alive/agent").version > 0

    assert asyncio.run(close()) == (end == "reset")


def test_an_outage_of_the_connection_counts_until_the_next_heartbeat():
    with few_places() as (port, state, loop), contextlib.closing(tcp_board(port)) as board:
        beat(board)
        assert board.disconnected_s() == 0
        (connection,) = state.clients.values()
        loop.call_soon_threadsafe(connection.abort)
        eventually(lambda: board.disconnected_s() > 0, "the other side is closed")

        before_s = board.disconnected_s()
        beat(board)
        assert board.disconnected_s() > before_s
        beat(board)
        assert board.disconnected_s() == 0


def test_a_connection_that_was_closed_while_its_process_stood_still_was_closed_since_then():
    opened, (ours, theirs) = OpenedSocket(), socket.socketpair()
    with ours, theirs:
        opened.replace(ours, 10.0)
        assert opened.closed_s(11.0) == 0
        theirs.close()
        assert opened.closed_s(20.0) == 9


def test_a_connection_that_gave_no_answer_is_not_closed_before_there_is_another(monkeypatch):
    """To the server, only a process that has ended closes its connection."""
    closed = []
    monkeypatch.setattr(ServerState, "on_closed", lambda *_, has_ended: closed.append(has_ended))
    with few_places() as (port, _state, _), Proxy(port) as proxy:
        with contextlib.closing(tcp_board(proxy.port, deadline_s=0.2)) as board:
            beat(board)
            proxy.frozen.set()
            with pytest.raises(ControlStoreUnreachableError):
                beat(board)
            proxy.frozen.clear()
            eventually(lambda: beats(board), "it answers again")
            assert closed == []
        eventually(lambda: closed, "its process ends")


def beats(board):
    with contextlib.suppress(ControlStoreUnreachableError):
        return beat(board)


def test_a_late_answer_is_not_the_next_ones():
    gate = threading.Event()

    def late(direction, data):
        if direction == "down" and b"first" in data:
            gate.wait(30)
        return data

    with server() as process, Proxy(process.port, late) as proxy:
        with contextlib.closing(tcp_board(process.port)) as direct:
            direct.put("k/1", b"first")
            direct.put("k/2", b"second")
        with contextlib.closing(tcp_board(proxy.port, deadline_s=1)) as board:
            with pytest.raises(ControlStoreUnreachableError):
                board.get("k/1")
            gate.set()
            eventually(lambda: second(board), "it answers")


def second(board):
    with contextlib.suppress(ControlStoreUnreachableError):
        assert board.get("k/2").value == b"second"
        return True
    return False


def test_a_cut_connection_is_renewed_and_the_call_repeated():
    cuts = iter([True, True, False])
    frames = []

    def cut(direction, data):
        # The answer is lost with the connection, and then the next opening.
        if direction == "up" and b"mine" in data:
            frames.append(data)
        is_answer = direction == "down" and frames and len(data) < 60
        return None if is_answer and next(cuts, False) else data

    with (
        server() as process,
        Proxy(process.port, cut) as proxy,
        contextlib.closing(tcp_board(proxy.port)) as board,
    ):
        done, entry = board.compare_and_set("k", b"mine", version=0)

    assert done
    assert (entry.value, entry.version) == (b"mine", 1)
    assert len(frames) > 1


def test_bytes_changed_on_the_way_are_never_taken_for_an_answer():
    changes = iter([False] * 2 + [True] * 3)

    def change(direction, data):
        if direction == "down" and SECRET in data and next(changes, False):
            return data.replace(SECRET, b"X" * len(SECRET))
        return data

    with (
        server() as process,
        Proxy(process.port, change) as proxy,
        contextlib.closing(tcp_board(proxy.port)) as board,
    ):
        board.put("k", SECRET)
        for _ in range(6):
            assert board.get("k").value == SECRET


def test_a_server_that_does_not_know_the_token_is_not_believed():
    def impostor(listener):
        with contextlib.suppress(OSError):
            line, _ = listener.accept()
            with line:
                line.recv(1000)
                body = wire.ControlChallenge(proof.nonce(), bytes(16)).to_bytes()
                line.sendall(frames.framed(body))
                line.recv(1000)
                body = proof.welcome(proof.ProofWelcome.ACCEPTED, bytes(32))
                line.sendall(frames.framed(body))
                assert SECRET not in line.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(impostor, listener)
        port = listener.getsockname()[1]
        with (
            contextlib.closing(tcp_board(port)) as board,
            pytest.raises(ControlStoreError, match="does not know the job's token"),
        ):
            board.put("k", SECRET)
        done.result(30)


def test_the_answer_to_another_request_is_not_taken():
    def confused(listener):
        key = signing.token_key(TOKEN)
        for offset in (1, 0):
            line, _ = listener.accept()
            with line:
                hello = line.recv(1000)[4:]
                challenge = wire.ControlChallenge(proof.nonce(), bytes(16)).to_bytes()
                line.sendall(frames.framed(challenge))
                line.recv(1000)
                shake = proof.JobHandshake(key, hello + challenge)
                word = proof.welcome(proof.ProofWelcome.ACCEPTED, shake.proof("server"))
                line.sendall(frames.framed(word))
                asked = wire.ControlRequest.from_bytes(line.recv(1000)[4 + proof.TAG_BYTES :])
                held = wire.pack_entry(Entry(b"wrong" if offset else b"right", 1, 1))
                said = wire.pack_reply(asked.number + offset, wire.ReplyKind.ENTRY, held)
                frame = shake.channel("server").tag(said) + said
                line.sendall(frames.framed(frame))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(confused, listener)
        with contextlib.closing(tcp_board(listener.getsockname()[1])) as board:
            assert board.get("k").value == b"right"
        done.result(30)


def test_what_is_no_board_is_named():
    def web(listener):
        line, _ = listener.accept()
        with line:
            line.recv(1000)
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(web, listener)
        port = listener.getsockname()[1]
        with (
            contextlib.closing(tcp_board(port)) as board,
            pytest.raises(
                ControlStoreError, match=rf"127\.0\.0\.1:{port}.*not a gpuops control store"
            ),
        ):
            board.get("k")


def test_a_name_that_nobody_knows_is_unreachable():
    from gpuops.control.tcp.store import TcpControlStore

    board = TcpControlStore("no-such-host.invalid", 1, run_key="r", deadline_s=1)
    with pytest.raises(ControlStoreUnreachableError, match=r"no-such-host\.invalid"):
        board.get("k")


def test_a_restarted_server_has_forgotten_and_its_clients_notice():
    with server() as first:
        port = first.port
        board = tcp_board(port)
        board.put("control", SECRET)
        known = board.instance
        first.kill()
        with pytest.raises(ControlStoreUnreachableError, match="refused"):
            tcp_board(port, deadline_s=2).get("control")
        second = start_server("127.0.0.1", port, run_key=RUN_KEY, token=TOKEN)
        try:
            for call in (
                lambda: board.get("control"),
                lambda: board.heartbeat("a", b"", watch="control", seen_version=1, hold_s=0),
            ):
                with pytest.raises(ControlStoreResetError, match="anew"):
                    call()
            assert board.instance == known
            with contextlib.closing(tcp_board(port)) as fresh:
                assert fresh.get("control").version == 0
                assert fresh.instance != known
        finally:
            board.close()
            second.kill()


def test_a_server_that_comes_back_within_the_deadline_costs_no_error():
    with Proxy(1) as proxy, ThreadPoolExecutor(1) as pool:
        port = proxy.port
    # Nobody listens there now.
    with contextlib.closing(tcp_board(port)) as board, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(board.get, "k")
        process = start_server("127.0.0.1", port, run_key=RUN_KEY, token=TOKEN)
        try:
            assert waiting.result(2 * DEADLINE_S).version == 0
        finally:
            process.kill()


# Starting and ending.


def test_the_second_to_start_it_finds_the_first(shared):
    found = start_server("127.0.0.1", shared.port, run_key=RUN_KEY, token=TOKEN)

    assert (found.pid, found.port) == (None, shared.port)
    assert not found.is_running()
    assert shared.is_running()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"run_key": "other"}, "another run"), ({"token": "other"}, "another token")],
    ids=["run", "token"],
)
def test_a_port_that_another_board_has_is_an_error_that_says_so(shared, changes, words):
    wanted = {"run_key": RUN_KEY, "token": TOKEN, **changes}
    with pytest.raises(ControlStoreError, match=rf"taken.*{shared.port}.*{words}"):
        start_server("127.0.0.1", shared.port, **wanted)


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(ControlStoreError, match=r"192\.0\.2\.1 is no address of this machine"):
        start_server("192.0.2.1", 0, run_key=RUN_KEY)


def test_many_start_it_at_once_and_one_does():
    port, started = free_port(), []
    try:
        with ThreadPoolExecutor(4) as pool:
            todo = [
                pool.submit(start_server, "127.0.0.1", port, run_key=RUN_KEY, token=TOKEN)
                for _ in range(4)
            ]
            started = [future.result(60) for future in todo]
        assert sum(process.pid is not None for process in started) == 1
        assert {process.port for process in started} == {port}
    finally:
        for process in started:
            process.kill()


def test_it_survives_the_end_of_the_one_that_started_it():
    code = (
        "import os, sys; from gpuops.control.tcp.process import start_server\n"
        f"p = start_server('127.0.0.1', 0, run_key={RUN_KEY!r}, token={TOKEN!r}, lease_s=60)\n"
        "print(p.port, p.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    port, pid = map(int, done.stdout.split())
    try:
        assert done.returncode == -signal.SIGKILL
        with contextlib.closing(tcp_board(port)) as board:
            board.put("k", b"v")
        assert os.getsid(pid) == pid
    finally:
        os.kill(pid, signal.SIGKILL)


def ends(process):
    eventually(lambda: not process.is_running(), "the server ends by itself")


def test_it_ends_when_nobody_was_heard_for_the_lease():
    with server(lease_s=0.5) as process:
        ends(process)


def test_strangers_do_not_prolong_the_lease():
    with server(lease_s=2) as process:
        stop = threading.Event()

        def knock():
            while not stop.is_set():
                with contextlib.suppress(OSError), Stranger(process.port) as stranger:
                    stranger.greet()
                stop.wait(0.05)

        thread = threading.Thread(target=knock)
        thread.start()
        try:
            ends(process)
        finally:
            stop.set()
            thread.join()


@again_if_late(by_s=1.0)
def test_it_stays_while_agents_beat():
    with server(lease_s=3) as process, contextlib.closing(tcp_board(process.port)) as board:
        times = [
            board.heartbeat("alive/a", b"", watch="w", seen_version=0, hold_s=0.5).store_s
            for _ in range(10)
        ]
        assert times[-1] - times[0] > 3
        assert process.is_running()


def test_it_ends_soon_once_the_run_is_over():
    with server(lease_s=600) as process, contextlib.closing(tcp_board(process.port)) as board:
        board.put("over", b"0.5")
        ends(process)


def test_signals_to_the_whole_job_do_not_end_it_while_agents_beat():
    with server(lease_s=600) as process, contextlib.closing(tcp_board(process.port)) as board:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            os.kill(process.pid, number)
        for _ in range(12):
            board.heartbeat("alive/a", b"", watch="w", seen_version=0, hold_s=0.5)
        assert process.is_running()
        board.close()
        # SIGTERM has shortened the lease to five seconds.
        ends(process)


def test_the_token_can_come_in_a_variable(tmp_path):
    command = [sys.executable, "-P", "-m", "gpuops.control.tcp.serve", "--run-key", RUN_KEY]
    env = {**os.environ, "JOB_TOKEN": TOKEN}
    with subprocess.Popen(
        [*command, "--token-env", "JOB_TOKEN"], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            word, port = process.stdout.readline().split()
            assert word == "ready"
            with contextlib.closing(tcp_board(int(port))) as board:
                board.put("k", b"v")
                assert board.local_address == "127.0.0.1"
        finally:
            process.kill()


def test_ctrl_c_while_it_starts_leaves_no_server(monkeypatch):
    started = []

    def interrupted(self, _end_s, _line):
        started.append(self.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sidecar, "first_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_server("127.0.0.1", 0, run_key=RUN_KEY, token=TOKEN)
    assert [psutil.pid_exists(pid) for pid in started] == [False]
