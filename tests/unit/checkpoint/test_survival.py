"""The odds of recovery from memory: the paper's figures, brute force, and chance itself."""

import itertools
import time
from fractions import Fraction
from math import comb
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.placements import simulate_survival

from gpuops.checkpoint.placement.domains import FailureDomains, even_domains
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement, place
from gpuops.checkpoint.placement.survival import (
    corollary_bound,
    domain_losses,
    lost_states,
    mixed_odds,
    ring_odds,
    ring_sets,
)

SIZES = [(n, m) for n in range(1, 12) for m in range(1, n + 1)]


def named(count):
    return [f"n{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("n_nodes", "m", "lost", "probability"),
    [
        (16, 2, 1, 1.0),
        (16, 2, 2, 14 / 15),  # 93.3 % in the paper
        (16, 2, 3, 0.8),  # 80.0 % in the paper
        (16, 2, 4, 8 / 13),  # 61.5 %, where the bound says 60.0 %
        (64, 2, 2, 62 / 63),
        (1000, 2, 3, 0.997),
        (128, 2, 2, 0.9921),
        (1000, 2, 2, 0.9990),
    ],
)
def test_the_published_figures(n_nodes, m, lost, probability):
    assert mixed_odds(n_nodes, m, lost).probability == pytest.approx(probability, abs=5e-5)


@pytest.mark.parametrize(("lost", "probability"), [(2, 13 / 15), (3, 22 / 35)])
def test_a_pure_ring_of_sixteen_is_worse(lost, probability):
    assert ring_odds(16, 2, lost).probability == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize(
    ("n_nodes", "m", "lost", "bound"),
    [(16, 2, 1, 1.0), (16, 2, 2, 14 / 15), (16, 2, 3, 0.8), (16, 2, 4, 0.6), (4, 2, 4, 0.0)],
)
def test_the_bound_of_corollary_1(n_nodes, m, lost, bound):
    assert corollary_bound(n_nodes, m, lost) == pytest.approx(bound, abs=1e-12)


def survivors_by_force(placement, lost):
    return sum(
        not lost_states(placement, set(gone))
        for gone in itertools.combinations(placement.nodes, lost)
    )


@pytest.mark.parametrize(("n_nodes", "m"), SIZES)
def test_counting_agrees_with_looking_at_every_set(n_nodes, m):
    placement = place(named(n_nodes), m)
    for lost in range(n_nodes + 1):
        odds = mixed_odds(n_nodes, m, lost)

        assert odds.survived == survivors_by_force(placement, lost)
        assert odds.total == comb(n_nodes, lost)
        assert odds.probability + odds.missed == pytest.approx(1)


@pytest.mark.parametrize(("n_nodes", "m"), SIZES)
def test_the_ring_s_formula_agrees_with_looking_at_every_set(n_nodes, m):
    for lost in range(n_nodes + 1):
        counted = 0
        for gone in itertools.combinations(range(n_nodes), lost):
            windows = ({(at + ahead) % n_nodes for ahead in range(m)} for at in range(n_nodes))
            counted += not any(window <= set(gone) for window in windows)

        assert ring_sets(n_nodes, m, lost) == counted


@pytest.mark.parametrize(("n_nodes", "m"), [*SIZES, (100, 3), (101, 3), (1000, 7)])
def test_the_bound_is_never_above_and_is_exact_for_m_losses(n_nodes, m):
    for lost in range(min(n_nodes, 40) + 1):
        assert corollary_bound(n_nodes, m, lost) <= mixed_odds(n_nodes, m, lost).probability + 1e-12
    assert corollary_bound(n_nodes, m, m) == pytest.approx(mixed_odds(n_nodes, m, m).probability)


@pytest.mark.parametrize(("n_nodes", "m"), [(n, m) for n, m in SIZES if n % m])
def test_theorem_1_mixed_is_within_its_distance_of_the_best(n_nodes, m):
    # Any placement has at least ceil(N / m) different sets of holders, each lost by one set of m.
    best = 1 - Fraction(-(-n_nodes // m), comb(n_nodes, m))
    odds = mixed_odds(n_nodes, m, m)

    assert best - Fraction(odds.survived, odds.total) <= Fraction(2 * m - 3, comb(n_nodes, m))


@pytest.mark.parametrize(("n_nodes", "m", "lost"), [(16, 2, 2), (16, 2, 3), (17, 3, 4), (40, 3, 6)])
def test_chance_agrees_within_four_standard_errors(n_nodes, m, lost):
    trials = 4000
    exact = mixed_odds(n_nodes, m, lost).probability
    error = (exact * (1 - exact) / trials) ** 0.5

    found = simulate_survival(place(named(n_nodes), m), lost, trials, Random(20230923))

    assert abs(found - exact) < 4 * error


@given(st.integers(1, 60), st.data())
def test_more_losses_are_never_safer_and_more_copies_never_worse(n_nodes, data):
    m = data.draw(st.integers(1, n_nodes))
    odds = [mixed_odds(n_nodes, m, lost).probability for lost in range(n_nodes + 1)]

    assert odds == sorted(odds, reverse=True)
    assert odds[:m] == [1.0] * m
    assert odds[n_nodes] == 0
    if n_nodes % (2 * m) == 0:
        assert all(
            mixed_odds(n_nodes, 2 * m, lost).probability >= odds[lost] for lost in range(n_nodes)
        )


def test_without_copies_any_loss_is_one_of_a_state():
    assert [mixed_odds(8, 1, lost).probability for lost in (0, 1, 8)] == [1, 0, 0]


def test_four_thousand_nodes_take_no_time():
    began = time.process_time()
    missed = [mixed_odds(4096, m, k).missed for m in (2, 3) for k in (2, 3, 4, 50)]
    mixed_odds(4097, 2, 2048)
    ring_odds(4096, 3, 2048)

    assert missed[0] == pytest.approx(1 / 4095, rel=1e-12)
    assert time.process_time() - began < 20


@pytest.mark.parametrize(("n_nodes", "m", "lost"), [(4, 0, 1), (4, 5, 1), (4, 2, 5), (4, 2, -1)])
def test_what_cannot_be_lost_is_an_error(n_nodes, m, lost):
    for count in (mixed_odds, ring_odds, corollary_bound):
        with pytest.raises(ValueError, match="cannot"):
            count(n_nodes, m, lost)


def test_the_loss_of_a_domain_names_the_states_that_go_with_it():
    placement = ReplicaPlacement(2, (("a", "b"), ("c", "d")))
    paths = {"a": ("r", "1"), "b": ("r", "2"), "c": ("r", "3"), "d": ("r", "3")}
    found = {
        loss.domain: loss for loss in domain_losses(placement, FailureDomains(("r", "s"), paths))
    }

    assert found["r",].lost_states == ("a", "b", "c", "d")
    assert found["r", "1"].is_survived
    assert (found["r", "3"].level, found["r", "3"].n_nodes) == ("s", 2)
    assert found["r", "3"].lost_states == ("c", "d")
    assert len(found) == 4


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 8))
def test_the_loss_of_a_domain_is_what_looking_says(n_nodes, m, n_domains):
    nodes = named(n_nodes)
    domains = even_domains(nodes, min(n_domains, n_nodes))
    placement = place(nodes, m, domains.paths)

    losses = domain_losses(placement, domains)
    assert {loss.domain for loss in losses} == set(domains.paths.values())
    for loss in losses:
        gone = {node for node in nodes if domains.paths[node] == loss.domain}
        assert set(loss.lost_states) == set(lost_states(placement, gone))
