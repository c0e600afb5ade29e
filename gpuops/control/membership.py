"""Who gets which seat: pure functions over those who are ready.

Survivors keep their group rank, so that their data, caches and checkpoints stay where they are; a
newcomer takes the hole of the node that it replaces.
"""

from collections.abc import Collection, Sequence

from gpuops.control.record import Member, Roster
from gpuops.incident.budget import seats_of
from gpuops.incident.decision import OnExhausted, Terms


def seats(n_ready: int, terms: Terms) -> int:
    """Return how many nodes may train when *n_ready* are there: 0 where they are too few."""
    found = seats_of(n_ready, terms)
    must_be_full = terms.on_exhausted is OnExhausted.REQUEUE
    return 0 if must_be_full and found < seats_of(terms.nodes_max, terms) else found


def form(
    generation: int,
    ready: Sequence[Member],
    before: Roster | None,
    terms: Terms,
    excluded: Collection[str] = (),
) -> Roster | None:
    """Return who sits where in *generation*, None where too few are ready.

    Args:
        generation: Its number.
        ready: Those who would take a seat, in the order in which they came.
        before: The last generation's roster: its members are seated first, at their old places.
        terms: How many nodes, and in what units.
        excluded: Nodes that get none.
    """
    there = _one_for_each_node([member for member in ready if member.node not in excluded])
    size = seats(len(there), terms)
    if size == 0:
        return None
    order = _by_wish(there) if before is None else _at_old_places(there, before, size)
    return Roster(generation=generation, members=order[:size], spares=order[size:])


def _one_for_each_node(ready: Sequence[Member]) -> list[Member]:
    """Return the newest agent of each node: an older one is dead, or will find itself replaced."""
    newest = {member.node: member for member in ready}
    return [member for member in ready if newest[member.node] is member]


def _by_wish(there: Sequence[Member]) -> tuple[Member, ...]:
    """Return *there* by the launcher's order, those without one behind, as they came."""
    wished = [member for member in there if member.order is not None]
    return (
        *sorted(wished, key=lambda member: member.order or 0),
        *(member for member in there if member.order is None),
    )


def _at_old_places(there: Sequence[Member], before: Roster, size: int) -> tuple[Member, ...]:
    old_place = {member.node: place for place, member in enumerate(before.members)}
    survivors = sorted(
        (member for member in there if member.node in old_place),
        key=lambda member: old_place[member.node],
    )
    newcomers = [member for member in _by_wish(there) if member.node not in old_place]
    placed: dict[int, Member] = {}
    moved = []
    for member in survivors:
        place = old_place[member.node]
        if place < size:
            placed[place] = member
        else:
            moved.append(member)
    rest = iter([*moved, *newcomers])
    for place in range(size):
        if place not in placed:
            placed[place] = next(rest)
    return (*(placed[place] for place in range(size)), *rest)
