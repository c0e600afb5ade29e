"""How far the keeper of one node is, for whoever decides for all nodes."""

from gpuops.checkpoint.agreement.progress import COMPLETE_MAX, REFUSED_MAX, KeeperProgress
from gpuops.checkpoint.keeper.replica_checker import ReplicaChecker
from gpuops.checkpoint.memory.node_memory import NodeMemory
from gpuops.checkpoint.peers.service import PeerService
from gpuops.checkpoint.storage.persister import Persister


def keeper_progress(
    memory: NodeMemory, persister: Persister, peers: PeerService, replica_checker: ReplicaChecker
) -> KeeperProgress:
    """Return what *memory*, disk and peers have of this node's states, the newest first."""
    table = memory.buffer_table
    complete = tuple(memory.complete_states()[:COMPLETE_MAX])
    refused = sorted(set(table.rejected) - set(complete), reverse=True)
    return KeeperProgress(
        whole=complete,
        replicated=tuple(state for state in complete if peers.pusher.is_replicated(state)),
        refused=tuple(refused[:REFUSED_MAX]),
        newest=table.last_committed,
        persisted=persister.last_persisted,
        parts=tuple(persister.written_states),
        in_flight=table.in_flight,
        decided=table.decided,
        final_state=table.final,
        is_due=persister.is_due,
        group_digests=replica_checker.group_digests,
    )
