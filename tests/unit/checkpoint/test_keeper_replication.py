"""What is pushed to whom, and when a holder is not waited for, with pushes that the test ends."""

import threading
import time
from collections import deque

import pytest
from support.keeper_ranks import fill, layout_of, until

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.crew import Post
from gpuops.checkpoint.keeper import Policy, Skipped
from gpuops.checkpoint.keeper_core import Core
from gpuops.checkpoint.keeper_progress import Progress, progress_from_json, progress_to_json
from gpuops.checkpoint.messages import Fields, MessageError
from gpuops.checkpoint.node_memory import MARGIN_BYTES, NodeMemory
from gpuops.checkpoint.peer_messages import holders_from_json, pages_of_holders
from gpuops.checkpoint.peer_shelf import Shelf
from gpuops.checkpoint.replica_room import ReplicaRoom
from gpuops.checkpoint.replicas import ReplicaStore
from gpuops.checkpoint.replication import (
    AGAIN_S,
    BACKOFF_MIN_S,
    BROKEN_MAX,
    GONE_S,
    WITHIN_FIRST_S,
    WITHIN_MAX_S,
    WITHIN_MIN_S,
    WITHIN_SHARE,
    AskedFor,
)
from gpuops.checkpoint.slots import Granted
from gpuops.checkpoint.states import CorruptError, KeeperError, Shard, StateId
from gpuops.checkpoint.transfer_client import Pushed
from gpuops.checkpoint.transfer_team import Peer
from gpuops.checkpoint.transfer_wire import Refusal, RefusedError, TransferError

NEAR, FAR = Peer("near", "127.0.0.1", 1001), Peer("far", "127.0.0.1", 1002)


class Jobs:
    """Work by kind; what a push comes to is said by the test."""

    def __init__(self):
        self.waiting = {
            name: deque()
            for name in ("hash", "populate", "look", "persist", "vote", "push", "fetch")
        }
        self.posted = deque()

    def __getattr__(self, name):
        return lambda work, then: self.waiting[name].append((work, then))

    def post(self, do):
        self.posted.append(do)

    def map(self, function, things):
        return map(function, things)

    def do(self, name):
        for _ in range(len(self.waiting[name])):
            work, then = self.waiting[name].popleft()
            then(work(), None)

    def end_push(self, error=None):
        _work, then = self.waiting["push"].popleft()
        then(None if error else Pushed(0.5, 100), error)


class Node:
    """A keeper of two, with one rank, whose peers are not there."""

    def __init__(self):
        self.jobs, self.now_s = Jobs(), 1000.0
        self.core = Core(
            NodeMemory("n1", lambda: 2**40),
            self.jobs,
            clock_s=lambda: self.now_s,
            wall_s=lambda: self.now_s,
        )
        self.core.begin_generation(0, 2, None, "run")
        self.core.peers.serve("127.0.0.1", node="n1", token="t", job="run")
        self.post = Post(Shard(0, 2), 0, 1, 0)
        self.core.join(self, self.post, is_patient=False)
        self.core.choose(None, 0)
        self.core.want(self.core.crew)
        self.jobs.do("look")
        layout = layout_of(0, 2)
        self.core.reserve(self.post, layout.hash, layout.nbytes, 2)

    pid = 0

    def close(self):
        """Be a guest, too."""

    def save(self, step):
        answer = self.core.begin(self.post, step)
        assert isinstance(answer, Granted), answer
        fill(self.core.memory.memory(answer.slot).view, layout_of(0, 2), step)
        self.core.seal(self.post, answer.state)
        self.jobs.do("hash")
        return answer.state

    def replicate(self, *holders):
        self.core.peers.replicate(holders, [], None)

    @property
    def pushes(self):
        return len(self.jobs.waiting["push"])

    @property
    def replicated(self):
        return self.core.progress().replicated

    def failed(self):
        return [e for e in self.core.events.take(10**6) if e["kind"] == "replica_failed"]

    def wait(self, seconds):
        self.now_s += seconds
        self.core.tick()


@pytest.fixture
def node():
    found = Node()
    yield found
    found.core.peers.close()
    found.core.memory.close()


def test_without_holders_what_is_whole_counts_as_replicated(node):
    state = node.save(1)
    assert node.replicated == (state,)
    assert node.pushes == 0


def test_a_state_is_replicated_once_all_holders_have_it(node):
    node.replicate(NEAR, FAR)
    state = node.save(1)
    assert node.pushes == 2
    assert node.replicated == ()
    node.jobs.end_push()
    assert node.replicated == ()
    node.jobs.end_push()
    assert node.replicated == (state,)
    assert node.pushes == 0


