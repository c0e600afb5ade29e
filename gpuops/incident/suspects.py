"""Nodes that somebody speaks against without ending anything: which of them a restart does without.

Such a word may be false, and a false one costs more than a slow node. So it never ends a generation
and never the run: the node goes when the run is restarted anyway, and only if it can be spared.
"""

from collections.abc import Collection

from gpuops.incident.budget import candidates, trainable_nodes
from gpuops.incident.decision import TEXT_CHARS_MAX, ClusterState, OnExhausted


def suspects_to_exclude(cluster: ClusterState, excluded: Collection[str]) -> dict[str, str]:
    """Return the doubted nodes that the next generation does without, with the reasons.

    In the order in which they came to be doubted, each as long as a spare takes its seat, or the
    run may shrink (`OnExhausted.SHRINK`) and no node but this one loses its seat. None where more
    than half of the nodes are doubted: that speaks against whoever doubts them.

    Args:
        cluster: Who there is, and who is doubted.
        excluded: The nodes that are left out already.
    """
    remaining = candidates(cluster, excluded)
    suspected = {node: why for node, why in cluster.suspected.items() if node in remaining}
    chosen: dict[str, str] = {}
    if 2 * len(suspected) > len(remaining):
        return chosen
    for node, why in suspected.items():
        if _can_be_spared(node, cluster, {*excluded, *chosen}):
            chosen[node] = f"doubted: {why}"[:TEXT_CHARS_MAX]
    return chosen


def _can_be_spared(node: str, cluster: ClusterState, excluded: Collection[str]) -> bool:
    n_now, n_without = (
        trainable_nodes(cluster, excluded),
        trainable_nodes(cluster, {*excluded, node}),
    )
    if n_without == 0:
        return False
    may_shrink = cluster.policy.on_exhausted is OnExhausted.SHRINK
    return n_without == n_now or (may_shrink and n_now - n_without == 1)
