"""What the keeper decides, with jobs that end when the test says so."""

from collections import deque

import pytest
from support.checkpoint_images import ORIGIN, images
from support.keeper_ranks import fill, layout_of

from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.messages import CheckpointPolicy, RankInfo, Skipped
from gpuops.checkpoint.keeper.rank_group import FENCE_S, RETURN_S
from gpuops.checkpoint.keeper.requests import ClientSession, KeeperRequests, NotReadyError
from gpuops.checkpoint.memory.buffer_table import SlotLease
from gpuops.checkpoint.memory.copy_stamp import COPIED, INTACT, write_stamp
from gpuops.checkpoint.memory.node_memory import SYSTEM_RESERVE_BYTES, NodeMemory
from gpuops.checkpoint.storage.address import open_store as open_any_store
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.storage.persist import persist
from gpuops.checkpoint.storage.persister import OTHERS_S
from gpuops.checkpoint.storage.read_back import AGAIN_S, WAIT_S, ReadBackTask
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    KeeperError,
    Shard,
    StateId,
    Tier,
)


class Jobs:
    """Work that waits for the test, by kind."""

    def __init__(self):
        self.waiting = {
            name: deque()
            for name in ("hash", "populate", "search", "persist", "read_back", "check_replicas")
        }

    def start(self, kind, work, then):
        self.waiting[kind].append((work, then))

    def map(self, function, things):
        return map(function, things)

    def do(self, name, n=None):
        for _ in range(len(self.waiting[name]) if n is None else n):
            work, then = self.waiting[name].popleft()
            try:
                result = work()
            except CheckpointError as exc:
                then(None, exc)
            else:
                then(result, None)


class Guest:
    """A connection."""

    def __init__(self, pid=0):
        self.pid = pid
        self.is_open = True

    def close(self):
        self.is_open = False


class Node:
    """A keeper, and the ranks of its node."""

    def __init__(self, available=lambda: 2**40, **kwargs):
        self.jobs = Jobs()
        self.now_s = 1000.0
        self.core = KeeperCore(
            NodeMemory("n1", available), self.jobs, clock_s=lambda: self.now_s, **kwargs
        )

    def start(self, n=2, generation=0, world=None):
        self.posts = [RankInfo(Shard(r, world or n), r, n, generation) for r in range(n)]
        self.guests = [Guest(100 + generation * 10 + r) for r in range(n)]
        for guest, post in zip(self.guests, self.posts, strict=True):
            assert self.core.join(guest, post, may_wait=False)
        return self

    def go(self):
        self.core.request_restore(self.core.group)
        self.jobs.do("search")
        for post in self.posts:
            layout = layout_of(post.shard.rank, post.shard.world)
            self.core.reserve(post, layout.header_hash, layout.nbytes, 2)
        return self

    def copy(self, step):
        states = []
        for post in self.posts:
            answer = self.core.acquire(post, step)
            assert isinstance(answer, SlotLease), answer
            layout = layout_of(post.shard.rank, post.shard.world)
            fill(self.core.memory.buffer(answer.slot).view, layout, step)
            states.append(answer.state)
        return states[0]

    def stamp(self, n, *words):
        """Stamp the copy that local rank *n* has under way."""
        table = self.core.memory.buffer_table
        saved = table.find(table.in_flight)
        stamp = self.core.memory._pools[saved.slots[n].pool].stamp
        for word in words:
            write_stamp(stamp, word, saved.number)

    def mark_written(self, state):
        for post in self.posts:
            self.core.mark_written(post, state)

    def save(self, step):
        state = self.copy(step)
        self.mark_written(state)
        self.jobs.do("hash")
        return state

    def lose(self):
        for guest in self.guests:
            self.core.disconnected(guest)

    @property
    def last_committed(self):
        return self.core.memory.buffer_table.last_committed

    @property
    def restore_point(self):
        return self.core.group.result.restore_point


