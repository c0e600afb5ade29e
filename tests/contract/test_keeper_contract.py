"""What a keeper promises a rank: in the process itself, and in one of its own."""

import contextlib

import pytest
from support.in_process_keeper import InProcessNode
from support.keeper_ranks import Rank, fill, holds, layout_of, newest, ready, save_all, until

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.messages import CheckpointPolicy, Lease, Skipped
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    KeeperError,
    RestoreUndecidedError,
    Shard,
    StateId,
    Tier,
)


class InProcess:
    """A keeper in this process."""

    def __init__(self, _folder):
        self.node = InProcessNode()
        self.generation = 0

    def connect(self, rank=0, world=1):
        return self.node.connect(
            rank=rank,
            world=world,
            local_rank=rank,
            local_world=world,
            generation=self.generation,
        )

    def kill(self):
        self.node.kill()

    def exclude(self, step):
        self.generation += 1
        self.node.begin_generation(self.generation, step)

    def close(self):
        self.node.close()


class OwnProcess:
    """A keeper in a process of its own."""

    def __init__(self, folder):
        self.process = start_or_adopt(folder / "keeper", lease_s=60.0)
        self.agent = None
        self.generation = 0
        self.lines = []

    def connect(self, rank=0, world=1):
        keeper = connect_rank(
            self.process.socket_path,
            rank=rank,
            world=world,
            local_rank=rank,
            local_world=world,
            generation=self.generation,
        )
        self.lines.append(keeper)
        return keeper

    def kill(self):
        for keeper in self.lines:
            keeper.close()
        self.lines.clear()

    def exclude(self, step):
        self.agent = self.agent or KeeperClient.connect(self.process.socket_path)
        self.generation += 1
        self.agent.begin_generation(self.generation, 1, step)

    def close(self):
        self.kill()
        if self.agent is not None:
            self.agent.close()
        self.process.kill()


@pytest.fixture(params=[InProcess, OwnProcess])
def node(request, tmp_path):
    with contextlib.closing(request.param(tmp_path)) as found:
        yield found


def crew(node, n=2, **kwargs):
    return ready([node.connect(rank, n) for rank in range(n)], **kwargs)


def again(node, n=2, **kwargs):
    """Return ranks that have started anew and not asked for anything yet."""
    node.kill()
    return [Rank(node.connect(rank, n), rank, n, **kwargs) for rank in range(n)]


def reject_damaged(ranks):
    """Have rank 1 find its memory damaged, and both report it; return the next offer."""
    offers = [rank.keeper.restore_point(60.0) for rank in ranks]
    with ranks[1].keeper.open_shard(offers[1], Shard(1, 2)) as image:
        nbytes = len(image.view)
        with pytest.raises(CorruptError, match="corrupt in piece 0 of 1") as found:
            image.ensure([(nbytes - 1, nbytes)])
    for rank, offer in zip(ranks, offers, strict=True):  # the second one comes too late
        rank.keeper.reject(offer, str(found.value))
        rank.keeper.restore_point(60.0)
    offers = [rank.keeper.restore_point(60.0) for rank in ranks]
    assert offers[0] == offers[1]
    return offers[0], ranks


def test_without_a_state_the_job_begins_anew(node):
    ranks = again(node)

    assert [rank.keeper.restore_point(60.0) for rank in ranks] == [None, None]


def test_a_saved_state_is_offered_to_all_ranks_after_they_are_gone(node):
    state = save_all(crew(node), 7)
    ranks = again(node)
    offers = [rank.keeper.restore_point(60.0) for rank in ranks]

    assert offers[0] == offers[1]
    assert (offers[0].state, offers[0].world, offers[0].tier) == (state, 2, Tier.MEMORY)
    assert offers[0].epoch > state.epoch
    for rank in ranks:
        shard = rank.keeper.open_shard(offers[0], rank.layout.shard)
        assert holds(shard, rank.layout, 7)
        with pytest.raises((TypeError, CheckpointError)):
            shard.view[0] = 1
        shard.close()


def test_any_shard_is_served_to_any_rank_of_another_world(node):
    save_all(crew(node), 3)
    (rank,) = again(node, 1)
    offer = rank.keeper.restore_point(60.0)

    assert offer.world == 2
    for number in range(2):
        with rank.keeper.open_shard(offer, Shard(number, 2)) as shard:
            assert holds(shard, layout_of(number, 2), 3)
    with pytest.raises(KeeperError, match="not being restored"):
        rank.keeper.open_shard(offer, Shard(0, 1))


