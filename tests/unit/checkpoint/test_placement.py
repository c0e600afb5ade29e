"""GEMINI's mixed placement: its shape, its spread over failure domains, and how little moves."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.placements import missing_copies

from gpuops.checkpoint.placement.domains import FailureDomains, even_domains
from gpuops.checkpoint.placement.replica_placement import (
    NODES_MAX,
    ReplicaPlacement,
    place,
    rebalance,
)
from gpuops.checkpoint.placement.survival import domain_spread
from gpuops.checkpoint.types import CheckpointError
from gpuops.wire.messages import MessageFormatError


def named(count, first=0):
    return [f"n{number}" for number in range(first, first + count)]


@st.composite
def clusters(draw, most=40):
    """Nodes, a number of copies, and two levels of domains."""
    nodes = named(draw(st.integers(1, most)))
    n_leaves = draw(st.integers(1, 8))
    leaves = draw(st.lists(st.integers(0, n_leaves - 1), min_size=len(nodes), max_size=len(nodes)))
    paths = {node: (f"s{leaf % 3}", f"l{leaf}") for node, leaf in zip(nodes, leaves, strict=True)}
    return nodes, draw(st.integers(1, 6)), FailureDomains(("spine", "leaf"), paths)


def holds_up(placement, nodes, asked):
    """Every state has m holders, its own node the first; every node holds m states."""
    m = min(asked, len(nodes))
    assert sorted(placement.nodes) == sorted(nodes)
    assert placement.replicas == m
    held = dict.fromkeys(nodes, 0)
    for node in nodes:
        holders = placement.holders(node)
        assert holders[0] == node
        assert len(set(holders)) == m
        for holder in holders:
            held[holder] += 1
            assert node in placement.owners_of(holder)
    assert set(held.values()) == {m}
    rest = len(nodes) % m
    assert len(placement.ring) == (m + rest if rest else 0)


@given(clusters())
def test_every_state_has_m_holders_and_every_node_m_states(cluster):
    nodes, m, domains = cluster

    holds_up(place(nodes, m, domains.paths), nodes, m)
    holds_up(place(nodes, m), nodes, m)


@given(clusters())
def test_the_same_input_gives_the_same_placement_and_json_brings_it_back(cluster):
    nodes, m, domains = cluster
    placement = place(nodes, m, domains.paths)

    assert place(list(nodes), m, dict(domains.paths)) == placement
    assert ReplicaPlacement.from_json(placement.to_json()) == placement


def test_the_paper_s_two_cases():
    assert place(named(4), 2).groups == (("n0", "n2"), ("n1", "n3"))
    five = place(named(5), 2)

    assert len(five.groups) == 1
    assert len(five.ring) == 3
    assert [five.holders(node)[1] for node in five.ring] == [*five.ring[1:], five.ring[0]]


def test_one_copy_is_its_node_alone_and_more_copies_than_nodes_are_one_group():
    assert place(named(3), 1).groups == (("n0",), ("n1",), ("n2",))
    crowded = place(named(2), 3)

    assert (crowded.requested_replicas, crowded.replicas) == (3, 2)
    assert crowded.groups == (("n0", "n1"),)
    assert place(["only"], 2).holders("only") == ("only",)


@given(clusters())
def test_groups_reach_the_best_spread_on_every_level_at_once(cluster):
    nodes, m, domains = cluster
    placement = place(nodes, m, domains.paths)
    if placement.ring:
        return

    levels = domain_spread(placement, domains)
    assert len(levels) == len(domains.levels)
    for level in levels:
        assert level.together == level.together_at_best
        assert level.met == pytest.approx(level.met_at_best)


@given(clusters())
def test_no_placement_beats_the_bounds(cluster):
    nodes, m, domains = cluster
    levels = domain_spread(place(nodes, m, domains.paths), domains)
    assert len(levels) == len(domains.levels)
    for level in levels:
        assert level.together >= level.together_at_best
        assert level.met <= level.met_at_best + 1e-9


def every_placement(nodes, m):
    rest = len(nodes) % m
    rings = itertools.combinations(nodes, m + rest) if rest else [()]
    for ring in rings:
        orders = ((ring[0], *more) for more in itertools.permutations(ring[1:])) if ring else [()]
        for order in orders:
            for groups in every_grouping([node for node in nodes if node not in ring], m):
                yield ReplicaPlacement(m, groups, order)


def every_grouping(nodes, m):
    if not nodes:
        yield ()
        return
    for others in itertools.combinations(nodes[1:], m - 1):
        group = (nodes[0], *others)
        for groups in every_grouping([node for node in nodes if node not in group], m):
            yield (group, *groups)


def together(placement, domains):
    return sum(level.together for level in domain_spread(placement, domains))


@pytest.mark.parametrize(("n_nodes", "m"), [(5, 2), (7, 2), (5, 3), (6, 3), (7, 3)])
@pytest.mark.parametrize(
    "leaves", ["0000000", "0011223", "0001112", "0101010", "0000012", "0123456", "0011100"]
)
def test_no_other_placement_loses_fewer_states_to_domains(n_nodes, m, leaves):
    nodes = named(n_nodes)
    paths = {node: (f"s{int(leaf) % 2}", leaf) for node, leaf in zip(nodes, leaves, strict=False)}
    domains = FailureDomains(("spine", "leaf"), paths)

    best = min(together(other, domains) for other in every_placement(nodes, m))

    assert together(place(nodes, m, paths), domains) == best


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("n_nodes", [64, 65, 127, 1000])
def test_with_enough_equal_domains_no_state_is_in_one_domain_only(n_nodes, m):
    nodes = named(n_nodes)
    domains = even_domains(nodes, 8)
    (level,) = domain_spread(place(nodes, m, domains.paths), domains)

    assert level.together == 0
    assert level.met > min(m, 8) * 0.93


def test_domains_that_are_equal_by_name_only_are_different():
    nodes = named(4)
    paths = {"n0": ("a", "x"), "n1": ("b", "x"), "n2": ("a", "y"), "n3": ("b", "y")}
    found = domain_spread(place(nodes, 2, paths), FailureDomains(("row", "rack"), paths))

    assert [(level.n_domains, level.together) for level in found] == [(2, 0), (4, 0)]


def test_nodes_of_unknown_domain_are_not_taken_to_be_apart():
    placement = place(named(4), 2, {"n0": ("a",), "n2": ("b",)})

    assert not any({"n1", "n3"} == set(group) for group in placement.groups)


@given(clusters(), st.data())
def test_a_change_of_nodes_keeps_complete_groups_and_moves_little(cluster, data):
    nodes, m, domains = cluster
    old = place(nodes, m, domains.paths)
    gone = data.draw(st.sets(st.sampled_from(nodes), max_size=len(nodes)))
    new_names = named(data.draw(st.integers(0, 5)), first=100)
    now = [node for node in nodes if node not in gone] + new_names
    if not now:
        return
    paths = {**domains.paths, **dict.fromkeys(new_names, ("s0", "l0"))}
    new = rebalance(old, now, paths)

    holds_up(new, now, m)
    if new.replicas != old.replicas:
        return
    whole = [group for group in old.groups if gone.isdisjoint(group)]
    torn = [group for group in whole if group not in new.groups]
    loose = len(now) - new.replicas * len(whole)
    assert len(torn) == (1 if 0 < loose < new.replicas else 0)
    moving = {node for pair in missing_copies(old, new) for node in pair}
    assert moving <= set(now) - {node for group in whole if group not in torn for node in group}
    assert len(missing_copies(old, new)) <= (new.replicas - 1) * (loose + new.replicas * len(torn))


@given(clusters())
def test_no_change_moves_nothing(cluster):
    nodes, m, domains = cluster
    old = place(nodes, m, domains.paths)

    assert missing_copies(old, rebalance(old, nodes, domains.paths)) == ()
    assert set(rebalance(old, nodes, domains.paths).groups) == set(old.groups)


@given(st.integers(2, 6), st.integers(1, 8), st.data())
def test_a_node_replaced_in_a_group_moves_its_own_copies_and_those_it_holds(m, n_groups, data):
    nodes = named(m * n_groups)
    old = place(nodes, m)
    gone = data.draw(st.sampled_from(nodes))
    new = rebalance(old, [*(node for node in nodes if node != gone), "fresh"])

    assert len(missing_copies(old, new)) == 2 * (m - 1)
    assert set(new.holders("fresh")) - {"fresh"} == set(old.holders(gone)) - {gone}


@given(st.integers(2, 6), st.data())
def test_a_node_replaced_in_the_ring_moves_no_more(m, data):
    nodes = named(3 * m + data.draw(st.integers(1, m - 1)))
    old = place(nodes, m)
    gone = data.draw(st.sampled_from(old.ring))
    new = rebalance(old, [*(node for node in nodes if node != gone), "fresh"])

    assert new.groups == old.groups
    assert len(missing_copies(old, new)) == 2 * (m - 1)


def test_two_widows_become_a_pair_and_one_widow_joins_a_ring():
    old = place(named(8), 2)
    first, second = old.groups[0][0], old.groups[1][0]
    both = rebalance(old, [node for node in old.nodes if node not in {first, second}])
    one = rebalance(old, [node for node in old.nodes if node != first])

    assert (old.groups[0][1], old.groups[1][1]) in both.groups
    assert len(missing_copies(old, both)) == 2
    assert len(one.ring) == 3
    assert len(missing_copies(old, one)) == 2
    assert len(set(one.groups) & set(old.groups)) == 2


def test_survivors_of_one_group_stay_together_in_a_group():
    old = place(named(16), 4)
    gone = {node for group in old.groups for node in group[:2]}
    new = rebalance(old, [node for node in old.nodes if node not in gone])

    for group in old.groups:
        assert any(set(group[2:]) <= set(other) for other in new.groups)
    assert len(missing_copies(old, new)) == 16


def test_survivors_of_one_group_stay_together_in_a_new_ring():
    old = place(named(12), 3)
    new = rebalance(old, [node for node in old.nodes if node not in {"n2", "n9"}])
    orders = (ReplicaPlacement(3, new.groups, order) for order in itertools.permutations(new.ring))

    assert len(new.ring) == 4
    assert len(missing_copies(old, new)) == min(len(missing_copies(old, other)) for other in orders)


def test_a_newcomer_takes_the_seat_that_is_farthest_from_its_domain():
    nodes = named(6)
    paths = {node: (f"rack{number % 3}",) for number, node in enumerate(nodes)}
    old = ReplicaPlacement(2, (("n0", "n1"), ("n2", "n3"), ("n4", "n5")))
    now = ["n0", "n2", "n4", "n5", "new1", "new2"]
    paths |= {"new1": ("rack0",), "new2": ("rack2",)}

    assert set(rebalance(old, now, paths).groups) == {
        ("n4", "n5"),
        ("n0", "new2"),
        ("n2", "new1"),
    }


def test_a_job_grown_past_its_copies_is_placed_anew_and_shrunk_too():
    old = place(named(2), 3)
    grown = rebalance(old, named(7))

    assert grown == place(named(7), 3)
    assert rebalance(grown, named(2)) == old
    assert rebalance(grown, named(1)).replicas == 1


@pytest.mark.parametrize(
    ("nodes", "replicas", "words"),
    [
        ([], 2, "without a node"),
        (["a", "b", "a"], 2, "node a cannot be placed twice"),
        (["a"], 0, "0 copies"),
        (named(NODES_MAX + 1), 2, f"at most {NODES_MAX}"),
    ],
)
def test_what_cannot_be_placed_says_why(nodes, replicas, words):
    with pytest.raises(CheckpointError, match=words):
        place(nodes, replicas)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"requested_replicas": True, "groups": [], "ring": []},
        {"requested_replicas": 2, "groups": [["a", "b"]], "ring": None},
        {"requested_replicas": 2, "groups": ["ab"], "ring": []},
        {"requested_replicas": 2, "groups": [["a", 1]], "ring": []},
        {"requested_replicas": 2, "groups": [["a", "b"], ["b", "c"]], "ring": []},
        {"requested_replicas": 2, "groups": [["a", "b", "c"]], "ring": []},
        {"requested_replicas": 2, "groups": [["a"], ["b", "c", "d"]], "ring": []},
        {"requested_replicas": 2, "groups": [], "ring": ["a", "b"]},
        {"requested_replicas": 0, "groups": [["a"]], "ring": []},
        {"requested_replicas": 1, "groups": [], "ring": []},
        {"requested_replicas": 1, "groups": [[str(n)] for n in range(NODES_MAX + 1)], "ring": []},
    ],
)
def test_what_is_no_placement_is_refused(data):
    with pytest.raises(MessageFormatError):
        ReplicaPlacement.from_json(data)


def test_a_node_that_is_not_placed_is_named():
    with pytest.raises(CheckpointError, match="x is not one of the 2 nodes"):
        place(named(2), 2).holders("x")


def test_sixty_thousand_nodes_are_placed_and_placed_again():
    nodes = named(60_001)
    paths = even_domains(nodes, 512).paths
    old = place(nodes, 3, paths)
    new = rebalance(old, nodes[:-100], paths)

    holds_up(new, nodes[:-100], 3)
    assert len(missing_copies(old, new)) < 2_000