ENDS = {
    "disconnected": Node.lose,
    "another generation": lambda node: node.core.begin_generation(1, 1, None, ""),
    "newer workers": lambda node: node.start(generation=1),
    "a turn": lambda node: node.core.tick(),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("reported", [[], [1]])
def test_what_the_ranks_have_stamped_is_saved_however_they_end(end, reported):
    node = Node().start().go()
    state = node.copy(1)
    for n in reported:
        node.core.mark_written(node.posts[n], state)
    for n in {0, 1} - set(reported):
        node.stamp(n, COPIED, INTACT)
    ENDS[end](node)
    node.jobs.do("hash")

    assert node.last_committed == state


@pytest.mark.parametrize("words", [[], [COPIED], [INTACT]])
@pytest.mark.parametrize("end", ["disconnected", "another generation", "newer workers"])
def test_what_is_not_stamped_by_both_is_not_saved(end, words):
    node = Node().start().go()
    before = node.copy(1)
    for n in (0, 1):
        node.stamp(n, COPIED, INTACT)
    node.core.tick()
    node.jobs.do("hash")
    state = node.copy(2)
    node.core.mark_written(node.posts[0], state)
    node.stamp(1, *words)
    ENDS[end](node)
    node.jobs.do("hash")

    assert node.last_committed == before


def test_a_flush_is_for_the_newest_though_an_older_one_could_not_be_written(tmp_path):
    full = []

    def open_store(place):
        if full:
            raise full.pop()
        return open_any_store(place)

    node = Node(open_store=open_store).start()
    node.core.set_policy(CheckpointPolicy(directory=str(tmp_path / "states"), persist_every_s=0.0))
    node.go().save(1)
    full.append(CheckpointError("the disk is full"))
    newest = node.save(2)  # while the first is being written
    assert node.core.persister.schedule.in_progress == StateId(newest.epoch, 1)
    node.core.persister.is_flushing = True
    node.jobs.do("persist", 1)
    counts = node.core.counts()
    assert (counts["persist_failed"], counts["persist_trouble"]) == ([0, 1], "the disk is full")
    node.jobs.do("persist", 1)
    assert node.core.counts()["persist_failed"] is None
    assert node.core.persister.schedule.last_persisted == newest
    assert not node.core.persister.is_flushing


def events(node, kind):
    return [event for event in node.core.events.take(10**6) if event["kind"] == kind]


def test_what_was_persisted_is_read_back_and_written_again_if_it_is_damaged(node, tmp_path):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address, persist_every_s=60.0, keep_last=1)
    node.start().core.set_policy(policy)
    node.go()

    def persist(step):
        node.now_s += 60.0
        state = node.save(step)
        node.jobs.do("persist")
        assert [it.is_verified for it in store.list_states() if it.state == state] == [False]
        return state

    first = persist(1)
    node.jobs.do("read_back")
    assert [(it.state, it.is_verified) for it in store.list_states()] == [(first, True)]
    assert [event["state"] for event in events(node, "read_back")] == [[0, first.step]]
    assert node.core.persister.read_back.verified == first

    second = persist(2)
    assert [it.state for it in store.list_states()] == [
        second,
        first,
    ]  # the first one is known good
    path = store.local_shard_path(second, Shard(1, 2))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    node.jobs.do("read_back")
    assert [it.state for it in store.list_states()] == [first]
    (event,) = events(node, "corrupt")
    assert (event["state"], event["tier"]) == ([0, second.step], "persistent")
    assert str(path) in event["why"]

    node.core.tick()
    assert not node.jobs.waiting["persist"]
    node.now_s += 60.0
    node.core.tick()
    node.jobs.do("persist")
    node.jobs.do("read_back")
    assert [(it.state, it.is_verified) for it in store.list_states()] == [(second, True)]


def flip_last_byte(node):
    """Change what memory has of rank 1 at the newest state, after it was hashed."""
    table = node.core.memory.buffer_table
    slot = table.find(node.last_committed).slots[1]
    node.core.memory.buffer(slot).view[-1:] = b"?"