def test_the_other_world_saves_then_and_the_old_memory_goes(node):
    save_all(crew(node), 3)
    (rank,) = again(node, 1)
    offer = rank.keeper.restore_point(60.0)
    rank.keeper.report_restored(offer, 0.1, 100)
    rank.reserve()
    state = save_all([rank], 4)

    assert state > offer.state
    assert rank.keeper.stats()["reserved_bytes"] == 2 * rank.layout.nbytes
    (rank,) = again(node, 1)
    assert rank.keeper.restore_point(60.0).state == state


def test_the_same_layout_is_the_same_memory(node):
    ranks = crew(node)
    save_all(ranks, 1)
    reserved = ranks[0].keeper.stats()["reserved_bytes"]
    ranks = again(node)
    for rank in ranks:
        rank.keeper.restore_point(60.0)
        rank.reserve()

    assert ranks[0].keeper.stats()["reserved_bytes"] == reserved
    assert any(holds(slot, ranks[0].layout, 1) for slot in ranks[0].slots)


def test_ranks_agree_on_every_step_and_the_newest_stays_complete(node):
    ranks = crew(node)
    state = save_all(ranks, 1)
    halves = [rank.copy(2) for rank in ranks]
    assert all(isinstance(half, Lease) for half in halves)
    ranks[0].keeper.mark_written(halves[0])
    skipped = [rank.keeper.acquire(3) for rank in ranks]

    assert all(isinstance(answer, Skipped) and answer.is_due for answer in skipped)
    assert [answer.state.step for answer in halves] == [2, 2]
    ranks = again(node)
    offers = [rank.keeper.restore_point(60.0) for rank in ranks]
    assert [offer.state for offer in offers] == [state, state]
    assert all(holds(r.keeper.open_shard(offers[0], r.layout.shard), r.layout, 1) for r in ranks)


def test_a_copy_that_is_stamped_needs_no_report_and_one_may_come_later(node):
    ranks = crew(node)
    save_all(ranks, 1)
    for step in (2, 3):
        leases = [rank.copy(step) for rank in ranks]
        for rank, lease in zip(ranks, leases, strict=True):
            rank.stamp(lease)
        until(lambda step=step: newest(ranks[0].keeper)[1] == step, what=f"the commit of {step}")
        for rank, lease in zip(ranks, leases, strict=True):
            rank.keeper.mark_written(lease)
    assert save_all(ranks, 4).step == 4


def test_a_copy_that_failed_gives_the_state_up_for_all(node):
    ranks = crew(node)
    state = save_all(ranks, 1)
    grants = [rank.copy(2) for rank in ranks]
    ranks[0].keeper.mark_written(grants[0])
    ranks[1].keeper.abandon(grants[1])

    assert newest(ranks[0].keeper) == [state.epoch, state.step]
    assert save_all(ranks, 3).step == 3


def test_a_seal_without_a_grant_is_refused(node):
    (rank,) = crew(node, 1)

    with pytest.raises(KeeperError, match="is not writing"):
        rank.keeper.mark_written(Lease(0, StateId(0, 99), 1))


def test_nothing_is_due_before_its_time(node):
    ranks = crew(node, every_s=1000.0)
    save_all(ranks, 1)

    for rank in ranks:
        answer = rank.keeper.acquire(2)
        assert isinstance(answer, Skipped)
        assert not answer.is_due


def test_ranks_that_count_steps_differently_are_named(node):
    ranks = crew(node)
    ranks[0].keeper.acquire(3, n_steps=3)
    ranks[1].keeper.acquire(4, n_steps=3)

    assert "ranks count steps differently: step 3 of rank 0 is" in ranks[0].keeper.stats()["notice"]


def test_the_last_step_is_saved_before_its_time(node):
    ranks = crew(node, every_s=1000.0)
    save_all(ranks, 1)
    assert all(isinstance(rank.keeper.acquire(2), Skipped) for rank in ranks)

    grants = [rank.keeper.acquire(2, is_last=True) for rank in ranks]
    assert [grant.state.step for grant in grants] == [2, 2]


