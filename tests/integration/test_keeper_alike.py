"""Keepers of nodes whose ranks hold tensors alike: their copies have what the holder has not."""

import pytest
from support.keeper_ranks import Rank, until
from support.peer_keepers import commit, save, seat, starting_nodes

from gpuops.checkpoint.image import TensorSpec, plan_image
from gpuops.checkpoint.keeper.messages import Lease
from gpuops.checkpoint.placement.estimate import RamNeed
from gpuops.checkpoint.types import KeeperError, Shard, StateId, Tier

N_BYTES, OWN_BYTES = 4_000_000, 1000


def layout_of(rank, world):
    specs = [TensorSpec(name, "U8", (n,), n, (0,), (n,)) for name, n in SIZES.items()]
    return plan_image(Shard(rank, world), specs, 200, {"weight": tuple(range(world))})


SIZES = {"weight": N_BYTES, "own": OWN_BYTES}


def fill(view, layout, step, wrong=0):
    """Write an image whose weights are those of all ranks, but for *wrong*."""
    view[:] = bytes([layout.shard.rank]) * layout.nbytes
    view[: len(layout.header)] = layout.header
    weight = next(placed for placed in layout.tensors if placed.spec.name == "weight")
    view[weight.begin : weight.end] = bytes([step]) * N_BYTES
    view[weight.begin] += wrong


def image_of(rank, world, step, wrong=0):
    layout = layout_of(rank, world)
    image = bytearray(layout.nbytes)
    fill(memoryview(image), layout, step, wrong)
    return bytes(image)


class AlikeRank(Rank):
    """A rank that holds its weights alike with all others."""

    def __init__(self, keeper, rank, world):
        super().__init__(keeper, rank, world)
        self.layout, self.wrong = layout_of(rank, world), 0

    def copy(self, step):
        answer = self.keeper.acquire(step)
        if isinstance(answer, Lease):
            fill(self.slots[answer.slot].view, self.layout, step, self.wrong)
        return answer


@pytest.fixture
def start(tmp_path):
    with starting_nodes(tmp_path) as make:
        yield make


def sent_bytes(nodes):
    return sum(node.agent.stats()["replica_bytes"] for node in nodes)


def loads(node, offer, rank, world):
    return bytes(node.lines[0].open_shard(offer, Shard(rank, world)).view)


def test_a_lost_node_is_replaced_from_what_another_holds_alike(start):
    nodes = [start(1), start(2)]
    seat(nodes, 0, 2, rank_class=AlikeRank)
    commit(nodes, save(nodes, 1))
    state = commit(nodes, save(nodes, 2))
    # Both images of both states have crossed: what only their ranks have, and the headers.
    assert 4 * OWN_BYTES < sent_bytes(nodes) < 4 * (OWN_BYTES + 20_000)
    held = [node.agent.stats()["held_for_others_bytes"] for node in nodes]
    planned = RamNeed(1, layout_of(0, 2).nbytes, replicas=2, shared_bytes=N_BYTES)
    assert held == [planned.peers_bytes] * 2
    assert nodes[0].shards_here(state) == [Shard(0, 2), Shard(1, 2)]

    nodes[1].kill()
    spare = start(3)
    needed = {spare: {Shard(1, 2): [nodes[0].peer]}}
    crew = [nodes[0], spare]
    offers = seat(crew, 1, 2, state, state.epoch + 1, needed, rank_class=AlikeRank)
    assert [(offer.state, offer.tier) for offer in offers] == [
        (state, Tier.MEMORY),
        (state, Tier.PEER),
    ]
    for rank, node in enumerate(crew):
        assert loads(node, offers[rank], rank, 2) == image_of(rank, 2, 2)
    # What the new node has fetched is what it holds itself of the other's state.
    until(lambda: len(spare.shards_here(state)) == 2, what="the copy for the first node")
    assert spare.agent.stats()["held_for_others_bytes"] < N_BYTES + 2 * (OWN_BYTES + 20_000)
    nodes[0].kill()
    third = start(4)
    needed = {third: {Shard(0, 2): [spare.peer]}}
    crew = [third, spare]
    offers = seat(crew, 2, 2, state, state.epoch + 2, needed, rank_class=AlikeRank)
    for rank, node in enumerate(crew):
        assert loads(node, offers[rank], rank, 2) == image_of(rank, 2, 2)
    newer = commit(crew, save(crew, 3))
    assert newer == StateId(2, 3)
    assert sent_bytes(crew) < 3 * (OWN_BYTES + 20_000)