def test_what_follows_a_state_that_was_read_back_is_verified_only_by_reading_it_back(
    node, tmp_path
):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address, persist_every_s=0.0, keep_last=1)
    node.start().core.set_policy(policy)
    first = node.go().save(1)
    node.jobs.do("persist")
    node.jobs.do("read_back")

    second = node.save(2)
    flip_last_byte(node)
    node.jobs.do("persist")
    assert [(it.state, it.is_verified) for it in store.list_states()] == [
        (second, False),
        (first, True),
    ]
    node.jobs.do("read_back")
    assert [it.state for it in store.list_states()] == [first]
    node.core.tick()
    node.jobs.do("persist")  # what was damaged is hashed as it is written
    assert "not what was saved" in node.core.persister.failure
    assert [it.state for it in store.list_states()] == [first]

    third = node.save(3)
    node.now_s += 60.0
    node.core.tick()
    node.jobs.do("persist")
    node.jobs.do("read_back")
    assert [(it.state, it.is_verified) for it in store.list_states()] == [(third, True)]
    shard = Shard(1, 2)
    assert store.read_piece_hashes(third, shard, 0, 2**20)


def test_what_is_written_faster_than_it_is_read_back_is_hashed_as_it_is_written(node, tmp_path):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address, persist_every_s=0.0)
    node.start().core.set_policy(policy)
    node.go().save(1)
    node.jobs.do("persist")

    node.save(2)
    flip_last_byte(node)
    node.jobs.do("persist")

    assert "not what was saved" in node.core.persister.failure
    assert [it.state.step for it in store.list_states()] == [1]


def test_a_flush_waits_until_what_was_not_hashed_as_it_was_written_is_read_back(node, tmp_path):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address, persist_every_s=0.0)
    node.start().core.set_policy(policy)
    node.go().save(1)
    node.jobs.do("persist")
    node.jobs.do("read_back")
    newest = node.save(2)
    node.jobs.do("persist")

    assert flushed(node) is None
    node.jobs.do("read_back")
    assert flushed(node).state == newest
    assert store.list_states()[0].is_verified


def test_a_state_that_a_restore_finds_damaged_is_none_of_those_that_are_kept(node, tmp_path):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address, persist_every_s=0.0, keep_last=2)
    node.start().core.set_policy(policy)
    node.go()
    for step in (1, 2, 3):
        state = node.save(step)
        node.jobs.do("persist")
        node.jobs.do("read_back")
    path = store.local_shard_path(state, Shard(1, 2))
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    again = Node()  # nothing is in memory
    again.start().core.set_policy(policy)
    again.go()
    assert again.restore_point.state == StateId(0, 2)
    assert [it.state.step for it in store.list_states() if it.is_damaged] == [3]
    for step, left in ((4, [4, 3, 2]), (5, [5, 4])):
        again.save(step)
        again.jobs.do("persist")
        again.jobs.do("read_back")
        assert [it.state.step for it in store.list_states()] == left
    again.core.memory.close()


def test_of_several_nodes_what_is_read_back_damaged_is_known_to_be(node, tmp_path):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address)
    with images(2) as sources:
        persist(store, StateId(0, 1), sources, origin=ORIGIN)
    path = store.local_shard_path(StateId(0, 1), Shard(0, 2))
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    task = ReadBackTask(StateId(0, 1), [Shard(0, 2)], policy, is_alone=False)
    node.core.persister.read_back.request(task)
    node.jobs.do("read_back")

    assert [it.is_damaged for it in store.list_states()] == [True]


def test_what_cannot_be_read_back_yet_is_tried_again_and_what_was_removed_is_not(node, tmp_path):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address, persist_every_s=0.0)
    node.start().core.set_policy(policy)
    removed = node.go().save(1)
    node.jobs.do("persist")
    store.delete(removed)
    node.jobs.do("read_back")
    node.now_s += AGAIN_S
    node.core.tick()
    assert not node.jobs.waiting["read_back"]

    node.save(2)
    node.jobs.do("persist")
    (tmp_path / "states").rename(tmp_path / "away")
    (tmp_path / "states").touch()
    node.jobs.do("read_back")
    (tmp_path / "states").unlink()
    (tmp_path / "away").rename(tmp_path / "states")
    node.core.tick()
    assert not node.jobs.waiting["read_back"]

    node.now_s += AGAIN_S
    node.core.tick()
    node.jobs.do("read_back")

    assert [it.is_verified for it in store.list_states()] == [True]