def test_a_last_step_that_other_ranks_have_passed_is_over(node):
    ranks = crew(node)
    save_all(ranks, 1)
    assert ranks[0].keeper.acquire(3, is_last=True).state.step == 3
    answers = [ranks[1].keeper.acquire(step, is_last=True) for step in (1, 2)]

    assert [(answer.is_due, answer.is_over) for answer in answers] == [(False, False), (True, True)]


def test_a_slot_without_its_header_is_no_state(node):
    (rank,) = crew(node, 1)
    state = save_all([rank], 1)
    grant = rank.keeper.acquire(2)
    rank.slots[grant.slot].view[:8] = b"\xff" * 8
    rank.keeper.mark_written(grant)

    until(lambda: rank.keeper.stats()["given_up"] == 1, what="giving it up")
    assert newest(rank.keeper) == [state.epoch, state.step]


def test_a_bit_that_flipped_in_memory_is_found_and_the_state_before_it_serves(node):
    ranks = crew(node)
    first, second = save_all(ranks, 1), save_all(ranks, 2)
    slots = [slot for slot in ranks[1].slots if holds(slot, ranks[1].layout, 2)]
    slots[0].view[-100] ^= 4
    offer, ranks = reject_damaged(again(node))

    assert offer.state == first
    assert not offer.is_verified
    assert any(str(second) in why and "corrupt" in why for why in offer.why)
    assert holds(ranks[1].keeper.open_shard(offer, Shard(1, 2)), ranks[1].layout, 1)


def test_the_persistent_copy_of_the_same_state_serves_before_an_older_state(node, tmp_path):
    ranks = crew(node, slots=3, directory=str(tmp_path / "states"))
    save_all(ranks, 1)
    second = save_all(ranks, 2)
    persist_by_hand(ranks, second, tmp_path / "states")
    for slot in ranks[1].slots:
        slot.view[-100] ^= 4
    offer, ranks = reject_damaged(again(node, directory=str(tmp_path / "states")))

    assert (offer.state, offer.tier) == (second, Tier.PERSISTENT)
    assert offer.is_verified
    for rank in ranks:
        assert holds(rank.keeper.open_shard(offer, rank.layout.shard), rank.layout, 2)


def test_what_is_only_in_the_directory_is_offered(node, tmp_path):
    state = StateId(4, 20)
    folder = tmp_path / "states"
    put(folder, state, [layout_of(n, 2) for n in range(2)])
    ranks = again(node, directory=str(folder))
    offer = ranks[1].keeper.restore_point(60.0)

    assert (offer.state, offer.tier, offer.epoch) == (state, Tier.PERSISTENT, 5)
    assert holds(ranks[0].keeper.open_shard(offer, Shard(1, 2)), ranks[1].layout, 20)


def test_of_a_directory_of_another_world_parts_are_read_and_verified(node, tmp_path):
    folder, layout = tmp_path / "states", layout_of(1, 3)
    put(folder, StateId(4, 20), [layout_of(n, 3) for n in range(3)])
    (rank,) = again(node, 1, directory=str(folder))
    offer = rank.keeper.restore_point(60.0)
    image = rank.keeper.open_shard(offer, Shard(1, 3))

    assert (offer.world, offer.tier) == (3, Tier.PERSISTENT)
    assert not any(image.view)
    image.ensure([(0, 10), (layout.nbytes - 1, layout.nbytes)])
    image.ensure([(5, layout.nbytes)])
    assert holds(image, layout, 20)
    with pytest.raises(CorruptError, match="has no bytes"):
        image.ensure([(0, layout.nbytes + 1)])


def test_where_a_part_is_damaged_the_ranks_are_offered_an_older_state(node, tmp_path):
    folder = tmp_path / "states"
    for state in (StateId(4, 20), StateId(4, 30)):
        put(folder, state, [layout_of(n, 3) for n in range(3)])
    shard = folder / StateId(4, 30).name / Shard(1, 3).file_name
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    ranks = again(node, directory=str(folder))
    offer, other = (rank.keeper.restore_point(60.0) for rank in ranks)
    image = ranks[0].keeper.open_shard(offer, Shard(1, 3))

    with pytest.raises(CorruptError, match="shard-00001-of-00003") as found:
        image.ensure([(0, len(image.view))])
    offers = []
    for rank in ranks:  # one of them may have its answer before the other one reports
        rank.keeper.reject(offer, str(found.value))
        offers.append(rank.keeper.restore_point(60.0))

    assert offer.state == other.state == StateId(4, 30)
    assert [each.state for each in offers] == [StateId(4, 20)] * 2
    assert any("step 30" in why and "corrupt" in why for why in offers[0].why)
    image = ranks[1].keeper.open_shard(offers[1], Shard(1, 3))
    image.ensure([(0, len(image.view))])
    assert holds(image, layout_of(1, 3), 20)


