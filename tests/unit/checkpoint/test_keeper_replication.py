"""What is pushed to whom, and when a holder is not waited for, with pushes that the test ends."""

import threading
import time
from collections import deque

import pytest
from support.keeper_ranks import fill, layout_of, until

from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.messages import (
    VERSION,
    CheckpointPolicy,
    RankInfo,
    Skipped,
    from_bytes,
    holder_pages,
    to_bytes,
)
from gpuops.checkpoint.keeper.requests import ClientSession, KeeperRequests
from gpuops.checkpoint.memory.buffer_table import SlotLease
from gpuops.checkpoint.memory.node_memory import SYSTEM_RESERVE_BYTES, NodeMemory, ReplicaAllocator
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.peers.push import (
    BACKOFF_MIN_S,
    BROKEN_PUSHES_MAX,
    HOLDER_GONE_S,
    RETRY_S,
    WITHIN_FIRST_S,
    WITHIN_MAX_S,
    WITHIN_MIN_S,
    WITHIN_SHARE,
    SaveCadence,
)
from gpuops.checkpoint.peers.source import OwnStates, ReplicaSource
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.client import PushResult
from gpuops.checkpoint.transfer.wire import TransferError, TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    KeeperAddress,
    KeeperError,
    Shard,
    StateId,
)
from gpuops.wire.messages import MessageFormatError

NEAR, FAR = KeeperAddress("near", "127.0.0.1", 1001), KeeperAddress("far", "127.0.0.1", 1002)


class Jobs:
    """Work by kind; what a push comes to is said by the test."""

    def __init__(self):
        self.waiting = {
            name: deque()
            for name in ("hash", "populate", "search", "persist", "check_replicas", "push", "fetch")
        }
        self.posted = deque()

    def start(self, kind, work, then):
        self.waiting[kind].append((work, then))

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
        then(None if error else PushResult(0.5, 100), error)


class Node:
    """A keeper of two, with one rank, whose peers are not there."""

    def __init__(self):
        self.jobs, self.now_s = Jobs(), 1000.0
        self.core = KeeperCore(
            NodeMemory("n1", lambda: 2**40),
            self.jobs,
            clock_s=lambda: self.now_s,
            wall_s=lambda: self.now_s,
        )
        self.core.begin_generation(0, 2, None, "run")
        self.core.peers.serve("127.0.0.1", node="n1", token="t", job="run")
        self.post = RankInfo(Shard(0, 2), 0, 1, 0)
        self.core.join(self, self.post, may_wait=False)
        self.core.restore_from(None, 0)
        self.core.request_restore(self.core.group)
        self.jobs.do("search")
        layout = layout_of(0, 2)
        self.core.reserve(self.post, layout.header_hash, layout.nbytes, 2)

    pid = 0

    def close(self):
        """Be a guest, too."""

    def save(self, step):
        answer = self.core.acquire(self.post, step)
        assert isinstance(answer, SlotLease), answer
        fill(self.core.memory.buffer(answer.slot).view, layout_of(0, 2), step)
        self.core.mark_written(self.post, answer.state)
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


def test_the_server_keeps_places_for_the_nodes_of_the_roster(node):
    peers = node.core.peers
    peers.replicate((NEAR,), [], None, ("10.1.2.3",))
    assert all(map(peers._running.server._admission.is_known, ("10.1.2.3", NEAR.host)))
    # Also the server that takes its place.
    peers.serve("127.0.0.1", node="n2", token="t", job="run")
    assert peers._running.server._admission.is_known("10.1.2.3")
    peers.replicate((), [], None)
    assert not peers._running.server._admission.is_known("10.1.2.3")


def test_without_holders_what_is_complete_counts_as_replicated(node):
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
    node.core.commit(first, persist=False)
    # It is committed all the same; its push goes on, and its slot must stay as it is.
    second = node.save(2)
    node.core.commit(second, persist=False)
    assert isinstance(node.core.acquire(node.post, 3), Skipped)
    node.jobs.end_push(TransferError("the transfer was stopped"))
    assert node.failed() == []  # it was given up for the newer one
    assert isinstance(node.core.acquire(node.post, 4), SlotLease)


