"""What an agent may expect of its node's keeper: of the fake of unit tests, and of a real one."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support.keeper_ranks import Rank, until
from support.keepers import FakeKeeper

from gpuops.agent.checkpoint.keeper_events import read_events
from gpuops.agent.checkpoint.start import start_keeper
from gpuops.checkpoint.keeper.messages import NO_DIRECTORY
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.types import KeeperError, StateId


class Fake:
    """The keeper of unit tests."""

    def __init__(self, _folder):
        self.keeper = FakeKeeper()
        self.keeper.directory = None
        self.keeper.flush_s = 0.0
        self.started = self.keeper.started()
        self.epoch = -1

    def renewed(self):
        return self.keeper.started(adopted=True)

    def workers(self, generation, directory=None):
        self.epoch += 1
        self.keeper.directory = directory

    def save(self, step):
        self.keeper.commit(step, epoch=self.epoch)

    def report_restored(self, step):
        self.keeper.restored(step, rank=0, epoch=self.epoch - 1)

    def kill(self):
        self.keeper.kill()

    def close(self):
        pass


class Real:
    """A keeper's process, and one rank of a generation."""

    def __init__(self, folder):
        self.folder = folder / "k"
        self.lines, self.all = [], []
        self.started = self.renewed()

    def renewed(self):
        job = f"run-{len(self.all)}"  # on one node another agent begins another run
        self.all.append(start_keeper(self.folder, lease_s=30.0, node="n1", job=job))
        return self.all[-1]

    def workers(self, generation, directory=None):
        path = Path(self.started.socket)
        post = {"rank": 0, "world": 1, "local_rank": 0, "local_world": 1}
        line = connect_rank(path, **post, generation=generation)
        self.lines.append(line)
        self.rank = Rank(line, directory=directory, persist_every_s=None)
        self.restore_point = line.restore_point(30.0)
        self.rank.reserve()

    def save(self, step):
        state = self.rank.save(step).state
        newest = [state.epoch, state.step]
        until(lambda: self.rank.keeper.stats()["newest"] == newest, what="the commit")

    def report_restored(self, step):
        assert self.restore_point.state.step == step
        self.rank.keeper.report_restored(self.restore_point, 0.25, self.rank.layout.nbytes)

    def kill(self):
        os.kill(self.started.pid, signal.SIGKILL)

    def close(self):
        for line in self.lines:
            line.close()
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        for started in self.all:
            started.client.close()


@pytest.fixture(params=[Fake, Real])
def node(request, tmp_path):
    with contextlib.closing(request.param(tmp_path)) as found:
        yield found


def newest(client):
    return client.status().progress.newest


def test_a_new_keeper_has_nothing(node):
    client = node.started.client

    assert not node.started.adopted
    assert newest(client) is None
    assert client.status().progress.persisted is None
    assert read_events(client.events()) == []
    assert client.flush(5.0).state is None
    with contextlib.closing(client):
        client.shut_down()


def test_what_is_committed_is_told_with_its_bytes(node):
    client = node.started.client
    client.begin_generation(0, 1, None)
    node.workers(0)
    node.save(3)

    events = [event for event in read_events(client.events()) if event.kind == "committed"]

    assert newest(client).step == 3
    assert [event.state.step for event in events] == [3]
    assert events[0].nbytes > 0
    assert client.status().n_committed == 1
    assert [e for e in read_events(client.events()) if e.kind == "committed"] == []


def test_a_flush_without_a_directory_says_so_at_once(node):
    client = node.started.client
    client.begin_generation(0, 1, None)
    node.workers(0)
    node.save(3)

    done = client.flush(5.0)

    assert (done.state, done.why, done.directory) == (None, NO_DIRECTORY, None)


def test_a_flush_persists_the_newest_state(node, tmp_path):
    client = node.started.client
    client.begin_generation(0, 1, None)
    node.workers(0, directory=str(tmp_path / "ckpt"))
    node.save(3)
    node.save(5)

    done = client.flush(100.0)

    assert (done.state.step, done.why, done.directory) == (5, "", str(tmp_path / "ckpt"))
    assert client.status().progress.persisted == done.state


def test_the_next_workers_continue_and_what_they_loaded_is_told(node):
    client = node.started.client
    client.begin_generation(0, 1, None)
    node.workers(0)
    node.save(3)
    first = newest(client)
    client.begin_generation(1, 1, None)
    node.workers(1)
    node.report_restored(3)
    (told,) = [event for event in read_events(client.events()) if event.kind == "restored"]

    assert (told.state, told.rank, told.tier) == (first, 0, "memory")
    assert (told.seconds, told.nbytes > 0) == (0.25, True)
    node.save(4)
    assert newest(client) > first
    assert newest(client).epoch == first.epoch + 1


@pytest.mark.parametrize("generation", [0, 4])
def test_an_agent_that_is_gone_is_followed_by_another_which_counts_anew(node, generation):
    client = node.started.client
    client.begin_generation(generation, 1, None)
    node.workers(generation)
    node.save(3)
    client.close()

    again = node.renewed()
    again.client.begin_generation(0, 1, None)

    assert again.adopted
    assert newest(again.client) == StateId(newest(again.client).epoch, 3)
    node.workers(0)
    node.save(4)
    assert newest(again.client).step == 4
    again.client.shut_down()
    again.client.close()


def test_a_keeper_that_was_killed_says_so_in_no_time(node):
    client = node.started.client
    node.kill()

    for ask in (
        lambda: client.begin_generation(0, 1, None),
        client.status,
        client.events,
        lambda: client.flush(5.0),
        client.shut_down,
    ):
        with pytest.raises(KeeperError):
            ask()


def test_a_closed_tie_is_of_no_use_and_may_be_closed_again(node):
    client = node.started.client
    client.close()
    client.close()

    with pytest.raises(KeeperError):
        client.status()
