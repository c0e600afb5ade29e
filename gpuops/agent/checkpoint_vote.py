"""The leader's part in comparing replicas: it puts together what the nodes say of theirs; pure."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuops.agent.checkpoint_words import Said
from gpuops.checkpoint.states import StateId
from gpuops.checkpoint.vote import (
    NAMED_MAX,
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
    """What ranks of one set have told, by state; ``is_over``: they are not compared any more.

    ``open``: the difference that was told of and is not over.
    """

    course: Course = field(default_factory=Course)
    told: OrderedDict[StateId, dict[int, Sketch]] = field(default_factory=OrderedDict)
    is_over: bool = False
    n_told: int = 0
    open: Difference | None = None

    def know(self, found: Difference) -> None:
        """Take in what was told of already, maybe by another leader; what is known is no news."""
        if found.verdict.outcome is Outcome.APART:
            self.is_over = True
            return
        if self.course.hear(found.state, differ=found.verdict.outcome is not Outcome.ALIKE):
            self.open = found
            self.n_told += 1
        self.course.alike = self.course.alike or found.alike
        if self.course.differs is None:
            self.open = None


class Polls:
    """The comparisons of one generation, as one leader hears of them.

    Of ranks that differ when all of them are heard for the first time it is said that they train
    apart, and no more: only what was equal once can become wrong. What was before this generation,
    or under another leader, is known as far as it was written down.
    """

    def __init__(self) -> None:
        self._polls: dict[str, _Poll] = {}

    @property
    def alike(self) -> dict[str, StateId]:
        """Return the last states in which ranks were equal, by key; the newest few of them."""
        found = {
            key: poll.course.alike
            for key, poll in self._polls.items()
            if poll.course.alike is not None and not poll.is_over
        }
        newest = sorted(found, key=lambda key: found[key], reverse=True)[:NAMED_MAX]
        return {key: found[key] for key in newest}

    def know(self, told: Sequence[Told], alike: Mapping[str, StateId]) -> None:
        """Take in what is written down: what was *told*, the newest last, and `alike`."""
        for each in told:
            if (poll := self._poll(each.key)) is not None:
                poll.know(each.difference)
        for key, state in alike.items():
            if (poll := self._poll(key)) is not None and poll.open is None:
                poll.course.hear(state, differ=False)

    def hear(self, words: Iterable[Said], epoch: int) -> list[Told]:
        """Take in what all nodes say of states of *epoch*; return what was found out by that."""
        found = []
        ballots = (ballot for said in words for ballot in said.ballots)
        for ballot in (each for each in ballots if each.state.epoch == epoch):
            poll = self._poll(ballot.key)
            if poll is None:
                continue
            by_rank = poll.told.setdefault(ballot.state, {})
            is_news = not by_rank.keys() >= ballot.sketches.keys()
            by_rank |= ballot.sketches
            while len(poll.told) > _STATES_MAX:
                poll.told.popitem(last=False)
            if is_news and len(by_rank) == ballot.n_ranks and not poll.is_over:
                found += _counted(poll, ballot, by_rank)
        return found

    def _poll(self, key: str) -> _Poll | None:
        """Return the poll of *key*, None where there are too many."""
        if key not in self._polls and len(self._polls) >= _KEYS_MAX:
            return None
        return self._polls.setdefault(key, _Poll())


def _counted(poll: _Poll, ballot: Ballot, by_rank: dict[int, Sketch]) -> list[Told]:
    """Return what follows from the sketches of all ranks of one set."""
    course, state, ranks = poll.course, ballot.state, tuple(sorted(by_rank))
    alike, differ = course.alike, len(set(by_rank.values())) > 1
    if alike is None and course.differs is None and differ:
        poll.is_over = True
        apart = Verdict(Outcome.APART, ranks)
        return [Told(ballot.key, Difference(state=state, ranks=ranks, verdict=apart))]
    if not course.hear(state, differ=differ):
        return _over(poll, ballot, ranks)
    poll.n_told += 1
    if poll.n_told > TOLD_MAX:
        return []
    verdict = judge(by_rank)
    one, other = _two_of(by_rank, verdict)
    n_tensors = ballot.n_tensors
    verdict = weighed(verdict, n_differing(one, other, n_tensors), n_tensors)
    number = None
    if len(set(by_rank.values())) == 2:
        number = only_difference(one, other, n_tensors)
    found = Difference(state=state, ranks=ranks, verdict=verdict, alike=alike)
    poll.is_over = verdict.outcome is Outcome.APART
    poll.open = None if poll.is_over else found
    return [Told(ballot.key, found, number)]


def _over(poll: _Poll, ballot: Ballot, ranks: tuple[int, ...]) -> list[Told]:
    """Return that ranks are equal again, where it was told that they were not."""
    if poll.open is None or poll.course.differs is not None:
        return []
    verdict, poll.open = Verdict(Outcome.ALIKE, poll.open.verdict.suspects), None
    return [Told(ballot.key, Difference(state=ballot.state, ranks=ranks, verdict=verdict))]


def _two_of(by_rank: dict[int, Sketch], verdict: Verdict) -> tuple[Sketch, Sketch]:
    """Return the sketch of a rank that may be wrong, and another one."""
    one = by_rank[verdict.suspects[0]]
    return one, next(sketch for sketch in by_rank.values() if sketch != one)
