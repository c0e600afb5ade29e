"""Rounds of a sweep are disjoint, complete, seeded, and draw pairs that were never tested first."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.burnin.pairs import PairOutcome, PairTest, is_same_domain
from gpuops.burnin.schedule import (
    ALL_PAIRS_MAX,
    OpenQuestions,
    confirmation_round,
    first_rounds,
    share_tested,
)


def names(n):
    return [f"gpu{i:05}" for i in range(n)]


def in_leaves(n, size):
    return {node: f"leaf{i // size}" for i, node in enumerate(names(n))}


def assert_disjoint(one, nodes):
    """Every node stands in one pair, or is idle."""
    seen = Counter(itertools.chain(*one.pairs, one.idle))
    assert seen == Counter(nodes)
    assert all(a < b for a, b in one.pairs)


@pytest.mark.parametrize("n", range(2, ALL_PAIRS_MAX + 1))
def test_up_to_sixteen_nodes_every_pair_is_tested_once(n):
    rounds = first_rounds(names(n), seed=n)

    assert len(rounds) == (n if n % 2 else n - 1)
    for one in rounds:
        assert_disjoint(one, names(n))
    drawn = [pair for one in rounds for pair in one.pairs]
    assert sorted(drawn) == sorted(itertools.combinations(names(n), 2))
    assert Counter(itertools.chain(*(one.idle for one in rounds))) == (
        Counter(names(n)) if n % 2 else Counter()
    )


@given(
    n=st.integers(ALL_PAIRS_MAX + 1, 120),
    seed=st.integers(0, 2**64),
    leaf=st.integers(1, 40),
    shuffled=st.randoms(use_true_random=False),
)
def test_above_two_disjoint_rounds_of_different_pairs(n, seed, leaf, shuffled):
    nodes, leaves = names(n), in_leaves(n, leaf)
    rounds = first_rounds(nodes, seed=seed, domains=leaves)

    assert len(rounds) == 2
    for one in rounds:
        assert_disjoint(one, nodes)
    assert not set(rounds[0].idle) & set(rounds[1].idle)
    other_order = shuffled.sample(nodes, n)
    assert first_rounds(other_order, seed=seed, domains=leaves) == rounds
    assert first_rounds(nodes, seed=seed + 1, domains=leaves) != rounds


@given(n=st.integers(ALL_PAIRS_MAX + 1, 120), leaf=st.integers(2, 16))
def test_the_first_round_stays_below_the_leaves_and_the_second_crosses_them(n, leaf):
    leaves = in_leaves(n, leaf)
    near, far = first_rounds(names(n), seed=1, domains=leaves)

    # Of each leaf with an odd number one node is left, and is paired with one of another leaf.
    sizes = Counter(leaves.values()).values()
    odd = sum(size % 2 for size in sizes)
    assert sum(not is_same_domain(pair, leaves) for pair in near.pairs) <= odd
    # A leaf with more than half of the nodes has too few others.
    left_over = max(0, max(sizes) - len(far.pairs))
    assert sum(is_same_domain(pair, leaves) for pair in far.pairs) <= left_over


def test_one_leaf_or_none_known_is_no_topology():
    for leaves in ({}, in_leaves(20, 20), {"elsewhere": "leaf9", "gpu00001": "leaf0"}):
        assert first_rounds(names(20), seed=3, domains=leaves) == first_rounds(names(20), seed=3)


def test_a_node_without_a_known_leaf_is_tested_as_well():
    leaves = in_leaves(40, 8)
    del leaves["gpu00003"]

    for one in first_rounds(names(40), seed=1, domains=leaves):
        assert_disjoint(one, names(40))


@pytest.mark.parametrize("n", [17, 24, 33])
def test_successive_sweeps_draw_untested_pairs_first(n):
    tested, sweeps = set(), -(-(n - 1) // 2)
    for seed in range(sweeps):
        for one in first_rounds(names(n), seed=seed, tested=frozenset(tested)):
            tested |= set(one.pairs)

    # Drawn at random, 63 % of the pairs would be tested by then.
    assert share_tested(names(n), tested) > 0.9
    for seed in range(sweeps, sweeps + 6):
        for one in first_rounds(names(n), seed=seed, tested=frozenset(tested)):
            tested |= set(one.pairs)
    assert share_tested(names(n), tested) == 1


def test_the_share_counts_only_pairs_of_these_nodes():
    assert share_tested(names(3), {("gpu00000", "gpu00001"), ("gpu00000", "old")}) == 1 / 3
    assert share_tested(names(1), set()) == 1


@pytest.mark.parametrize("n", [0, 1])
def test_less_than_two_nodes_have_no_round(n):
    assert first_rounds(names(n), seed=1) == ()


def test_a_node_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="gpu00001 is named twice"):
        first_rounds([*names(3), "gpu00001"], seed=1)


def test_each_suspect_meets_a_partner_that_it_has_not_met():
    questions = OpenQuestions(
        suspects=("a", "b"),
        partners={"p": 2, "q": 2, "r": 1, "s": 0},
        met={"a": {"p"}, "b": set()},
    )

    for seed in range(20):
        one = confirmation_round(questions, seed=seed)
        partners = {pair[0]: pair[1] for pair in one.pairs}
        assert partners == {"a": "q", "b": "p"}  # the more trusted ones first, and not p again
        assert one.idle == ()


def test_which_of_equal_partners_a_suspect_meets_is_drawn():
    questions = OpenQuestions(suspects=("a",), partners=dict.fromkeys("pqr", 1))

    drawn = {confirmation_round(questions, seed=seed).pairs[0][1] for seed in range(40)}

    assert drawn == set("pqr")


def test_pairs_to_repeat_come_first_and_what_does_not_fit_is_idle():
    questions = OpenQuestions(
        suspects=("a", "c", "x", "y"),
        repeat=(("a", "b"), ("b", "d")),
        partners={"a": 2, "b": 2, "z": 2},
    )

    one = confirmation_round(questions, seed=1)

    assert one.pairs == (("a", "b"), ("c", "z"))
    assert one.idle == ("x", "y")
    assert confirmation_round(OpenQuestions(), seed=1).pairs == ()


def test_partners_are_of_the_own_leaf_and_of_another_one_in_turns():
    leaves = {"s": "l0", "near1": "l0", "near2": "l0", "far1": "l1", "far2": "l1"}
    partners = dict.fromkeys(("near2", "far2"), 1)

    def partner(met):
        questions = OpenQuestions(suspects=("s",), partners=partners, met={"s": met})
        ((a, b),) = confirmation_round(questions, seed=1, domains=leaves).pairs
        return a if b == "s" else b

    assert partner({"far1"}) == "near2"
    assert partner({"near1"}) == "far2"
    assert partner({"near1", "far1", "near2"}) == "far2"


@pytest.mark.parametrize("nodes", [("b", "a"), ("a", "a")])
def test_a_pair_is_sorted_and_of_two_nodes(nodes):
    with pytest.raises(ValueError, match="two different nodes, sorted"):
        PairTest(nodes=nodes, outcome=PairOutcome.PASS)


def test_nodes_without_a_question_are_tested_too_in_pairs_that_are_new():
    partners = dict.fromkeys([*names(20), "p"], 1)
    met = {"gpu00000": {"gpu00001"}, "gpu00001": {"gpu00000"}}
    tested = {("gpu00002", "gpu00003")}
    questions = OpenQuestions(suspects=("x",), partners=partners, met=met)

    for seed in range(20):
        one = confirmation_round(questions, seed=seed, fill=True, tested=tested)

        assert_disjoint(one, [*partners, "x"])
        assert not tested & set(one.pairs)
        assert ("gpu00000", "gpu00001") not in one.pairs
    assert len(confirmation_round(questions, seed=1).pairs) == 1
    odd = confirmation_round(OpenQuestions(partners=dict.fromkeys("abc", 1)), seed=1, fill=True)
    assert_disjoint(odd, "abc")
