"""Nodes that somebody speaks against without ending anything: which of them a restart does without.

Such a word may be false, and a false one costs more than a slow node. So it never ends a generation
and never the run: the node goes when the run is restarted anyway, and only if it can be spared.
"""

from collections.abc import Collection

from gpuops.incident.budget import candidates, seats
from gpuops.incident.decision import TEXT_CHARS_MAX, Cluster, OnExhausted


def to_leave_out(cluster: Cluster, gone: Collection[str]) -> dict[str, str]:
    """Return the doubted nodes that the next generation does without, with the reasons.

    In the order in which they came to be doubted, each as long as a spare takes its seat, or the
    run may shrink (`OnExhausted.SHRINK`) and no node but this one loses its seat. None where more
    than half of the nodes are doubted: that speaks against whoever doubts them.

    Args:
        cluster: Who there is, and who is doubted.
        gone: The nodes that are left out already.
    """
    there = candidates(cluster, gone)
    doubted = {node: why for node, why in cluster.doubted.items() if node in there}
    found: dict[str, str] = {}
    if 2 * len(doubted) > len(there):
        return found
    for node, why in doubted.items():
        if _can_be_spared(node, cluster, {*gone, *found}):
            found[node] = f"doubted: {why}"[:TEXT_CHARS_MAX]
    return found


def _can_be_spared(node: str, cluster: Cluster, gone: Collection[str]) -> bool:
    before, after = seats(cluster, gone), seats(cluster, {*gone, node})
    if after == 0:
        return False
    may_shrink = cluster.terms.on_exhausted is OnExhausted.SHRINK
    return after == before or (may_shrink and before - after == 1)