def test_a_rank_that_has_left_is_not_waited_for_long(node):
    first, second = node.start().go().posts
    node.core.disconnected(node.guests[0])

    answers = []
    for _ in range(2):
        answers.append(node.core.acquire(second, 1, is_last=True))
        node.now_s += RETURN_S + 1
    assert [answer.is_over for answer in answers] == [False, True]
    assert answers[1].why == "local rank 0 has left"
    assert node.core.join(Guest(100), first, may_wait=False, is_reconnect=True)
    assert not node.core.acquire(second, 2, is_last=True).is_over


def test_of_the_states_that_several_nodes_write_the_newest_complete_one_is_read_back(
    node, tmp_path
):
    store = open_any_store(str(tmp_path / "states"))
    policy = CheckpointPolicy(directory=store.address)
    first, second = StateId(0, 1), StateId(0, 2)
    read_back = node.core.persister.read_back
    for state in (first, second):  # another node has not written its shards yet
        read_back.request(ReadBackTask(state, [Shard(0, 2)], policy, is_alone=False))
        node.jobs.do("read_back")
    with images(2) as shards:
        persist(store, first, shards, origin=ORIGIN)

    for _ in range(3):
        node.now_s += AGAIN_S
        node.core.tick()
        assert node.jobs.waiting["read_back"]
        node.jobs.do("read_back")
    assert [event["state"] for event in events(node, "read_back")] == [[0, 1]]
    node.now_s += WAIT_S
    node.core.tick()
    node.jobs.do("read_back")
    node.now_s += AGAIN_S
    node.core.tick()
    assert not node.jobs.waiting["read_back"], "the node has been lost"


@pytest.fixture
def node():
    found = Node()
    yield found
    found.core.memory.close()


def test_what_all_ranks_sealed_before_they_were_killed_is_waited_for(node):
    node.start().go()
    old = node.save(1)
    state = node.copy(2)
    node.mark_written(state)
    node.lose()
    node.start(generation=1)
    node.core.request_restore(node.core.group)

    assert node.last_committed == old
    assert not node.jobs.waiting["search"]  # two digests are still to come
    node.jobs.do("hash")
    node.core.tick()
    node.jobs.do("search")
    assert node.restore_point.state == state
    assert node.restore_point.epoch == state.epoch + 1


def test_what_one_rank_had_not_written_is_not_waited_for(node):
    node.start().go()
    old = node.save(1)
    state = node.copy(2)
    node.core.mark_written(node.posts[0], state)
    node.lose()
    node.start(generation=1).go()

    assert node.restore_point.state == old
    node.jobs.do("hash")  # the digest of the one that had: nobody wants it
    assert node.last_committed == old


def test_an_answer_for_workers_that_were_replaced_is_not_given_to_the_new_ones(node):
    node.start().go()
    node.save(1)
    node.start(generation=1)
    node.core.request_restore(node.core.group)
    node.start(generation=2)
    node.jobs.do("search")

    assert node.core.group.result is None
    node.core.request_restore(node.core.group)
    node.jobs.do("search")
    assert node.restore_point.epoch == 1


def test_the_epoch_grows_with_each_start(node):
    epochs = []
    for generation in range(3):
        node.start(generation=generation).go()
        epochs.append(node.save(1).epoch)

    assert epochs == [0, 1, 2]


def test_new_workers_wait_for_old_ones_and_then_cut_them_off(node):
    node.start()
    old = node.guests
    post = RankInfo(Shard(0, 2), 0, 2, 0)
    newer = Guest(999)

    assert not node.core.join(newer, post, may_wait=True)
    assert all(guest.is_open for guest in old)
    assert node.core.join(newer, post, may_wait=False)
    assert not any(guest.is_open for guest in old)
    assert FENCE_S > 0


