"""Who gets which seat: survivors keep theirs, newcomers fill holes, nobody sits twice."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control.membership import N_STANDBYS, form_roster, succession_of, trainable_count
from gpuops.control.record import Member, Roster
from gpuops.incident.decision import OnExhausted, RestartPolicy


def member(number, node=None, order=None, domain=()):
    return Member(
        domain=domain,
        agent=str(UUID(int=number)),
        node=node or f"n{number}",
        address="10.0.0.1",
        n_workers=8,
        node_rank_hint=order,
    )


def terms(low, high, **more):
    return RestartPolicy(nodes_min=low, nodes_max=high, **more)


def nodes(members):
    return [m.node for m in members]


def seated(*numbers):
    return Roster(generation=0, members=tuple(member(number) for number in numbers))


@pytest.mark.parametrize(
    ("n_ready", "expected", "more"),
    [
        (1, 0, {}),
        (2, 2, {}),
        (3, 3, {}),
        (4, 4, {}),
        (9, 4, {}),
        (3, 2, {"node_unit": 2}),
        (4, 4, {"node_unit": 2}),
        (3, 0, {"on_exhausted": OnExhausted.REQUEUE}),
        (4, 4, {"on_exhausted": OnExhausted.REQUEUE}),
    ],
)
def test_seats_of_two_to_four_nodes(n_ready, expected, more):
    assert trainable_count(n_ready, terms(2, 4, **more)) == expected


def test_first_come_first_seated_where_nobody_wishes():
    roster = form_roster(0, [member(3), member(1), member(2)], None, terms(1, 2))

    assert nodes(roster.members) == ["n3", "n1"]
    assert nodes(roster.spares) == ["n2"]


def test_the_launchers_order_counts_and_who_has_none_comes_behind():
    ready = [member(5), member(1, order=2), member(2, order=0), member(3, order=1)]

    assert nodes(form_roster(0, ready, None, terms(1, 8)).members) == ["n2", "n3", "n1", "n5"]


def test_a_newcomer_takes_the_hole_of_the_node_that_it_replaces():
    roster = form_roster(1, [member(9), member(3), member(1)], seated(1, 2, 3), terms(1, 3))

    assert nodes(roster.members) == ["n1", "n9", "n3"]


def test_a_restarted_agent_takes_its_nodes_old_place():
    again = member(77, node="n2")
    roster = form_roster(1, [again, member(3), member(1)], seated(1, 2, 3), terms(1, 3))

    assert nodes(roster.members) == ["n1", "n2", "n3"]
    assert roster.group_rank(again.agent) == 1


def test_with_fewer_seats_the_first_stay_and_the_last_move_up():
    roster = form_roster(1, [member(3), member(4)], seated(1, 2, 3, 4), terms(1, 4))

    assert nodes(roster.members) == ["n3", "n4"]


def test_a_survivor_within_the_new_size_is_not_moved_for_one_beyond_it():
    roster = form_roster(1, [member(4), member(2), member(3)], seated(1, 2, 3, 4), terms(1, 4))

    assert nodes(roster.members) == ["n4", "n2", "n3"]


def test_of_two_agents_of_a_node_the_newer_sits():
    old, new = member(1, node="n1"), member(2, node="n1")
    roster = form_roster(0, [old, new], None, terms(1, 2))

    assert [m.agent for m in (*roster.members, *roster.spares)] == [new.agent]


def test_an_excluded_node_is_not_even_a_spare():
    roster = form_roster(1, [member(1), member(2)], seated(1, 2), terms(1, 2), {"n1"})

    assert (nodes(roster.members), roster.spares) == (["n2"], ())


def test_too_few_form_nothing():
    assert form_roster(0, [member(1)], None, terms(2, 3)) is None
    assert form_roster(0, [member(1), member(2)], None, terms(2, 3), {"n2"}) is None


@st.composite
def rounds(draw):
    """Terms, a roster of before (perhaps none), who is ready, who is excluded."""
    high = draw(st.integers(1, 8))
    unit = draw(st.integers(1, high))
    found = terms(draw(st.integers(1, high)), high, node_unit=unit)
    node = st.integers(0, 11)
    before = draw(st.none() | st.lists(node, min_size=1, max_size=high, unique=True))
    agents = draw(st.lists(st.tuples(node, st.none() | st.integers(0, 20)), max_size=14))
    ready = [member(100 + i, f"n{n}", order) for i, (n, order) in enumerate(agents)]
    excluded = {f"n{n}" for n in draw(st.lists(node, max_size=3))}
    return found, None if before is None else seated(*before), ready, excluded


@given(rounds())
def test_whoever_comes_and_goes(drawn):
    found, before, ready, excluded = drawn
    there = {m.node for m in ready} - excluded
    roster = form_roster(7, ready, before, found, excluded)

    if roster is None:
        assert trainable_count(len(there), found) == 0
        return
    everybody = [*roster.members, *roster.spares]
    assert sorted(nodes(everybody)) == sorted(there), "each fit node once, no other"
    size = len(roster.members)
    assert found.nodes_min <= size <= found.nodes_max
    assert size % found.node_unit == 0
    assert roster.generation == 7
    if before is None:
        return
    for place, old in enumerate(before.members):
        if old.node in there and place < size:
            assert roster.members[place].node == old.node, "a survivor keeps its rank"
    survivors = {m.node for m in before.members} & there
    assert len(survivors & set(nodes(roster.members))) == min(len(survivors), size)


def racks_of(members, order):
    rack = {m.agent: m.domain for m in members}
    return [rack[agent] for agent in order]


def test_rank_0_leads_and_its_standbys_are_in_racks_and_rows_of_their_own():
    members = [member(n, domain=(f"row{n // 64}", f"rack{n // 8}")) for n in range(128)]
    order = succession_of(members)

    assert order[0] == members[0].agent
    assert sorted(order) == sorted(m.agent for m in members)
    assert len(set(racks_of(members, order[: 2 * N_STANDBYS]))) == 2 * N_STANDBYS
    assert [row for row, _rack in racks_of(members, order[:8])].count("row0") == 4


def test_where_no_rack_is_known_no_two_standbys_are_neighbours():
    members = [member(n) for n in range(128)]
    ranks = [int(agent[-4:], 16) for agent in succession_of(members)]

    assert ranks[:8] == [0, 16, 32, 48, 64, 80, 96, 112]
    assert ranks[8:16] == [8, 24, 40, 56, 72, 88, 104, 120]
    assert ranks[16:] == sorted(set(range(128)) - set(ranks[:16]))


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 17])
def test_few_members_lead_in_the_order_of_their_ranks_or_nearly_so(n):
    order = succession_of([member(number) for number in range(n)])

    assert len(order) == len(set(order)) == n
    if n <= N_STANDBYS:
        assert order == [member(number).agent for number in range(n)]


def test_the_domain_of_a_member_comes_back_and_one_of_an_older_agent_is_unknown():
    one = member(1, domain=("row", "rack"))

    assert Member.from_json(one.to_json()) == one
    assert Member.from_json(member(1).to_json()).domain == ()
