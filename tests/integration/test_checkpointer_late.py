"""Without `gpuops run` the keeper persists by itself what ranks save that come after the first."""

import fcntl
import os
import time

import pytest
from support.keeper_ranks import newest, ready, until

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.types import KeeperError
from gpuops.worker.keeper_finder import KeeperFinder, StandaloneKeeper, standalone_folder
from gpuops.worker.ranks import RankContext

SECOND = RankContext(1, 2, 1, 2, "")


class Job:
    """Two ranks that save into a directory, with a keeper of their own."""

    def __init__(self, tmp_path):
        self.states = tmp_path / "states"
        self.env = {"XDG_RUNTIME_DIR": str(tmp_path)}
        self.folder = standalone_folder(self.env, str(self.states))
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self.folder / "job.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.process = start_or_adopt(self.folder)
        path = self.process.socket_path
        self.first = StandaloneKeeper(path, lock, shards_wait_s=0.2)
        self.ranks = ready([line_of(path, rank) for rank in range(2)], **self.policy())

    def policy(self):
        return {"directory": str(self.states), "persist_every_s": 3600.0}

    def persisted(self):
        return [stored.state.step for stored in open_store(str(self.states)).list_states()]


def line_of(path, rank):
    return connect_rank(path, rank=rank, world=2, local_rank=rank, local_world=2, generation=0)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for rank in job.ranks:
        rank.keeper.close()
    job.process.kill()


def test_what_a_late_rank_saves_last_persists_and_the_first_says_that_it_is_late(job, caplog):
    first, second = job.ranks
    for rank in job.ranks:
        rank.save(6)
    until(lambda: newest(second.keeper) == [0, 6], what="the commit")
    first.save(7)
    first.keeper.close()
    job.first.finish(7)

    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("gpuops")]
    assert "the state after step 7 is not persisted" in said
    assert "is that after step 6; ranks still connected: 1," in said
    assert job.persisted() == [6]

    second.save(7)
    second.keeper.close()

    until(lambda: not job.process.is_running(), what="the end of the keeper")
    assert job.persisted()[0] == 7


def test_a_late_rank_s_state_persists_where_nothing_was_committed_yet(job):
    first, second = job.ranks
    first.save(7)
    first.keeper.close()
    with pytest.raises(KeeperError, match="the last state was not persisted"):
        job.first.finish(7)
    second.save(7)
    second.keeper.close()

    until(lambda: not job.process.is_running(), what="the end of the keeper")
    assert job.persisted() == [7]


def test_a_state_that_was_committed_after_the_last_flush_ends_no_keeper(job):
    for rank in job.ranks:
        rank.save(6)
    until(lambda: newest(job.ranks[1].keeper) == [0, 6], what="the commit")
    link = KeeperClient.connect(job.process.socket_path)
    link.flush(10.0)
    for rank in job.ranks:
        rank.save(7)
    until(lambda: newest(job.ranks[1].keeper) == [0, 7], what="the second commit")
    for rank in job.ranks:
        rank.keeper.close()

    until(lambda: not link.stats()["ranks"], what="their leaving")
    assert link.hand_over(is_over=True) == (0, False)
    link.close()
    job.first.finish(7)
    assert job.persisted() == [7, 6]
    until(lambda: not job.process.is_running(), what="the end of the keeper")


def test_a_rank_whose_keeper_was_ended_by_the_first_does_not_wait_for_another(job):
    job.ranks[0].keeper.close()
    job.ranks[1].keeper.close()
    job.first.finish(None)
    finder = KeeperFinder(None, job.env, SECOND, CheckpointPolicy(directory=str(job.states)))
    begun_s = time.monotonic()

    with pytest.raises(KeeperError, match="first rank of this node has left") as found:
        finder.find(is_reconnect=True)

    assert not isinstance(found.value, KeeperGoneError)
    assert time.monotonic() - begun_s < 30
