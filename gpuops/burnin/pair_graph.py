"""The pair tests of one sweep as a graph: who passed and who failed with whom."""

import heapq
from collections import defaultdict
from collections.abc import Iterable

from gpuops.burnin.pairs import NodePair, PairOutcome, PairTest, node_pair


class PairGraph:
    """Measured tests, by node and by pair. A test that did not measure says nothing.

    ``passed`` and ``failed`` hold, for each node of ``nodes``, the partners with which it did so at
    least once; ``tests`` the tests of each pair in their order.
    """

    def __init__(self, tests: Iterable[PairTest]) -> None:
        self.tests: dict[NodePair, list[PairTest]] = defaultdict(list)
        self.passed: dict[str, set[str]] = defaultdict(set)
        self.failed: dict[str, set[str]] = defaultdict(set)
        measured = [test for test in tests if test.outcome is not PairOutcome.UNKNOWN]
        for test in sorted(measured, key=lambda test: test.round):
            self.tests[test.nodes].append(test)
            kept = self.failed if test.outcome.is_bad else self.passed
            a, b = test.nodes
            kept[a].add(b)
            kept[b].add(a)
        self.nodes = tuple(sorted({node for pair in self.tests for node in pair}))

    def drop_failures(self, pairs: Iterable[NodePair]) -> None:
        """Forget that *pairs* failed: the cause is known, and it is neither of their nodes."""
        for a, b in pairs:
            self.failed[a].discard(b)
            self.failed[b].discard(a)

    def bad(self, pair: NodePair) -> list[PairTest]:
        """Return the tests of *pair* that failed or were slow."""
        return [test for test in self.tests[pair] if test.outcome.is_bad]

    def witnesses(self, node: str) -> set[str]:
        """Return the partners with which *node* failed and that passed with somebody else."""
        return {other for other in self.failed[node] if self.passed[other] - {node}}

    def last_outcomes(self, node: str) -> list[bool]:
        """Return whether *node* failed with each partner, in the order of the last tests."""
        last: dict[str, PairTest] = {}
        for other in self.passed[node] | self.failed[node]:
            last[other] = self.tests[node_pair(node, other)][-1]
        return [test.outcome.is_bad for test in sorted(last.values(), key=lambda t: t.round)]

    def attribute(self) -> tuple[dict[str, set[str]], list[NodePair]]:
        """Return the nodes to blame, each with its witnesses, and the failed pairs that remain.

        Greedy cover of the failed pairs: the node with the most witnesses first; of two with as
        many, the one whose witnesses failed with nobody else, then the one that passed with fewer.
        A node with fewer than two witnesses is not blamed.
        """
        blamed: dict[str, set[str]] = {}
        queue = [(self._weight(node, blamed), node) for node in self.failed]
        heapq.heapify(queue)
        while queue:
            weight, node = heapq.heappop(queue)
            if node in blamed or weight != self._weight(node, blamed):
                continue
            if -weight[0] < 2:
                break
            blamed[node] = self.witnesses(node) - blamed.keys()
            near = {other for one in self.failed[node] for other in (one, *self.failed[one])}
            for other in near - blamed.keys():
                heapq.heappush(queue, (self._weight(other, blamed), other))
        unexplained = [
            (a, b)
            for a in sorted(self.failed)
            for b in sorted(self.failed[a])
            if a < b and a not in blamed and b not in blamed
        ]
        return blamed, unexplained

    def _weight(self, node: str, blamed: dict[str, set[str]]) -> tuple[int, int, int]:
        """Return what sorts *node* among those to blame; the first to blame is the smallest."""
        partners = self.witnesses(node) - blamed.keys()
        clean = sum(not (self.failed[other] - {node} - blamed.keys()) for other in partners)
        return -len(partners), -clean, len(self.passed[node])
