"""The agents' part in comparing replicas: the leader combines what nodes report; pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuops.agent.checkpoint.messages import NodeStatus
from gpuops.checkpoint.agreement.replica_check import (
    NAMED_MAX,
    REPORTS_MAX,
    ComparisonHistory,
    GroupDigest,
    RankDigest,
    ReplicaDifference,
    ReplicaOutcome,
    ReplicaReport,
    ReplicaVerdict,
    adjust_for_breadth,
    compare_ranks,
    n_differing,
    only_difference,
)
from gpuops.checkpoint.types import StateId
from gpuops.control.record import Member, Roster

_STATES_MAX = 8
_KEYS_MAX = 1024


@dataclass(slots=True)
class _Poll:
    """What ranks of one set reported, by state; ``is_over``: they are not compared any more.

    ``open``: the difference that was reported and is not over.
    """

    course: ComparisonHistory = field(default_factory=ComparisonHistory)
    told: OrderedDict[StateId, dict[int, RankDigest]] = field(default_factory=OrderedDict)
    is_over: bool = False
    n_told: int = 0
    open: ReplicaDifference | None = None

    def know(self, found: ReplicaDifference) -> None:
        """Take in what was reported already, maybe by another leader; what is known is skipped."""
        if found.verdict.outcome is ReplicaOutcome.APART:
            self.is_over = True
            return
        if self.course.record(
            found.state, is_different=found.verdict.outcome is not ReplicaOutcome.ALIKE
        ):
            self.open = found
            self.n_told += 1
        self.course.last_equal = self.course.last_equal or found.last_equal
        if self.course.first_different is None:
            self.open = None


class ReplicaCheck:
    """The comparisons of one generation, as one leader sees them.

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
            key: poll.course.last_equal
            for key, poll in self._polls.items()
            if poll.course.last_equal is not None and not poll.is_over
        }
        newest = sorted(found, key=lambda key: found[key], reverse=True)[:NAMED_MAX]
        return {key: found[key] for key in newest}

    def know(self, reports: Sequence[ReplicaReport], alike: Mapping[str, StateId]) -> None:
        """Take in the recorded *reports*, the newest last, and *alike*."""
        for each in reports:
            if (poll := self._poll(each.key)) is not None:
                poll.know(each.difference)
        for key, state in alike.items():
            if (poll := self._poll(key)) is not None and poll.open is None:
                poll.course.record(state, is_different=False)

    def hear(self, words: Iterable[NodeStatus], epoch: int) -> list[ReplicaReport]:
        """Take in what all nodes say of states of *epoch*; return what was found out by that."""
        found = []
        ballots = (ballot for said in words for ballot in said.group_digests)
        for ballot in (each for each in ballots if each.state.epoch == epoch):
            poll = self._poll(ballot.key)
            if poll is None:
                continue
            by_rank = poll.told.setdefault(ballot.state, {})
            is_news = not by_rank.keys() >= ballot.rank_digests.keys()
            by_rank |= ballot.rank_digests
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


def _counted(
    poll: _Poll, ballot: GroupDigest, by_rank: dict[int, RankDigest]
) -> list[ReplicaReport]:
    """Return what follows from the sketches of all ranks of one set."""
    course, state, ranks = poll.course, ballot.state, tuple(sorted(by_rank))
    alike, differ = course.last_equal, len(set(by_rank.values())) > 1
    if alike is None and course.first_different is None and differ:
        poll.is_over = True
        apart = ReplicaVerdict(ReplicaOutcome.APART, ranks)
        return [
            ReplicaReport(ballot.key, ReplicaDifference(state=state, ranks=ranks, verdict=apart))
        ]
    if not course.record(state, is_different=differ):
        return _over(poll, ballot, ranks)
    poll.n_told += 1
    if poll.n_told > REPORTS_MAX:
        return []
    verdict = compare_ranks(by_rank)
    one, other = _two_of(by_rank, verdict)
    n_tensors = ballot.n_tensors
    verdict = adjust_for_breadth(verdict, n_differing(one, other, n_tensors), n_tensors)
    number = None
    if len(set(by_rank.values())) == 2:
        number = only_difference(one, other, n_tensors)
    found = ReplicaDifference(state=state, ranks=ranks, verdict=verdict, last_equal=alike)
    poll.is_over = verdict.outcome is ReplicaOutcome.APART
    poll.open = None if poll.is_over else found
    return [ReplicaReport(ballot.key, found, number)]


def _over(poll: _Poll, ballot: GroupDigest, ranks: tuple[int, ...]) -> list[ReplicaReport]:
    """Return that ranks are equal again, where a difference was reported."""
    if poll.open is None or poll.course.first_different is not None:
        return []
    verdict, poll.open = ReplicaVerdict(ReplicaOutcome.ALIKE, poll.open.verdict.suspects), None
    return [
        ReplicaReport(
            ballot.key, ReplicaDifference(state=ballot.state, ranks=ranks, verdict=verdict)
        )
    ]


def _two_of(
    by_rank: dict[int, RankDigest], verdict: ReplicaVerdict
) -> tuple[RankDigest, RankDigest]:
    """Return the sketch of a rank that may be wrong, and another one."""
    one = by_rank[verdict.suspects[0]]
    return one, next(sketch for sketch in by_rank.values() if sketch != one)


class ReplicaDifferenceReporter:
    """What the node of *me* has reported.

    The node of its first suspect reports a difference, once while it lasts. The same agent reports
    that the ranks are equal again, wherever they are by then: there its incident is open.
    """

    def __init__(self, me: Member) -> None:
        self._me = me
        self._told: set[tuple[str, StateId]] = set()
        self._open: dict[str, StateId] = {}  # since which state, by the key of the ranks

    def tell(
        self,
        report: Callable[[ReplicaReport], None],
        roster: Roster,
        found: Sequence[ReplicaReport],
        epoch: int,
    ) -> None:
        """Give *report*, of the keeper, what is new here of what was *found*, the newest last.

        Raises:
            KeeperError: It does not answer; the rest is reported when this is called again.
        """
        for told in found:
            state, outcome = told.difference.state, told.difference.verdict.outcome
            if outcome is ReplicaOutcome.ALIKE:
                since = self._open.get(told.key)
                if since is not None and since < state:
                    report(told)
                    del self._open[told.key]
            elif state.epoch == epoch and self._is_to_tell(told, roster):
                report(replace(told, nodes=_nodes_of(roster, told.difference)))
                self._told.add((told.key, state))
                if outcome is not ReplicaOutcome.APART:
                    self._open[told.key] = state

    def _is_to_tell(self, told: ReplicaReport, roster: Roster) -> bool:
        if told.key in self._open or (told.key, told.difference.state) in self._told:
            return False
        first = roster.first_rank(roster.group_rank(self._me.agent) or 0)
        return first <= told.reporter_rank < first + self._me.n_workers


def _nodes_of(roster: Roster, found: ReplicaDifference) -> tuple[str, ...]:
    """Return the node of each suspect; () where they may have been elsewhere when it came about."""
    suspects = found.verdict.suspects
    is_there = found.last_equal is not None and found.last_equal.epoch == found.state.epoch
    if not is_there or len(suspects) > NAMED_MAX:
        return ()
    nodes = [member.node for member in roster.members for _ in range(member.n_workers)]
    return tuple(nodes[rank] for rank in suspects) if max(suspects) < len(nodes) else ()