def test_what_is_pushed_is_pinned_and_not_granted(node):
    node.replicate(NEAR)
    first = node.save(1)
    node.core.commit(first, is_to_persist=False)
    # It is committed all the same; its push goes on, and its slot must stay as it is.
    second = node.save(2)
    node.core.commit(second, is_to_persist=False)
    assert isinstance(node.core.begin(node.post, 3), Skipped)
    node.jobs.end_push(TransferError("the transfer was stopped"))
    assert node.failed() == []  # it was given up for the newer one
    assert isinstance(node.core.begin(node.post, 4), Granted)


def test_a_holder_that_takes_nothing_is_waited_for_so_long_and_told_once(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.wait(GONE_S - 0.1)
    assert node.replicated == ()
    node.wait(0.2)
    assert node.replicated == (state,)
    (failed,) = node.failed()
    assert (failed["holder"], failed["state"], failed["shard"]) == ("near", [0, 1], [0, 2])
    node.jobs.end_push(TransferError("the transfer was stopped"))
    node.wait(1.0)
    assert node.pushes == 0
    node.wait(BACKOFF_MIN_S)
    assert node.pushes == 1  # it may be back
    node.jobs.end_push(TransferError("nobody listens there"))
    assert node.failed() == []
    node.wait(3 * BACKOFF_MIN_S)
    node.jobs.end_push()
    assert node.core.peers.counts()["holders_gone"] == []


def test_a_holder_that_takes_some_again_and_again_and_never_all_is_not_waited_for(node):
    node.replicate(NEAR)
    state = node.save(1)
    for _ in range(BROKEN_MAX):
        assert node.replicated == ()
        task = node.core.peers.replication._holders[NEAR].task
        node.now_s += GONE_S / 2
        task.moved_s, task.has_moved = node.now_s, True  # as by the thread that sends
        node.jobs.end_push(TransferError("nothing comes through"))
        node.wait(AGAIN_S)
    assert node.replicated == (state,)
    assert [failed["why"] for failed in node.failed()] == ["nothing comes through"]


def test_a_holder_that_refuses_for_now_is_asked_again_and_one_without_room_is_not(node):
    node.replicate(NEAR, FAR)
    node.save(1)
    node.jobs.end_push(RefusedError(Refusal.NOT_WANTED, "far is no holder yet"))
    node.jobs.end_push(RefusedError(Refusal.NO_ROOM, "1.0 GB do not fit"))
    assert [(f["holder"], f["why"]) for f in node.failed()] == [("far", "1.0 GB do not fit")]
    assert node.replicated == ()
    node.wait(AGAIN_S)
    assert node.pushes == 1
    node.jobs.end_push()
    assert node.replicated == (StateId(0, 1),)


def test_an_own_copy_that_is_damaged_is_not_committed(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.core.peers.replication.damaged(state, Shard(0, 2), 0)
    assert state in node.core.progress().refused
    assert not node.core.commit(state, is_to_persist=False)
    node.jobs.end_push(CorruptError("chunk 0 of its copy is damaged"))
    assert [e["kind"] for e in node.core.events.take(10**6)].count("corrupt") == 1


def test_a_new_holder_gets_the_newest_committed_state(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.jobs.end_push()
    node.core.commit(state, is_to_persist=False)
    node.replicate(FAR)
    assert node.pushes == 1
    assert node.replicated == ()
    node.jobs.end_push()
    assert node.replicated == (state,)


def test_a_state_that_is_given_up_is_pushed_no_more(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.core.give_up(state)
    node.wait(GONE_S + 1)
    node.jobs.end_push(TransferError("the transfer was stopped"))
    assert node.failed() == []
    assert node.core.progress().refused == (state,)
    node.save(2)
    assert node.pushes == 1


def test_progress_says_what_was_refused(node):
    node.core.set_policy(Policy(every_s=10.0))
    state = node.save(1)
    node.core.begin(node.post, 2)  # the first one still waits for its commit, or it is too early
    progress = node.core.progress()
    assert progress.whole == (state,)
    assert progress.refused == (StateId(0, 2),)
    assert (progress.in_flight, progress.decided) == (state, StateId(0, 2))
    assert progress_from_json(Fields(progress_to_json(progress))) == progress


def test_nodes_that_decide_apart_save_once_in_each_stretch_of_the_time_of_day(node):
    node.core.set_policy(Policy(every_s=10.0))
    node.now_s = 1009.9
    node.core.commit(node.save(1), is_to_persist=False)
    node.now_s = 1010.1  # a node whose last save was at 1000.0 also saves now
    node.core.commit(node.save(2), is_to_persist=False)
    node.now_s = 1019.9
    assert isinstance(node.core.begin(node.post, 3), Skipped)


def test_what_is_no_progress_is_refused():
    good = progress_to_json(Progress(whole=(StateId(0, 1),)))
    for bad in ([1], [-1, 2], ["a", 1], "x"):
        with pytest.raises(MessageError):
            progress_from_json(Fields({**good, "whole": [bad]}))


def test_holders_of_a_large_world_are_said_in_pages():
    sources = {Shard(rank, 250): [NEAR, FAR][: rank % 2 + 1] for rank in range(250)}
    roots = {Shard(7, 250): "ab" * 32}
    pages = list(pages_of_holders(sources, roots))
    found = {}
    for page in pages:
        found |= holders_from_json(Fields(page))
    assert [page["begin"] for page in pages] == [True, False, False]
    assert {shard: list(it.peers) for shard, it in found.items()} == sources
    assert found[Shard(7, 250)].root == "ab" * 32
    with pytest.raises(MessageError, match="names peers"):
        holders_from_json(Fields({"peers": [], "shards": [[[0, 1], "", [0]]]}))
    with pytest.raises(MessageError, match="no root"):
        holders_from_json(Fields({"peers": [], "shards": [[[0, 1], "zz", []]]}))


def test_replicas_are_refused_with_figures_where_the_ranks_need_the_memory():
    room = ReplicaRoom(lambda: MARGIN_BYTES + 3 * 2**20, lambda: 2**20)
    first = room.make("a", 2**20)
    with pytest.raises(KeeperError, match=r"2\.1 MB.*1\.1 GB are available, 2\.1 MB of it"):
        room.make("b", 2 * 2**20 + 1)
    assert room.missing_bytes() == 2**20
    first.view[:] = bytes(2**20)
    assert room.missing_bytes() == 0
    first.close()
    assert room.missing_bytes() == 0


def test_what_peers_read_is_pinned_by_the_thread_of_the_messages(node):
    first = node.save(1)
    node.core.commit(first, is_to_persist=False)
    replicas = ReplicaStore("n1", SlotMemory.create, bytes_max=2**30)

    def opened(answer_s):
        shelf = Shelf(node.core.memory, replicas, node.jobs, lambda *_args: None, answer_s=answer_s)
        return shelf.open(first, Shard(0, 2))

    with pytest.raises(RefusedError, match="does not get to it"):
        opened(0.01)
    node.jobs.posted.popleft()()  # too late
    found = []
    thread = threading.Thread(target=lambda: found.append(opened(30.0)))
    thread.start()
    until(lambda: node.jobs.posted)
    node.jobs.posted.popleft()()
    thread.join()
    node.core.commit(node.save(2), is_to_persist=False)
    assert isinstance(node.core.begin(node.post, 3), Skipped)
    found[0].release()
    node.jobs.posted.popleft()()
    assert isinstance(node.core.begin(node.post, 4), Granted)


def test_replicas_have_most_of_the_time_between_two_states_that_are_asked_for():
    asked = AskedFor()
    assert asked.within_s == WITHIN_FIRST_S
    asked.look(100.0, None)
    asked.look(100.0, StateId(1, 10))
    asked.look(103.0, StateId(1, 10))
    assert asked.within_s == WITHIN_FIRST_S
    for n, gap_s in enumerate([10.0, 10.0, 900.0], start=1):
        asked.look(100.0 + gap_s * n, StateId(1, 10 + n))
    assert asked.within_s == pytest.approx(WITHIN_SHARE * 10.0)
    # Other workers: what those before did says nothing.
    asked.look(5000.0, StateId(2, 11))
    assert asked.within_s == WITHIN_FIRST_S
    for step in range(12, 30):
        asked.look(5000.0 + step / 100, StateId(2, step))
    assert asked.within_s == WITHIN_MIN_S
    for step in range(30, 50):
        asked.look(5000.0 + 1000.0 * step, StateId(2, step))
    assert asked.within_s == WITHIN_MAX_S


def test_what_is_owed_is_what_holders_lack_still(node):
    owed = node.core.peers.replication.pace
    node.replicate(NEAR, FAR)
    state = node.save(1)
    nbytes = next(iter(node.core.memory.held(state).values())).copy.digest.nbytes
    assert owed._due.left_bytes == 2 * nbytes
    node.jobs.end_push()
    node.jobs.end_push(TransferError("broken"))
    node.wait(AGAIN_S)  # the second one again

    assert node.pushes == 1
    assert owed._due.left_bytes == nbytes


def test_a_state_that_has_arrived_long_ago_hurries_no_other(node):
    owed = node.core.peers.replication.pace
    node.replicate(NEAR)
    state = node.save(1)
    node.jobs.end_push()
    node.core.commit(state, is_to_persist=False)
    node.wait(1000.0)
    before_s = time.monotonic()
    node.save(2)

    assert node.pushes == 1
    assert owed._due.at_s >= before_s + WITHIN_MIN_S
