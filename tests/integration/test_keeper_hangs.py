"""A keeper that is stopped under its ranks: told from a slow one, ended, and replaced."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support.keeper_ranks import Rank, until
from support.keepers import Heard
from support.runs import is_alive

from gpuops import __version__
from gpuops.agent.checkpoint.api import KEEPER
from gpuops.agent.checkpoint.keeper_supervisor import KeeperSupervisor, KeeperTimeouts
from gpuops.agent.checkpoint.start import start_keeper
from gpuops.checkpoint.keeper import process
from gpuops.checkpoint.keeper.connection import KeeperConnection, KeeperGoneError
from gpuops.checkpoint.keeper.messages import Lease
from gpuops.checkpoint.keeper.process import probe_or_kill, sample_process, start_or_adopt
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.types import KeeperError, StateId
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
    line = connect_rank(
        path,
        rank=0,
        world=1,
        local_rank=0,
        local_world=1,
        is_reconnect=is_back,
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

    keeping = KeeperSupervisor(start, heard, SystemClock(), times=KeeperTimeouts(every_s=NEVER_S))
    stack.callback(keeping.end, 0.0)
    keeping.begin(0, 1, None)
    first = started[0].pid
    stack.callback(end, first)
    path = Path(keeping.env()[KEEPER])
    rank = rank_of(stack, path)
    rank.keeper.restore_point(30.0)
    state = rank.reserve().save(7).state
    until(lambda: keeping.run_once() or keeping.state().step == 7, what="the commit")

    os.kill(first, signal.SIGSTOP)
    until(lambda: keeping.run_once() or len(started) == 2, what="another keeper")

    assert not is_alive(first)
    assert started[1].pid != first
    assert "it was stopped by a signal" in started[1].ended
    assert (heard.lost, heard.ended) == ([None, state], [started[1].ended])
    with pytest.raises(KeeperGoneError):
        rank.save(8)
    again = rank_of(stack, path, is_back=True).reserve()
    found = until(lambda: again.save(9), what="a save")
    assert isinstance(found, Lease)
    assert found.state == StateId(state.epoch, 9)
    until(lambda: keeping.run_once() or keeping.state().step == 9, what="the next commit")
    assert len(started) == 2


def test_one_that_answers_in_the_end_is_slow_and_keeps_what_it_holds(tmp_path, stack):
    keeper = start_or_adopt(tmp_path / "k", lease_s=30.0)
    stack.callback(keeper.kill)
    os.kill(keeper.pid, signal.SIGSTOP)
    seen = []

    def look(pid):
        seen.append(sample_process(pid))
        if len(seen) == 3:
            os.kill(pid, signal.SIGCONT)
        return seen[-1]

    with contextlib.closing(KeeperConnection(keeper.socket_path)) as line:
        assert probe_or_kill(line, look).agent is None

    assert [one.state for one in seen[:3]] == ["T"] * 3
    found = start_or_adopt(tmp_path / "k", lease_s=30.0)
    assert (found.pid, found.is_adopted, found.killed_why) == (keeper.pid, True, "")


def test_a_hang_is_named_where_the_keeper_after_it_cannot_begin(tmp_path, stack):
    keeper = start_or_adopt(tmp_path / "k", lease_s=30.0)
    stack.callback(keeper.kill)
    os.kill(keeper.pid, signal.SIGSTOP)

    with pytest.raises(KeeperError, match=r"did not start within 0 s.* it was stopped by a signal"):
        start_or_adopt(tmp_path / "k", lease_s=30.0, ready_s=0.0)

    assert not is_alive(keeper.pid)


def test_a_keeper_of_another_version_is_not_adopted_and_it_is_said(tmp_path, stack, monkeypatch):
    keeper = start_or_adopt(tmp_path / "k", lease_s=30.0)
    stack.callback(keeper.kill)
    monkeypatch.setattr(process, "__version__", "9.9")

    found = start_or_adopt(tmp_path / "k", lease_s=30.0)
    stack.callback(found.kill)

    assert not found.is_adopted
    assert not is_alive(keeper.pid)
    assert found.killed_why == (
        f"its keeper (pid {keeper.pid}) is of gpuops {__version__}, and this is 9.9"
    )
