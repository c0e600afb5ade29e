"""What one agent costs the board's server does not depend on how many there are."""

import asyncio
import contextlib

import pytest
from support.board_agents import Crowd
from support.boards import RUN_KEY, TOKEN, server, tcp_board

from gpuops.control.record import RECORD_KEY

HOLD_S = 0.5
PATIENCE_S = 60
QUIET_HOLDS = 4
RECORD = bytes(1000)


async def live(port, n_agents):
    """Return requests and bytes per agent of a quiet time, and which versions all saw."""
    crowd = Crowd(port, RUN_KEY, TOKEN, HOLD_S, [f"agent-{n:06d}" for n in range(n_agents)])
    loop = asyncio.get_running_loop()
    with contextlib.closing(tcp_board(port)) as board:
        board.put(RECORD_KEY, RECORD)
        try:
            await crowd.enter()
            await asyncio.wait_for(crowd.all_saw(1), PATIENCE_S)
            before, began_s = crowd.counts(), loop.time()
            wanted = before[0] + QUIET_HOLDS * n_agents
            await asyncio.wait_for(crowd.all_asked(wanted), PATIENCE_S)
            quiet, took_s = (
                [b - a for a, b in zip(before, crowd.counts(), strict=True)],
                loop.time(),
            )
            for version in (2, 3):
                board.put(RECORD_KEY, RECORD)
                await asyncio.wait_for(crowd.all_saw(version), PATIENCE_S)
            assert len(board.list("run/alive/")) == n_agents
        finally:
            crowd.leave()
    assert crowd.lost == 0
    return quiet, took_s - began_s, crowd.seen


@pytest.mark.parametrize("n_agents", [16, 64, 256])
def test_each_agent_asks_once_a_hold_and_sees_each_change_once(n_agents):
    with server() as process:
        (requests, bytes_out, bytes_in), took_s, seen = asyncio.run(live(process.port, n_agents))

    assert seen == {1: n_agents, 2: n_agents, 3: n_agents}
    # A held heartbeat is not answered before its time, so this holds on a slow machine too.
    assert requests / n_agents <= took_s / HOLD_S + 2
    assert 100 < bytes_out / requests < 320
    assert 10 < bytes_in / requests < 80