def test_a_rank_of_an_older_start_is_refused_once_a_newer_is_there(node):
    node.start(generation=3)

    with pytest.raises(KeeperError, match="generation 2 is over"):
        node.core.join(Guest(), RankInfo(Shard(0, 2), 0, 2, 2), may_wait=False)


def test_ranks_of_which_the_agent_knows_nothing_are_refused(node):
    node.core.begin_generation(5, 1, None, "run")

    with pytest.raises(KeeperError, match="no other node"):
        node.core.join(Guest(), RankInfo(Shard(0, 4), 0, 2, 5), may_wait=False)


def test_a_begin_before_anybody_asked_finds_out_by_itself_and_does_not_wait(node):
    node.start()

    assert isinstance(node.core.acquire(node.posts[0], 1), Skipped)
    node.jobs.do("search")
    assert node.core.group.result is not None


@pytest.mark.parametrize(
    "second", [(11, 10), (10, 9)], ids=["another step in the same call", "the same step later"]
)
def test_ranks_that_count_steps_differently_are_named_once(second):
    node = Node()
    node.start()
    for _ in range(2):
        node.core.acquire(node.posts[0], 10, n_steps=10)
        node.core.acquire(node.posts[1], second[0], n_steps=second[1])

    (why,) = [e["why"] for e in node.core.events.take(10**6) if e["kind"] == "steps_differ"]
    assert why.startswith("ranks count steps differently: step 10 of rank 0 is ")
    assert f"step {second[1]} of rank 1 is Checkpointer.step({second[0]})" in why


def test_ranks_that_count_alike_may_be_apart():
    node = Node()
    node.start()
    for rank, step, n_steps in ((0, 10, 1), (0, 20, 2), (1, 10, 1), (1, 20, 2), (1, 7, 0)):
        node.core.acquire(node.posts[rank], step, n_steps=n_steps)

    assert "steps_differ" not in {event["kind"] for event in node.core.events.take(10**6)}


def test_what_memory_holds_is_counted_before_it_is_taken():
    nbytes = layout_of(0, 2).nbytes
    available = [4 * nbytes + SYSTEM_RESERVE_BYTES - 1]
    node = Node(available=lambda: available[0])
    node.start()
    node.core.request_restore(node.core.group)
    node.jobs.do("search")
    layouts = [layout_of(rank, 2) for rank in range(2)]
    node.core.reserve(node.posts[0], layouts[0].header_hash, nbytes, 2)

    # Nothing is taken yet, and two slots are promised: the other two do not fit by one byte.
    with pytest.raises(KeeperError, match=r"rank 1 do not fit.*reserved for other slots"):
        node.core.reserve(node.posts[1], layouts[1].header_hash, nbytes, 2)
    start, refused = node.core.events.take(10**6)
    assert (start["kind"], refused["kind"]) == ("fresh_start", "refused")
    assert start["why"] == "no state is in memory, and no directory is set"
    node.jobs.do("populate")
    available[0] = 2 * nbytes + SYSTEM_RESERVE_BYTES
    node.core.reserve(node.posts[1], layouts[1].header_hash, nbytes, 2)
    assert isinstance(node.core.acquire(node.posts[0], 1), SlotLease)
    node.core.memory.close()


def test_a_machine_that_does_not_say_how_much_it_has_is_an_error():
    def unknown():
        raise CheckpointError("cannot determine the available memory")

    node = Node(available=unknown).start()
    with pytest.raises(KeeperError, match="cannot determine the available memory"):
        node.core.reserve(node.posts[0], "0" * 64, 1000, 2)


