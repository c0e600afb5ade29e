"""A keeper that is stopped under its ranks: told from a slow one, ended, and replaced."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support.keeper_ranks import Rank, until
from support.keepers import Heard
from support.runs import is_alive

from gpuops.agent.checkpoint_keeper import Keeping, Times
from gpuops.agent.checkpoints import KEEPER
from gpuops.agent.keeper_tie import start_keeper
from gpuops.checkpoint.client import connect
from gpuops.checkpoint.keeper import Grant
from gpuops.checkpoint.keeper_hang import answer_or_end, look_at
from gpuops.checkpoint.keeper_line import KeeperGoneError, KeeperLine
from gpuops.checkpoint.keeper_process import start_or_adopt
from gpuops.checkpoint.states import StateId
from gpuops.host.clock import SystemClock

NEVER_S = 3600.0


@pytest.fixture
def stack():
    with contextlib.ExitStack() as found:
        yield found


def end(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def rank_of(stack, path, *, is_back=False):
    line = connect(
        path,
        rank=0,
        world=1,
        local_rank=0,
        local_world=1,
        is_back=is_back,
    )
    stack.callback(line.close)
    return Rank(line)


def test_one_that_is_stopped_is_ended_before_another_takes_its_place_under_the_ranks(
    tmp_path, stack
):
    heard, started = Heard(), []

    def start():
        folder = tmp_path / "k"
        found = start_keeper(folder, lease_s=30.0, node="n1", job="run", answer_s=1.0)
        started.append(found)
        return found

    keeping = Keeping(start, heard, SystemClock(), times=Times(every_s=NEVER_S))
    stack.callback(keeping.end, 0.0)
    keeping.begin(0, 1, None)
    first = started[0].pid
    stack.callback(end, first)
    path = Path(keeping.env()[KEEPER])
    rank = rank_of(stack, path)
    rank.keeper.offer(30.0)
    state = rank.reserve().save(7).state
    until(lambda: keeping.tend() or keeping.state().step == 7, what="the commit")

    os.kill(first, signal.SIGSTOP)
    until(lambda: keeping.tend() or len(started) == 2, what="another keeper")

    assert not is_alive(first)
    assert started[1].pid != first
    assert "it was stopped by a signal" in started[1].ended
    assert (heard.lost, heard.ended) == ([None, state], [started[1].ended])
    with pytest.raises(KeeperGoneError):
        rank.save(8)
    again = rank_of(stack, path, is_back=True).reserve()
    found = until(lambda: again.save(9), what="a save")
    assert isinstance(found, Grant)
    assert found.state == StateId(state.epoch, 9)
    until(lambda: keeping.tend() or keeping.state().step == 9, what="the next commit")
    assert len(started) == 2


def test_one_that_answers_in_the_end_is_slow_and_keeps_what_it_holds(tmp_path, stack):
    keeper = start_or_adopt(tmp_path / "k", lease_s=30.0)
    stack.callback(keeper.kill)
    os.kill(keeper.pid, signal.SIGSTOP)
    seen = []

    def look(pid):
        seen.append(look_at(pid))
        if len(seen) == 3:
            os.kill(pid, signal.SIGCONT)
        return seen[-1]

    with contextlib.closing(KeeperLine(keeper.socket_path)) as line:
        assert "agent" not in answer_or_end(line, look)

    assert [one.state for one in seen[:3]] == ["T"] * 3
    found = start_or_adopt(tmp_path / "k", lease_s=30.0)
    assert (found.pid, found.adopted, found.ended) == (keeper.pid, True, "")
