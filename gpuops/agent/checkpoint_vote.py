"""The leader's part in comparing replicas: it puts together what the nodes say of theirs; pure."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpuops.agent.checkpoint_words import Said
from gpuops.checkpoint.states import StateId
from gpuops.checkpoint.vote import (
    TOLD_MAX,
    Ballot,
    Course,
    Difference,
    Outcome,
    Sketch,
    Verdict,
    judge,
    n_differing,
    only_difference,
    weighed,
)
from gpuops.checkpoint.vote_words import Told

_STATES_MAX = 8
_KEYS_MAX = 1024


@dataclass(slots=True)
class _Poll:
    """What ranks of one set have told, by state; ``is_over``: they are not compared any more."""

    course: Course = field(default_factory=Course)
    told: OrderedDict[StateId, dict[int, Sketch]] = field(default_factory=OrderedDict)
    is_over: bool = False
    n_told: int = 0


class Polls:
    """The comparisons of one generation, as one leader hears of them.

    Of ranks that differ when all of them are heard for the first time it is said that they train
    apart, and no more: a leader who has just begun does not know what was before.
    """

    def __init__(self) -> None:
        self._polls: dict[str, _Poll] = {}

    def hear(self, words: Iterable[Said], epoch: int) -> list[Told]:
        """Take in what all nodes say of states of *epoch*; return what was found out by that."""
        found = []
        ballots = (ballot for said in words for ballot in said.ballots)
        for ballot in (each for each in ballots if each.state.epoch == epoch):
            if ballot.key not in self._polls and len(self._polls) >= _KEYS_MAX:
                continue
            poll = self._polls.setdefault(ballot.key, _Poll())
            by_rank = poll.told.setdefault(ballot.state, {})
            is_news = not by_rank.keys() >= ballot.sketches.keys()
            by_rank |= ballot.sketches
            while len(poll.told) > _STATES_MAX:
                poll.told.popitem(last=False)
            if is_news and len(by_rank) == ballot.n_ranks and not poll.is_over:
                found += _counted(poll, ballot, by_rank)
        return found


def _counted(poll: _Poll, ballot: Ballot, by_rank: dict[int, Sketch]) -> list[Told]:
    """Return what follows from the sketches of all ranks of one set."""
    course, state, ranks = poll.course, ballot.state, tuple(sorted(by_rank))
    alike, differ = course.alike, len(set(by_rank.values())) > 1
    if alike is None and differ:
        poll.is_over = True
        apart = Verdict(Outcome.APART, ranks)
        return [Told(ballot.key, Difference(state=state, ranks=ranks, verdict=apart))]
    if not course.hear(state, differ=differ):
        return []
    poll.n_told += 1
    poll.is_over = poll.n_told >= TOLD_MAX
    verdict = judge(by_rank)
    one, other = _two_of(by_rank, verdict)
    n_tensors = ballot.n_tensors
    verdict = weighed(verdict, n_differing(one, other, n_tensors), n_tensors)
    number = None
    if len(set(by_rank.values())) == 2:
        number = only_difference(one, other, n_tensors)
    found = Difference(state=state, ranks=ranks, verdict=verdict, alike=alike)
    return [Told(ballot.key, found, number)]


def _two_of(by_rank: dict[int, Sketch], verdict: Verdict) -> tuple[Sketch, Sketch]:
    """Return the sketch of a rank that may be wrong, and another one."""
    one = by_rank[verdict.suspects[0]]
    return one, next(sketch for sketch in by_rank.values() if sketch != one)