def test_two_slots_cost_a_save_while_one_is_persisted_and_three_do_not(node, tmp_path):
    node.start(1)
    node.core.set_policy(CheckpointPolicy(directory=str(tmp_path / "states")))
    node.go()
    node.save(1)
    assert node.core.counts()["persisting"] == [0, 1]
    node.save(2)

    skipped = node.core.acquire(node.posts[0], 3)
    assert isinstance(skipped, Skipped)
    assert skipped.is_due
    node.jobs.do("persist")
    assert node.core.counts()["persisted"] == [0, 1]
    assert node.save(4).step == 4


def spoil(folder, state, rank):
    path = folder / state.name / Shard(rank, 2).file_name
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.fixture
def policy(tmp_path):
    return CheckpointPolicy(directory=str(tmp_path / "states"), persist_every_s=0.0)


@pytest.fixture
def saved(policy):
    """A node that has two states in memory and in the directory."""
    node = Node().start()
    node.core.set_policy(policy)
    node.go()
    for step in (1, 2):
        node.save(step)
        node.jobs.do("persist")
    return node


def agreed_on(node, state, policy):
    """Have two nodes, of which *node* is one, agree on *state*."""
    node.core.begin_generation(1, 2, None, "run")
    node.start(2, generation=1)
    node.core.set_policy(policy)
    node.core.restore_from(state, 5)
    return searched(node)


def searched(node):
    node.core.request_restore(node.core.group)
    node.jobs.do("search")
    return node.core.group


def given_up(node, offered):
    """Have both ranks report that all ranks give up what they were *offered*."""
    for _ in range(2):  # the second one has no effect
        node.core.restore_finder.reject(
            node.core.group, node.core.instructions, offered, "it is damaged", is_given_up=True
        )
    return searched(node)


@pytest.mark.parametrize("is_older_damaged", [False, True])
def test_where_the_state_that_nodes_agreed_on_is_damaged_the_one_before_serves(
    saved, tmp_path, policy, is_older_damaged
):
    older, newer = StateId(0, 1), saved.last_committed
    spoil(tmp_path / "states", newer, 1)
    node = Node()
    refusal = agreed_on(node, newer, policy).refusal()
    assert isinstance(refusal, CorruptError)
    assert "step 2" in str(refusal)
    if is_older_damaged:
        spoil(tmp_path / "states", older, 1)

    group = given_up(node, (None, True))

    if is_older_damaged:
        assert type(group.refusal()) is KeeperError
        assert "step 2 (epoch 0) cannot be served here" in group.error
    else:
        assert (node.restore_point.state, node.restore_point.epoch) == (older, 5)
        assert any("step 2" in why and "it is damaged" in why for why in node.restore_point.why)


def test_a_node_gives_up_what_is_damaged_on_another_though_its_memory_is_not(saved, policy):
    """It offers only what all nodes see: of its memory not even the state before."""
    newer = saved.last_committed
    point = agreed_on(saved, newer, policy).result.restore_point
    assert (point.state, point.is_verified) == (newer, False)

    assert given_up(saved, (newer, False)).error == ""
    assert (saved.restore_point.state, saved.restore_point.tier) == (
        StateId(0, 1),
        Tier.PERSISTENT,
    )


def test_what_several_nodes_chose_is_served_or_said_to_be_missing(node):
    node.core.begin_generation(0, 2, None, "run")
    node.start(2, world=4)
    node.core.request_restore(node.core.group)
    node.core.restore_from(StateId(3, 9), 5)
    node.jobs.do("search")
    assert "cannot be served here" in node.core.group.error
    # The agents agree on another.
    node.core.restore_from(None, 5)
    node.jobs.do("search")
    assert node.restore_point is None
    assert node.core.memory.buffer_table.epoch == 5


def test_what_several_nodes_chose_waits_for_all_ranks_of_this_node(node):
    node.core.begin_generation(0, 2, None, "run")
    node.start(2, world=4)
    node.core.restore_from(None, 0)
    node.go()
    state = node.save(1)
    assert node.last_committed is None
    assert node.core.commit(state, persist=False)
    node.core.begin_generation(1, 2, None, "run")
    node.core.restore_from(state, 1)
    posts = [RankInfo(Shard(r, 4), r, 2, 1) for r in range(2)]
    node.core.join(Guest(), posts[0], may_wait=False)
    node.core.request_restore(node.core.group)
    assert not node.jobs.waiting["search"]
    node.core.join(Guest(), posts[1], may_wait=False)
    node.core.tick()
    node.jobs.do("search")
    assert node.restore_point.state == state


