"""Real keepers of several nodes, placed again after one of them is lost: who sends what to whom."""

import pytest
from support.keeper_ranks import until
from support.peer_keepers import commit, save, seat, starting_nodes
from support.placements import missing_copies

from gpuops.checkpoint.placement.replica_placement import place, rebalance
from gpuops.checkpoint.types import Shard, StateId, Tier

N_FLOATS = 300_000
WORLD = 4


@pytest.fixture
def start(tmp_path):
    with starting_nodes(tmp_path) as make:
        yield make


def sent_bytes(node):
    return node.agent.stats()["replica_bytes"]


def test_a_lost_holder_is_replaced_and_only_its_partner_sends(start):
    crew = [start(number) for number in (1, 2, 3, 4)]
    before = place([node.name for node in crew], 2)
    assert before.groups == (("n1", "n3"), ("n2", "n4"))
    seat(crew, 0, WORLD, placed=before, n_floats=N_FLOATS)
    state = commit(crew, save(crew, 5))
    for node, both in zip(crew, [(0, 2), (1, 3), (0, 2), (1, 3)], strict=True):
        assert node.shards_here(state) == [Shard(rank, WORLD) for rank in both]
    sent = {node: sent_bytes(node) for node in crew}
    image = sent[crew[0]]

    crew[2].kill()
    spare = start(5)
    crew[2] = spare
    after = rebalance(before, [node.name for node in crew])
    assert set(missing_copies(before, after)) == {("n1", "n5"), ("n5", "n1")}
    sources = {spare: {Shard(2, WORLD): [crew[0].peer]}}
    offers = seat(crew, 1, WORLD, state, 1, sources, placed=after, n_floats=N_FLOATS)

    # The partner hands out the lost node's copy, and sends its own; the others send nothing.
    survivors = [node for node in crew if node is not spare]
    until(lambda: all(node.is_replicated(state) for node in survivors), what="replicated again")
    assert [offer.tier for offer in offers] == [Tier.MEMORY] * 2 + [Tier.PEER] + [Tier.MEMORY]
    assert [event["holder"] for event in spare.heard_of("fetched")] == ["n1"]
    # What it fetched to go on from is a copy, too, until the next commit.
    assert spare.shards_here(state) == [Shard(0, WORLD), Shard(2, WORLD)]
    assert {node.name: sent_bytes(node) - sent.get(node, 0) for node in crew} == {
        "n1": image,
        "n2": 0,
        "n4": 0,
        "n5": 0,
    }
    # And the newcomer is a holder as the others are.
    assert commit(crew, save(crew, 6)) == StateId(1, 6)
    assert spare.shards_here(StateId(1, 6)) == [Shard(0, WORLD), Shard(2, WORLD)]
