"""Comparing replicas across nodes: the leader combines the digests that nodes report; pure."""

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
from gpuops.checkpoint.agreement.write_once import KEYS_MAX
from gpuops.checkpoint.types import StateId
from gpuops.control.record import Member, Roster

_STATES_MAX = 8
_KEYS_MAX = 1024


@dataclass(slots=True)
class _Comparison:
    """The digests of one set of ranks, by state; ``is_over``: they are no longer compared.

    ``open``: the difference that was reported and has not ended.
    """

    history: ComparisonHistory = field(default_factory=ComparisonHistory)
    digests: OrderedDict[StateId, dict[int, RankDigest]] = field(default_factory=OrderedDict)
    is_over: bool = False
    n_ranks: int = 0
    n_reported: int = 0
    open: ReplicaDifference | None = None

    def restore(self, found: ReplicaDifference) -> None:
        """Take in a recorded report, maybe of another leader; a known one is skipped."""
        if found.verdict.outcome is ReplicaOutcome.APART:
            self.is_over = True
            return
        if self.history.record(
            found.state, is_different=found.verdict.outcome is not ReplicaOutcome.ALIKE
        ):
            self.open = found
            self.n_reported += 1
        self.history.last_equal = self.history.last_equal or found.last_equal
        if self.history.first_different is None:
            self.open = None


class ReplicaCheck:
    """The comparisons of one generation on the leader.

    Ranks that already differ in their first comparison are reported as training apart, and are not
    compared again: only ranks that were equal once can become wrong. Results from before this
    generation, or of another leader, are known from the commit record.
    """

    def __init__(self) -> None:
        self._comparisons: dict[str, _Comparison] = {}

    @property
    def last_equal(self) -> dict[str, StateId]:
        """Return the last states in which ranks were equal, by key; the newest few of them."""
        found = {
            key: comparison.history.last_equal
            for key, comparison in self._comparisons.items()
            if comparison.history.last_equal is not None and not comparison.is_over
        }
        newest = sorted(found, key=lambda key: found[key], reverse=True)[:NAMED_MAX]
        return {key: found[key] for key in newest}

    def restore(self, reports: Sequence[ReplicaReport], last_equal: Mapping[str, StateId]) -> None:
        """Take in the recorded *reports*, the newest last, and *last_equal*."""
        for each in reports:
            if (comparison := self._comparison(each.key)) is not None:
                comparison.restore(each.difference)
        for key, state in last_equal.items():
            if (comparison := self._comparison(key)) is not None and comparison.open is None:
                comparison.history.record(state, is_different=False)

    def observe(self, statuses: Iterable[NodeStatus], epoch: int) -> list[ReplicaReport]:
        """Take in the digests of states of *epoch*; return the new results of comparing them."""
        found = []
        groups = (group for status in statuses for group in status.group_digests)
        for group in (each for each in groups if each.state.epoch == epoch):
            comparison = self._comparison(group.key)
            if comparison is None:
                continue
            comparison.n_ranks = group.n_ranks
            by_rank = comparison.digests.setdefault(group.state, {})
            is_new = not by_rank.keys() >= group.rank_digests.keys()
            by_rank |= group.rank_digests
            while len(comparison.digests) > _STATES_MAX:
                comparison.digests.popitem(last=False)
            if is_new and len(by_rank) == group.n_ranks and not comparison.is_over:
                found += _compare(comparison, group, by_rank)
        return found

    def equal_at(self, state: StateId) -> tuple[str, ...]:
        """Return the keys of the groups of which each rank reported the same digest at *state*."""
        found = [
            key
            for key, comparison in self._comparisons.items()
            if len(comparison.digests.get(state, ())) == comparison.n_ranks
            and len(set(comparison.digests[state].values())) == 1
        ]
        return tuple(sorted(found)[:KEYS_MAX])

    def _comparison(self, key: str) -> _Comparison | None:
        """Return the comparison of *key*, None where there are too many."""
        if key not in self._comparisons and len(self._comparisons) >= _KEYS_MAX:
            return None
        return self._comparisons.setdefault(key, _Comparison())