def test_a_state_of_more_ranks_that_is_not_complete_here_says_what_to_do(node):
    node.core.begin_generation(0, 2, None, "run")
    node.start(2, world=4)
    node.core.restore_from(None, 0)
    node.go()
    state = node.save(1)
    node.core.commit(state, persist=False)
    for generation, world in ((1, 4), (2, 3)):
        node.core.begin_generation(generation, 2, None, "run")
        node.core.restore_from(state, generation)
        node.start(2, generation=generation, world=world)
        node.core.request_restore(node.core.group)
        node.jobs.do("search")
        assert bool(node.core.group.error) == (world == 3), node.core.group.error

    assert "that of rank 2 is neither in this node's memory" in node.core.group.error
    assert (
        "4 ranks saved it and 3 load it, so each of its shards has to be" in node.core.group.error
    )
    assert "anew resumes from the newest in the directory" in node.core.group.error


def test_an_epoch_that_is_not_new_is_refused(node):
    node.core.begin_generation(0, 2, None, "run")
    node.start(2, world=4)
    node.core.restore_from(None, 4)
    node.go()
    node.core.begin_generation(1, 2, None, "run")
    node.core.restore_from(None, 4)
    node.start(2, generation=1, world=4)
    node.core.request_restore(node.core.group)
    node.jobs.do("search")

    assert "epoch 4 is not new" in node.core.group.error


def two_that_write_a_state(place):
    """Return two nodes that are to write their shards of one state into *place*, and the state."""
    nodes = [Node(), Node()]
    for rank, node in enumerate(nodes):
        node.core.set_policy(CheckpointPolicy(directory=place, persist_every_s=None))
        node.core.begin_generation(0, 2, None, "run")
        node.posts, node.guests = [RankInfo(Shard(rank, 2), 0, 1, 0)], [Guest()]
        node.core.join(node.guests[0], node.posts[0], may_wait=False)
        node.core.restore_from(None, 0)
        node.go()
        state = node.save(1)
        node.core.commit(state, persist=True)
    return nodes, state


def flushed(node, waited_s=0.0, **fields):
    """Return the keeper's reply to a flush that has waited so long, None where it goes on."""
    requests, session = KeeperRequests(node.core), ClientSession(None, role="agent")
    try:
        return requests.handle(session, "flush", {"deadline_s": 10.0, **fields}, waited_s)
    except NotReadyError:
        return None


def test_without_a_leader_the_shards_of_several_nodes_still_become_a_state(tmp_path):
    """The run has stopped after each node wrote its shards, and before one was told to commit."""
    (one, other), state = two_that_write_a_state(str(tmp_path / "states"))
    store = open_any_store(str(tmp_path / "states"))
    one.jobs.do("persist")
    assert flushed(one) is None
    one.jobs.do("persist")
    assert flushed(one, 1.0) is None, "the shards of the other node are missing"
    other.jobs.do("persist")

    assert flushed(other) is None
    other.jobs.do("persist")
    assert flushed(other, 1.0).state == state
    one.now_s += 1
    assert flushed(one, 2.0) is None
    one.jobs.do("persist")
    assert flushed(one, 3.0).state == state
    assert [stored.state for stored in store.list_states()] == [state]
    assert verify_state(store, state) == []
    assert not any(stored.is_verified for stored in store.list_states())
    for is_verified, node in enumerate((one, other)):  # each reads the shards that it wrote
        node.jobs.do("read_back")
        node.now_s += AGAIN_S
        node.core.tick()
        node.jobs.do("read_back")
        assert [stored.is_verified for stored in store.list_states()] == [bool(is_verified)]


