"""The newest state that all nodes can load, from examples and against a slower oracle."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import draws

from gpuops.checkpoint.agreement.recovery import REASONS_MAX, RestoreInputs, plan_restore
from gpuops.checkpoint.types import Digest, Shard, ShardCopy, StateId, Tier

OLD, NEW = StateId(2, 100), StateId(2, 110)


def digest(root="a", nbytes=1000):
    return Digest(nbytes, b"12345678", root * 64)


def copy(state, rank, world, holder, root="a", tier=Tier.MEMORY, *, layout="1"):
    return ShardCopy(state, Shard(rank, world), layout * 64, digest(root), tier, holder)


def memory(node, *held, world=2, root="a"):
    """Return the inventory of *node*: *held* are pairs of state and rank."""
    return [copy(state, rank, world, node, root) for state, rank in held]


def disk(state, world=2, root="a", where="/ckpt"):
    return [copy(state, rank, world, where, root, Tier.PERSISTENT) for rank in range(world)]


RANKS = {"n0": [0], "n1": [1]}


def test_each_rank_loads_from_its_own_memory():
    plan = plan_restore(
        RestoreInputs(
            inventories={"n0": memory("n0", (NEW, 0)), "n1": memory("n1", (NEW, 1))}, ranks=RANKS
        )
    )

    assert (plan.state, plan.world, plan.tier) == (NEW, 2, Tier.MEMORY)
    assert (plan.epoch, plan.why) == (3, ())
    assert plan.sources == {0: ("n0",), 1: ("n1",)}
    assert plan.roots == {0: "a" * 64, 1: "a" * 64}


def test_a_replaced_node_loads_from_its_peer():
    held = memory("n0", (NEW, 0), (NEW, 1))
    plan = plan_restore(
        RestoreInputs(inventories={"n0": held, "n2": []}, ranks={"n0": [0], "n2": [1]})
    )

    assert plan.tier is Tier.PEER
    assert plan.sources == {0: ("n0",), 1: ("n0",)}


def test_an_older_state_only_with_a_reason():
    plan = plan_restore(
        RestoreInputs(
            inventories={
                "n0": memory("n0", (NEW, 0), (OLD, 0)),
                "n1": memory("n1", (OLD, 1)),
                "n9": memory("n9", (NEW, 1)),
            },
            ranks=RANKS,
        )
    )

    assert plan.state == OLD
    assert plan.why == ("step 110 (epoch 2), world 2: no node has shard 1 of 2; lost with n9",)


def test_the_persistent_copy_fills_in_for_the_same_state_only():
    inventories = {"n0": memory("n0", (NEW, 0)), "n1": []}
    same = plan_restore(RestoreInputs(inventories=inventories, ranks=RANKS, persistent=disk(NEW)))
    other = plan_restore(RestoreInputs(inventories=inventories, ranks=RANKS, persistent=disk(OLD)))

    assert (same.state, same.tier) == (NEW, Tier.PERSISTENT)
    assert same.sources == {0: ("n0",)}
    assert (other.state, other.tier, other.sources) == (OLD, Tier.PERSISTENT, {})


def test_steps_made_again_are_newer_than_those_that_were_left_behind():
    again = StateId(3, 90)
    plan = plan_restore(
        RestoreInputs(
            inventories={
                "n0": memory("n0", (NEW, 0), (again, 0)),
                "n1": memory("n1", (NEW, 1), (again, 1)),
            },
            ranks=RANKS,
        )
    )

    assert (plan.state, plan.epoch) == (again, 4)


def test_nothing_to_load_is_a_fresh_start_with_reasons():
    plan = plan_restore(RestoreInputs(inventories={"n0": memory("n0", (NEW, 0))}, ranks=RANKS))

    assert plan.state is None
    assert (plan.sources, plan.roots) == ({}, {})
    assert (plan.epoch, len(plan.why)) == (3, 1)
    assert plan_restore(RestoreInputs(inventories={}, ranks=RANKS)).epoch == 0
    assert plan_restore(RestoreInputs(inventories={}, ranks=RANKS, epoch_max=6)).epoch == 7


def test_an_excluded_state_is_skipped_and_its_epoch_is_not():
    newer = StateId(7, 110)
    inventories = {
        "n0": memory("n0", (newer, 0), (NEW, 0), (OLD, 0)),
        "n1": memory("n1", (NEW, 1), (OLD, 1)),
    }
    plan = plan_restore(RestoreInputs(inventories=inventories, ranks=RANKS, excluded_steps=[110]))

    assert (plan.state, plan.epoch) == (OLD, 8)
    assert "step 110 (epoch 2), world 2: it is excluded" in plan.why


def test_of_two_copies_that_differ_neither_is_loaded():
    inventories = {
        "n0": [*memory("n0", (NEW, 0), (OLD, 0), (OLD, 1)), copy(NEW, 1, 2, "n0", "b")],
        "n1": memory("n1", (NEW, 1)),
    }
    plan = plan_restore(RestoreInputs(inventories=inventories, ranks=RANKS))

    assert plan.state == OLD
    (why,) = plan.why
    assert why.startswith("step 110 (epoch 2), world 2: the copies of shard 1 differ (n0, n1), ")


@pytest.mark.parametrize("odd", ["n0", "n1", "/ckpt"])
def test_of_three_copies_two_that_are_equal_are_loaded(odd):
    def root(holder):
        return "b" if holder == odd else "a"

    inventories = {
        "n0": [*memory("n0", (NEW, 0)), copy(NEW, 1, 2, "n0", root("n0"))],
        "n1": [copy(NEW, 1, 2, "n1", root("n1"))],
    }
    saved = [copy(NEW, 1, 2, "/ckpt", root("/ckpt"), Tier.PERSISTENT)]
    plan = plan_restore(RestoreInputs(inventories=inventories, ranks=RANKS, persistent=saved))

    assert plan.state == NEW
    assert plan.sources.get(1, ()) == tuple(node for node in ("n0", "n1") if node != odd)
    assert plan.roots[1] == "a" * 64


def test_another_layout_is_another_content():
    inventories = {
        "n0": [*memory("n0", (NEW, 0), (NEW, 1))],
        "n1": [copy(NEW, 1, 2, "n1", layout="2")],
    }
    assert plan_restore(RestoreInputs(inventories=inventories, ranks=RANKS)).state is None


def test_a_holder_that_contradicts_itself_has_no_vote():
    inventories = {
        "n0": [*memory("n0", (NEW, 0), (NEW, 1)), copy(NEW, 1, 2, "n0", "b")],
        "n1": memory("n1", (NEW, 1)),
    }
    plan = plan_restore(RestoreInputs(inventories=inventories, ranks=RANKS))

    assert plan.sources[1] == ("n1",)


def test_what_a_node_says_of_another_is_its_own_word():
    told = [copy(NEW, rank, 2, "n7") for rank in (0, 1)]
    plan = plan_restore(RestoreInputs(inventories={"n0": told}, ranks=RANKS))

    assert plan.sources == {0: ("n0",), 1: ("n0",)}


def test_in_another_world_every_node_needs_every_shard():
    inventories = {
        f"n{rank}": memory(f"n{rank}", (NEW, rank), (NEW, (rank + 1) % 4), world=4)
        for rank in range(3)
    }
    plan = plan_restore(
        RestoreInputs(inventories=inventories, ranks={"n0": [0], "n1": [1], "n2": [2], "spare": []})
    )

    assert (plan.world, plan.tier) == (4, Tier.PEER)
    assert plan.sources == {0: ("n0",), 1: ("n0", "n1"), 2: ("n1", "n2"), 3: ("n2",)}


def test_ranks_must_make_a_world():
    for ranks in ({"n0": [0], "n1": [0]}, {"n0": [1]}, {"n0": [0, 2]}):
        with pytest.raises(ValueError, match="each once"):
            plan_restore(RestoreInputs(inventories={}, ranks=ranks))


def test_a_hostile_world_costs_little_and_reasons_are_bounded():
    wild = [copy(StateId(5, step), 99_999, 100_000, "n0") for step in range(100)]
    plan = plan_restore(RestoreInputs(inventories={"n0": wild}, ranks=RANKS))

    assert plan.state is None
    assert len(plan.why) == REASONS_MAX
    assert all(len(reason) <= 200 for reason in plan.why)


NODES = ["n0", "n1", "n2", "n3"]
STATES = [StateId(epoch, step) for epoch in (1, 2) for step in (5, 6)]
WORLDS = [1, 2, 3]

copies_st = st.lists(
    st.builds(
        lambda state, world, rank, root, holder: copy(state, rank % world, world, holder, root),
        st.sampled_from(STATES),
        st.sampled_from(WORLDS),
        st.integers(0, 2),
        st.sampled_from("aaaab"),
        st.just("?"),
    ),
    max_size=12,
)


@st.composite
def situations(draw):
    live = draw(st.lists(st.sampled_from(NODES), min_size=1, unique=True))
    world = draw(st.sampled_from(WORLDS))
    ranks = {node: [] for node in live}
    for rank in range(world):
        ranks[draw(st.sampled_from(live))].append(rank)
    saved = [
        copy(c.state, c.shard.rank, c.shard.world, where, c.digest.root[0], Tier.PERSISTENT)
        for c in draw(copies_st)
        for where in [draw(st.sampled_from(["/a", "/b"]))]
    ]
    return RestoreInputs(
        inventories={node: draw(copies_st) for node in NODES},
        ranks=ranks,
        persistent=saved,
        excluded_steps=draw(st.lists(st.sampled_from([5, 6]), max_size=1)),
        epoch_max=draw(st.integers(-1, 4)),
    )


def trusted_by_hand(situation, state, shard):
    """Return {holder: root} of the copies that may be loaded, by the words of the rule."""
    told = {}
    for node in situation.ranks:
        for held in situation.inventories.get(node, ()):
            if (held.state, held.shard) == (state, shard):
                told.setdefault(node, set()).add(held.digest.root)
    for held in situation.persistent:
        if (held.state, held.shard) == (state, shard):
            told.setdefault(held.holder, set()).add(held.digest.root)
    votes = [next(iter(roots)) for roots in told.values() if len(roots) == 1]
    for root in set(votes):
        if votes.count(root) > len(votes) / 2:
            return {holder: root for holder, roots in told.items() if roots == {root}}
    return {}


def complete_by_hand(situation):
    """Return the pairs of state and world that can be loaded."""
    return [
        (state, world)
        for state in STATES
        for world in WORLDS
        if state.step not in situation.excluded_steps
        and all(trusted_by_hand(situation, state, Shard(rank, world)) for rank in range(world))
    ]


@settings(max_examples=draws(200))
@given(situations())
def test_the_newest_complete_state_is_chosen_and_never_mixed(situation):
    plan = plan_restore(situation)
    complete = complete_by_hand(situation)

    if not complete:
        assert plan.state is None
        return
    state, world = max(complete)
    assert (plan.state, plan.world) == (state, world)
    near, tiers = {}, {Tier.MEMORY}
    for rank in range(world):
        by_hand = trusted_by_hand(situation, state, Shard(rank, world))
        near[rank] = {h: root for h, root in by_hand.items() if h in situation.ranks}
    next_world = sum(len(ranks) for ranks in situation.ranks.values())
    for node, ranks in situation.ranks.items():
        for rank in ranks if next_world == world or not ranks else near:
            far = Tier.PEER if near[rank] else Tier.PERSISTENT
            tiers.add(Tier.MEMORY if node in near[rank] else far)
    assert plan.sources == {rank: tuple(sorted(found)) for rank, found in near.items() if found}
    assert plan.roots == {r: next(iter(found.values())) for r, found in near.items() if found}
    assert plan.tier is max(tiers, key=list(Tier).index)


@settings(max_examples=draws(200))
@given(situations())
def test_every_newer_state_has_its_reason_and_the_epoch_is_beyond_all(situation):
    plan = plan_restore(situation)
    seen = {
        (held.state, held.shard.world)
        for held in chain(situation.persistent, *situation.inventories.values())
    }
    chosen = (plan.state, plan.world) if plan.state else (StateId(0, 0), 0)
    passed = sorted((pair for pair in seen if pair > chosen), reverse=True)[:REASONS_MAX]

    assert [reason.split(":")[0] for reason in plan.why] == [
        f"{state}, world {world}" for state, world in passed
    ]
    assert plan.epoch == 1 + max([situation.epoch_max, *(state.epoch for state, _world in seen)])


@settings(max_examples=draws(200))
@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_words_does_not_matter(situation, random):
    def shuffled(items):
        items = list(items)
        random.shuffle(items)
        return items

    other = RestoreInputs(
        inventories={
            node: shuffled(held) for node, held in shuffled(situation.inventories.items())
        },
        ranks={node: shuffled(ranks) for node, ranks in shuffled(situation.ranks.items())},
        persistent=shuffled(situation.persistent),
        excluded_steps=situation.excluded_steps,
        epoch_max=situation.epoch_max,
    )

    assert plan_restore(other) == plan_restore(situation)