def test_the_last_node_has_all_that_a_smaller_world_needs(start):
    nodes = [start(1), start(2)]
    seat(nodes, 0, 2, rank_class=AlikeRank)
    state = commit(nodes, save(nodes, 4))
    nodes[1].kill()
    (offer,) = seat(nodes[:1], 1, 1, state, state.epoch + 1, rank_class=AlikeRank)
    assert (offer.state, offer.world, offer.tier) == (state, 2, Tier.MEMORY)
    for rank in range(2):
        source = nodes[0].lines[0].open_shard(offer, Shard(rank, 2))
        assert bytes(source.view) == image_of(rank, 2, 4)


def test_all_is_sent_where_the_holder_has_other_bytes_or_skipped_the_state(start):
    nodes = [start(1), start(2)]
    seat(nodes, 0, 2, rank_class=AlikeRank)
    nodes[1].ranks[0].wrong = 1
    state = commit(nodes, save(nodes, 1))
    before = sent_bytes(nodes)
    assert before > 2 * N_BYTES
    assert nodes[0].shards_here(state) == [Shard(0, 2), Shard(1, 2)]

    # Only the first node saves the next state: it waits while the other may still save it.
    assert isinstance(nodes[0].ranks[0].save(2), Lease)
    skipped = StateId(0, 2)
    until(lambda: skipped in nodes[0].agent.status().progress.whole, what="whole")
    assert not nodes[0].is_replicated(skipped)
    nodes[1].agent.set_next_step(4)
    assert not isinstance(nodes[1].ranks[0].save(3), Lease)  # it is past the state
    until(lambda: nodes[0].is_replicated(skipped), what="all of it is sent")
    assert sent_bytes(nodes) > before + N_BYTES
    nodes[0].agent.give_up(skipped)

    nodes[1].ranks[0].wrong = 0
    before = sent_bytes(nodes)
    commit(nodes, save(nodes, 5))
    assert sent_bytes(nodes) < before + 2 * (OWN_BYTES + 20_000)


def test_a_bit_that_flips_in_what_both_rely_on_is_found_and_the_state_before_serves(start):
    nodes = [start(1), start(2)]
    seat(nodes, 0, 2, rank_class=AlikeRank)
    older = commit(nodes, save(nodes, 1))
    state = commit(nodes, save(nodes, 2))
    for slot in nodes[0].ranks[0].slots:
        view, layout = slot.view, nodes[0].ranks[0].layout
        weight = next(placed for placed in layout.tensors if placed.spec.name == "weight")
        view[weight.begin + 5] ^= 16 * (view[weight.begin] == 2)

    nodes[1].kill()
    spare, lost = start(3), Shard(1, 2)

    def load(generation, wanted):
        for node, sources in ((nodes[0], {}), (spare, {lost: [nodes[0].peer]})):
            node.acquire(generation, 2)
            node.agent.restore_from(wanted, generation, sources)
        spare.connect(generation, [1], 2)
        (offer,) = spare.offers()
        return offer

    with pytest.raises(KeeperError, match=r"cannot be served here.*its copy is damaged"):
        load(1, state)
    # From now on it is no copy, and nobody plans with it.
    until(lambda: nodes[0].shards_here(state) == [Shard(0, 2)], what="the loss of the copy")
    assert nodes[0].heard_of("corrupt")
    assert nodes[0].shards_here(older) == [Shard(0, 2), lost]
    offer = load(2, older)
    assert (offer.state, offer.tier) == (older, Tier.PEER)
    assert loads(spare, offer, 1, 2) == image_of(1, 2, 1)