def test_a_directory_of_which_nothing_reads_is_not_a_fresh_start(node, tmp_path):
    folder = tmp_path / "states"
    put(folder, StateId(4, 20), [layout_of()])
    (shard,) = folder.glob("*/shard-*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (rank,) = again(node, 1, directory=str(folder))

    with pytest.raises(RestoreUndecidedError, match="corrupt"):
        rank.keeper.restore_point(60.0)


def test_an_excluded_step_is_skipped(node):
    ranks = crew(node)
    first, _second = save_all(ranks, 1), save_all(ranks, 2)
    node.kill()
    node.exclude(2)
    ranks = again(node)
    offer = ranks[0].keeper.restore_point(60.0)

    assert offer.state == first
    assert any("excluded" in why for why in offer.why)


def test_another_layout_within_a_run(node):
    (rank,) = crew(node, 1)
    first = save_all([rank], 1)
    rank.layout = layout_of(n_floats=2000)
    rank.reserve()

    assert newest(rank.keeper) == [first.epoch, first.step]
    second = save_all([rank], 2)
    assert rank.keeper.stats()["reserved_bytes"] == 2 * rank.layout.nbytes
    (rank,) = again(node, 1, n_floats=2000)
    offer = rank.keeper.restore_point(60.0)
    assert offer.state == second
    assert holds(rank.keeper.open_shard(offer, Shard(0, 1)), rank.layout, 2)


def test_more_slots_than_this_machine_has_memory_for_are_refused_with_figures(node):
    keeper = node.connect()
    layout = layout_of(n_floats=2**37)

    with pytest.raises(KeeperError, match=r"2 slots of .* need .* available"):
        keeper.reserve(layout, slots=2)


def test_the_offered_memory_stays_until_it_was_read(node):
    ranks = crew(node)
    save_all(ranks, 1)
    ranks = again(node)
    offer = ranks[0].keeper.restore_point(60.0)
    shard = ranks[0].keeper.open_shard(offer, Shard(0, 2))
    for rank in ranks:
        rank.reserve()
    # Rank 1 has read it and goes on; rank 0 still reads.
    ranks[1].keeper.report_restored(offer, 0.1, 10)
    assert isinstance(ranks[1].keeper.acquire(5), Lease)
    assert holds(shard, ranks[0].layout, 1)


def test_the_handles_of_workers_that_are_gone_are_of_no_use(node):
    old = crew(node)
    save_all(old, 1)
    again(node)

    with pytest.raises(KeeperError):
        old[0].keeper.acquire(2)
    old[0].keeper.close()


def test_a_policy_that_cannot_be_is_refused():
    for wrong in (
        {"slots": 1},
        {"slots": 9},
        {"keep_last": 0},
        {"persist_every_s": float("nan")},
        {"every_s": -1.0},
        {"directory": ""},
        {"directory": "a\0b"},
    ):
        with pytest.raises(CheckpointError):
            CheckpointPolicy(**wrong)


def put(folder, state, layouts):
    """Write a state into a directory without any keeper."""
    from gpuops.checkpoint.digest import compute_digest
    from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
    from gpuops.checkpoint.storage.persist import StateOrigin, persist

    with contextlib.ExitStack() as stack:
        sources = {}
        for layout in layouts:
            memory = stack.enter_context(SharedBuffer.create("test", layout.nbytes))
            fill(memory.view, layout, state.step)
            sources[layout.shard] = (memory.fd, compute_digest(memory.view))
        persist(open_store(str(folder)), state, sources, origin=StateOrigin("test", 0))


def persist_by_hand(ranks, state, folder):
    """Make sure that *state* is in *folder*, whichever keeper this is."""
    if isinstance(ranks[0].keeper.stats().get("persist_failures"), int):
        manifest = folder / state.name / "manifest.json"
        until(lambda: newest(ranks[0].keeper) == [state.epoch, state.step])
        if not manifest.exists():
            until(lambda: ranks[0].keeper.stats()["persisting"] is None)
    if not (folder / state.name).exists():
        put(folder, state, [rank.layout for rank in ranks])
