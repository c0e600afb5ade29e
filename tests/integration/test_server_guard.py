"""A board's server that is killed: its agents learn at once that what they agreed on is gone."""

import contextlib
import os
import signal

import pytest
from support.boards import RUN_KEY, TOKEN, eventually, tcp_board

from gpuops.control.store import ControlStoreResetError
from gpuops.control.tcp.process import ServerGuard, start_server


@pytest.fixture
def guarded():
    """Yield a server under guard, and those that were started in its place."""
    server = start_server("127.0.0.1", 0, run_key=RUN_KEY, token=TOKEN)
    restarted = []

    def restart():
        again = start_server("127.0.0.1", server.port, run_key=RUN_KEY, token=TOKEN)
        restarted.append(again)
        return again

    guard = ServerGuard(server, restart)
    yield server, restarted
    guard.close()
    for process in (server, *restarted):
        process.kill()


def test_a_killed_server_is_replaced_by_an_empty_one(guarded):
    server, restarted = guarded
    with contextlib.closing(tcp_board(server.port)) as board:
        board.put("a", b"1")

        os.kill(server.pid, signal.SIGKILL)

        with pytest.raises(ControlStoreResetError, match="started anew"):
            board.get("a")
    # The new server may answer before the one who started it has heard that it is there.
    eventually(lambda: restarted, "the new server")
    assert len(restarted) == 1


def test_a_server_that_ends_by_itself_is_let_go(guarded):
    server, restarted = guarded
    with contextlib.closing(tcp_board(server.port)) as board:
        board.put("over", b"0")

    eventually(lambda: server.pid is None, "the end of the server")
    assert restarted == []


def test_a_guard_that_is_closed_lets_the_server_go_on(guarded):
    server, restarted = guarded
    again = ServerGuard(server, lambda: pytest.fail("not to be called"))
    again.close()

    assert server.is_running()
    assert restarted == []