def _compare(
    comparison: _Comparison, group: GroupDigest, by_rank: dict[int, RankDigest]
) -> list[ReplicaReport]:
    """Return the reports that follow from the digests of all ranks of one set."""
    history, state, ranks = comparison.history, group.state, tuple(sorted(by_rank))
    last_equal, differ = history.last_equal, len(set(by_rank.values())) > 1
    if last_equal is None and history.first_different is None and differ:
        comparison.is_over = True
        return [_report(group, ranks, ReplicaVerdict(ReplicaOutcome.APART, ranks))]
    if not history.record(state, is_different=differ):
        return _over(comparison, group, ranks)
    comparison.n_reported += 1
    if comparison.n_reported > REPORTS_MAX:
        return []
    verdict = compare_ranks(by_rank)
    one, n_tensors = by_rank[verdict.suspects[0]], group.n_tensors  # of a rank that may be wrong
    other = next(digest for digest in by_rank.values() if digest != one)
    verdict = adjust_for_breadth(verdict, n_differing(one, other, n_tensors), n_tensors)
    number = None
    if len(set(by_rank.values())) == 2:
        number = only_difference(one, other, n_tensors)
    found = ReplicaDifference(state=state, ranks=ranks, verdict=verdict, last_equal=last_equal)
    comparison.is_over = verdict.outcome is ReplicaOutcome.APART
    comparison.open = None if comparison.is_over else found
    return [ReplicaReport(group.key, found, number)]


def _over(
    comparison: _Comparison, group: GroupDigest, ranks: tuple[int, ...]
) -> list[ReplicaReport]:
    """Return that ranks are equal again, where a difference was reported."""
    if comparison.open is None or comparison.history.first_different is not None:
        return []
    verdict, comparison.open = (
        ReplicaVerdict(ReplicaOutcome.ALIKE, comparison.open.verdict.suspects),
        None,
    )
    return [_report(group, ranks, verdict)]


def _report(group: GroupDigest, ranks: tuple[int, ...], verdict: ReplicaVerdict) -> ReplicaReport:
    found = ReplicaDifference(state=group.state, ranks=ranks, verdict=verdict)
    return ReplicaReport(group.key, found)


class ReplicaDifferenceReporter:
    """The reports of the node of *me*.

    The node of the first suspect reports a difference, once while it lasts. The same agent also
    reports that the ranks are equal again, even if they have moved: it has the open incident.
    """

    def __init__(self, me: Member) -> None:
        self._me = me
        self._reported: set[tuple[str, StateId]] = set()
        self._open: dict[str, StateId] = {}  # by the key of the ranks: the first state that differs

    def report_new(
        self,
        report: Callable[[ReplicaReport], None],
        roster: Roster,
        found: Sequence[ReplicaReport],
        epoch: int,
    ) -> None:
        """Pass those of *found*, the newest last, that are new here to *report* of the keeper.

        Raises:
            KeeperError: It does not answer; the next call reports the rest.
        """
        for each in found:
            state, outcome = each.difference.state, each.difference.verdict.outcome
            if outcome is ReplicaOutcome.ALIKE:
                since = self._open.get(each.key)
                if since is not None and since < state:
                    report(each)
                    del self._open[each.key]
            elif state.epoch == epoch and self._must_report(each, roster):
                report(replace(each, nodes=_nodes_of(roster, each.difference)))
                self._reported.add((each.key, state))
                if outcome is not ReplicaOutcome.APART:
                    self._open[each.key] = state

    def _must_report(self, found: ReplicaReport, roster: Roster) -> bool:
        if found.key in self._open or (found.key, found.difference.state) in self._reported:
            return False
        first = roster.first_rank(roster.group_rank(self._me.agent) or 0)
        return first <= found.reporter_rank < first + self._me.n_workers


def _nodes_of(roster: Roster, found: ReplicaDifference) -> tuple[str, ...]:
    """Return the node of each suspect; () where the ranks may have run elsewhere at that time."""
    suspects = found.verdict.suspects
    is_same = found.last_equal is not None and found.last_equal.epoch == found.state.epoch
    if not is_same or len(suspects) > NAMED_MAX:
        return ()
    nodes = [member.node for member in roster.members for _ in range(member.n_workers)]
    return tuple(nodes[rank] for rank in suspects) if max(suspects) < len(nodes) else ()
