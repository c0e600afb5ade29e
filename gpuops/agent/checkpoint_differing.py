"""One node's part in telling of ranks of several nodes that differ: what of it is told here."""

from collections.abc import Sequence
from dataclasses import replace

from gpuops.agent.checkpoint_tie import PeerTie
from gpuops.checkpoint.states import StateId
from gpuops.checkpoint.vote import NAMED_MAX, Difference, Outcome
from gpuops.checkpoint.vote_words import Told
from gpuops.control.record import Member, Roster


class Differing:
    """What the node of *me* has told of.

    A difference is told where the first of its suspects is, once while it lasts. That the ranks are
    equal again is told by who told of it, wherever they are by then: there its incident is open.
    """

    def __init__(self, me: Member) -> None:
        self._me = me
        self._told: set[tuple[str, StateId]] = set()
        self._open: dict[str, StateId] = {}  # since which state, by the key of the ranks

    def tell(self, tie: PeerTie, roster: Roster, found: Sequence[Told], epoch: int) -> None:
        """Have the keeper tell what is new here of what was *found*, the newest last.

        Raises:
            KeeperError: It does not answer; the rest is told when this is called again.
        """
        for told in found:
            state, outcome = told.difference.state, told.difference.verdict.outcome
            if outcome is Outcome.ALIKE:
                since = self._open.get(told.key)
                if since is not None and since < state:
                    tie.differ(told)
                    del self._open[told.key]
            elif state.epoch == epoch and self._is_to_tell(told, roster):
                tie.differ(replace(told, nodes=_nodes_of(roster, told.difference)))
                self._told.add((told.key, state))
                if outcome is not Outcome.APART:
                    self._open[told.key] = state

    def _is_to_tell(self, told: Told, roster: Roster) -> bool:
        if told.key in self._open or (told.key, told.difference.state) in self._told:
            return False
        first = roster.first_rank(roster.group_rank(self._me.agent) or 0)
        return first <= told.teller < first + self._me.n_workers


def _nodes_of(roster: Roster, found: Difference) -> tuple[str, ...]:
    """Return the node of each suspect; () where they may have been elsewhere when it came about."""
    suspects = found.verdict.suspects
    is_there = found.alike is not None and found.alike.epoch == found.state.epoch
    if not is_there or len(suspects) > NAMED_MAX:
        return ()
    nodes = [member.node for member in roster.members for _ in range(member.n_workers)]
    return tuple(nodes[rank] for rank in suspects) if max(suspects) < len(nodes) else ()