@pytest.mark.parametrize(("passed_s", "waited_s"), [(0.0, 9.5), (OTHERS_S + 1, 1.0)])
def test_a_flush_says_that_the_shards_of_other_nodes_are_missing(tmp_path, passed_s, waited_s):
    """At the end of its time, or once the others could have written as much as this node did."""
    (one, _other), _state = two_that_write_a_state(str(tmp_path / "states"))
    one.jobs.do("persist")
    assert flushed(one) is None
    one.jobs.do("persist")

    one.now_s += passed_s
    done = flushed(one, waited_s)

    assert (done.state, "not all of its 2 shards are there" in done.why) == (None, True)
    assert not [e for e in one.core.events.take(10**6) if e["kind"] == "persist_failed"]


def test_a_flush_that_waits_for_the_shards_of_other_nodes_says_so_and_how_long_at_most(tmp_path):
    (one, _other), _state = two_that_write_a_state(str(tmp_path / "states"))
    one.jobs.do("persist")
    assert flushed(one, tells_wait=True) is None  # whether they are there is being looked at
    one.jobs.do("persist")

    waits = flushed(one, 1.0, tells_wait=True)

    assert (waits.state, waits.why, waits.others_s) == (None, "", 8.0)
    assert flushed(one, 1.0) is None


def test_several_nodes_write_one_state_into_an_object_store_and_one_seals_it():
    place = "memory://bucket-of-keepers/run"
    nodes, state = two_that_write_a_state(place)
    store, (other, sealer) = open_any_store(place), nodes
    sealer.jobs.do("persist")
    sealer.core.persister.commit_shards(state, 2)
    sealer.jobs.do("persist")
    told = [e for e in sealer.core.events.take(10**6) if e["kind"] == "persist_failed"]
    assert "not all of its 2 shards" in told[0]["why"]
    assert (sealer.core.progress().persisted, store.list_states()) == (None, ())
    other.jobs.do("persist")
    assert [node.core.progress().parts for node in nodes] == [(state,), (state,)]
    sealer.core.persister.commit_shards(state, 2)
    sealer.jobs.do("persist")

    assert sealer.core.progress().persisted == state
    assert [stored.state for stored in store.list_states()] == [state]
    assert verify_state(store, state) == []


def test_a_later_epoch_of_another_run_in_the_directory_keeps_nobody_from_restoring(tmp_path):
    policy = CheckpointPolicy(directory=str(tmp_path / "states"), persist_every_s=0.0)
    other = Node().start()
    other.core.set_policy(policy)
    other.go().save(1)
    other.jobs.do("persist")
    node = Node()
    node.core.set_policy(policy)
    node.core.begin_generation(0, 2, None, "run")
    node.start(2, world=4)
    node.core.restore_from(None, 0)
    node.core.request_restore(node.core.group)
    node.jobs.do("search")

    assert (node.core.group.error, node.core.memory.buffer_table.epoch) == ("", 0)
    (told,) = [e for e in node.core.events.take(10**6) if e["kind"] == "epoch_behind"]
    assert "another run" in told["why"]


def test_what_ranks_saved_before_an_agent_had_a_new_keeper_take_over_stays_older(tmp_path):
    """They may find it first; what they save later must be newer, or a restart would go back."""
    place = str(tmp_path / "states")
    old = Node().start()
    old.core.set_policy(CheckpointPolicy(directory=place))
    last = old.go().save(1)
    old.jobs.do("persist")
    node = Node().start()
    node.core.set_policy(CheckpointPolicy(directory=place))
    early = node.go().save(5)
    assert early > last
    node.core.begin_generation(0, 1, None, "run")
    node.core.take_over(last.epoch)
    node.start().go()

    assert node.last_committed == early
    later = node.save(6)

    assert node.last_committed == later > early


def test_a_bug_in_looking_is_told_and_not_waited_for(node):
    node.start()
    node.core.request_restore(node.core.group)
    _work, then = node.jobs.waiting["search"].popleft()
    then(None, ZeroDivisionError("oops"))

    assert "oops" in node.core.group.error
    assert not node.core.group.is_undecided