def test_a_holder_that_takes_nothing_is_waited_for_so_long_and_told_once(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.wait(HOLDER_GONE_S - 0.1)
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
    for _ in range(BROKEN_PUSHES_MAX):
        assert node.replicated == ()
        task = node.core.peers.pusher._holders[NEAR].task
        node.now_s += HOLDER_GONE_S / 2
        task.moved_s, task.has_moved = node.now_s, True  # as by the thread that sends
        node.jobs.end_push(TransferError("no progress"))
        node.wait(RETRY_S)
    assert node.replicated == (state,)
    assert [failed["why"] for failed in node.failed()] == ["no progress"]


def test_a_holder_that_refuses_for_now_is_asked_again_and_one_without_room_is_not(node):
    node.replicate(NEAR, FAR)
    node.save(1)
    node.jobs.end_push(TransferRefusedError(TransferRefusal.NOT_WANTED, "far is no holder yet"))
    node.jobs.end_push(TransferRefusedError(TransferRefusal.NO_ROOM, "1.0 GB do not fit"))
    assert [(f["holder"], f["why"]) for f in node.failed()] == [("far", "1.0 GB do not fit")]
    assert node.replicated == ()
    node.wait(RETRY_S)
    assert node.pushes == 1
    node.jobs.end_push()
    assert node.replicated == (StateId(0, 1),)


def test_an_own_copy_that_is_damaged_is_not_committed(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.core.peers.pusher.on_damage(state, Shard(0, 2), 0)
    assert state in node.core.progress().refused
    assert not node.core.commit(state, persist=False)
    node.jobs.end_push(CorruptError("chunk 0 of its copy is damaged"))
    assert [e["kind"] for e in node.core.events.take(10**6)].count("corrupt") == 1


def test_a_new_holder_gets_the_newest_committed_state(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.jobs.end_push()
    node.core.commit(state, persist=False)
    node.replicate(FAR)
    assert node.pushes == 1
    assert node.replicated == ()
    node.jobs.end_push()
    assert node.replicated == (state,)


def test_a_state_that_is_given_up_is_pushed_no_more(node):
    node.replicate(NEAR)
    state = node.save(1)
    node.core.give_up(state)
    node.wait(HOLDER_GONE_S + 1)
    node.jobs.end_push(TransferError("the transfer was stopped"))
    assert node.failed() == []
    assert node.core.progress().refused == (state,)
    node.save(2)
    assert node.pushes == 1


def test_progress_says_what_was_refused(node):
    node.core.set_policy(CheckpointPolicy(every_s=10.0))
    state = node.save(1)
    node.core.acquire(node.post, 2)  # the first one still waits for its commit, or it is too early
    progress = node.core.progress()
    assert progress.whole == (state,)
    assert progress.refused == (StateId(0, 2),)
    assert (progress.in_flight, progress.decided) == (state, StateId(0, 2))
    assert KeeperProgress.from_json(progress.to_json()) == progress


def test_nodes_that_decide_apart_save_once_in_each_stretch_of_the_time_of_day(node):
    node.core.set_policy(CheckpointPolicy(every_s=10.0))
    node.now_s = 1009.9
    node.core.commit(node.save(1), persist=False)
    node.now_s = 1010.1  # a node whose last save was at 1000.0 also saves now
    node.core.commit(node.save(2), persist=False)
    node.now_s = 1019.9
    assert isinstance(node.core.acquire(node.post, 3), Skipped)


def test_what_is_no_progress_is_refused():
    good = KeeperProgress(whole=(StateId(0, 1),)).to_json()
    for bad in ([1], [-1, 2], ["a", 1], "x"):
        with pytest.raises(MessageFormatError):
            KeeperProgress.from_json({**good, "whole": [bad]})


def test_holders_of_a_large_world_are_said_in_pages(node):
    sources = {Shard(rank, 250): [NEAR, FAR][: rank % 2 + 1] for rank in range(250)}
    roots = {Shard(7, 250): "ab" * 32}
    pages = list(holder_pages(sources, roots))
    requests, session = KeeperRequests(node.core), ClientSession(None, role="agent")
    for page in pages:
        requests.handle(session, "sources", from_bytes(to_bytes({"v": VERSION, **page})), 0.0)
    assert [page["is_first"] for page in pages] == [True, False, False]
    assert {shard: list(it.peers) for shard, it in session.holders.items()} == sources
    assert session.holders[Shard(7, 250)].root == "ab" * 32
    for root, numbers, words in (("", [0], "refers to peers"), ("zz", [], "not a digest root")):
        page = {"is_first": True, "peers": [], "shards": [[[0, 1], root, numbers]]}
        with pytest.raises(CheckpointError, match=words):
            requests.handle(session, "sources", page, 0.0)


def test_replicas_are_refused_with_figures_where_the_ranks_need_the_memory():
    room = ReplicaAllocator(lambda: SYSTEM_RESERVE_BYTES + 3 * 2**20, lambda: 2**20)
    first = room.allocate("a", 2**20)
    with pytest.raises(KeeperError, match=r"2\.1 MB.*1\.1 GB are available, 2\.1 MB of it"):
        room.allocate("b", 2 * 2**20 + 1)
    assert room.unpopulated_bytes() == 2**20
    first.view[:] = bytes(2**20)
    assert room.unpopulated_bytes() == 0
    first.close()
    assert room.unpopulated_bytes() == 0


def test_what_peers_read_is_pinned_by_the_thread_of_the_messages(node):
    first = node.save(1)
    node.core.commit(first, persist=False)
    replicas = ReplicaStore("n1", SharedBuffer.create, bytes_max=2**30)

    def opened(answer_s):
        own = OwnStates(node.core.memory, node.jobs, replicas, set, timeout_s=answer_s)
        shelf = ReplicaSource(own, replicas, node.jobs, lambda *_args: None)
        return shelf.open(first, Shard(0, 2))

    with pytest.raises(TransferRefusedError, match="too busy"):
        opened(0.01)
    node.jobs.posted.popleft()()  # too late
    found = []
    thread = threading.Thread(target=lambda: found.append(opened(30.0)))
    thread.start()
    until(lambda: node.jobs.posted)
    node.jobs.posted.popleft()()
    thread.join()
    node.core.commit(node.save(2), persist=False)
    assert isinstance(node.core.acquire(node.post, 3), Skipped)
    found[0].release()
    node.jobs.posted.popleft()()
    assert isinstance(node.core.acquire(node.post, 4), SlotLease)


def test_replicas_have_most_of_the_time_between_two_states_that_are_asked_for():
    asked = SaveCadence()
    assert asked.within_s == WITHIN_FIRST_S
    asked.observe(100.0, None)
    asked.observe(100.0, StateId(1, 10))
    asked.observe(103.0, StateId(1, 10))
    assert asked.within_s == WITHIN_FIRST_S
    for n, gap_s in enumerate([10.0, 10.0, 900.0], start=1):
        asked.observe(100.0 + gap_s * n, StateId(1, 10 + n))
    assert asked.within_s == pytest.approx(WITHIN_SHARE * 10.0)
    # Other workers: what those before did says nothing.
    asked.observe(5000.0, StateId(2, 11))
    assert asked.within_s == WITHIN_FIRST_S
    for step in range(12, 30):
        asked.observe(5000.0 + step / 100, StateId(2, step))
    assert asked.within_s == WITHIN_MIN_S
    for step in range(30, 50):
        asked.observe(5000.0 + 1000.0 * step, StateId(2, step))
    assert asked.within_s == WITHIN_MAX_S


def test_what_is_owed_is_what_holders_lack_still(node):
    owed = node.core.peers.pusher.pace
    node.replicate(NEAR, FAR)
    state = node.save(1)
    nbytes = next(iter(node.core.memory.complete_shards(state).values())).copy.digest.nbytes
    assert owed._deadline.left_bytes == 2 * nbytes
    node.jobs.end_push()
    node.jobs.end_push(TransferError("broken"))
    node.wait(RETRY_S)  # the second one again

    assert node.pushes == 1
    assert owed._deadline.left_bytes == nbytes


def test_a_state_that_has_arrived_long_ago_hurries_no_other(node):
    owed = node.core.peers.pusher.pace
    node.replicate(NEAR)
    state = node.save(1)
    node.jobs.end_push()
    node.core.commit(state, persist=False)
    node.wait(1000.0)
    before_s = time.monotonic()
    node.save(2)

    assert node.pushes == 1
    assert owed._deadline.at_s >= before_s + WITHIN_MIN_S
