"""Which state a generation loads, who holds whose copies, and who knows of it; pure.

The leader works it out from what the agents hold when it forms the roster.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpuops.agent.checkpoint.messages import (
    GenerationPlan,
    Inventory,
    StoredStates,
)
from gpuops.checkpoint.agreement.recovery import RestoreInputs, RestorePlan, plan_restore
from gpuops.checkpoint.placement.domains import DomainPath, align_paths
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement, place, rebalance
from gpuops.checkpoint.placement.survival import n_colocated
from gpuops.checkpoint.types import (
    CheckpointError,
    Digest,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.control.record import Roster

# Of what a directory has: more than one only where the newest failed after it was loaded.
STORED_LOOKED_AT = 3
DIRECTORY = "the directory"


def notes_for(
    roster: Roster,
    held: Mapping[str, Inventory],
    before: GenerationPlan | None,
    *,
    replicas: int,
    excluded_step: int | None,
) -> GenerationPlan:
    """Return what all members of *roster* know alike.

    Args:
        roster: Who trains, and who waits.
        held: What each agent that has a keeper holds, by agent.
        before: The notes of the generation before, None where there was none.
        replicas: How many nodes are to have each state, its own among them.
        excluded_step: The step of the state that is not to be loaded.
    """
    missing = tuple(m.node for m in roster.members if m.agent not in held)
    epochs = [-1 if before is None else before.epoch_max]
    stored_max = max((h.stored_max for h in held.values()), default=-1)
    epochs += [stored_max, *(h.epoch_max for h in held.values())]
    epochs += [copy.state.epoch for h in held.values() for copy in h.copies]
    if before is not None and before.restore is not None:
        epochs.append(before.restore.epoch)
    notes = GenerationPlan(is_kept=not missing, missing=missing, epoch_max=max(epochs))
    if missing:
        return notes
    everybody = (*roster.members, *roster.spares)
    domains = align_paths({m.node: held[m.agent].domain for m in roster.members})
    placement = _placed([m.node for m in roster.members], before, replicas, domains)
    notes = replace(
        notes,
        placement=placement,
        n_domains=len(set(domains.values())) or None,
        together=n_colocated(placement, domains),
        peers={m.node: (m.address, held[m.agent].port) for m in everybody if m.agent in held},
    )
    if before is None:
        # Whether the directory has something newer, of a former run, is known only to the ranks.
        return notes
    found = restore_of(roster, held, None, notes.epoch_max, excluded_step)
    if found.state is None or found.state.epoch < stored_max:
        return notes  # the directory may have a newer one: the first node's ranks have it looked at
    return replace(notes, restore=found)


def restore_of(
    roster: Roster,
    held: Mapping[str, Inventory],
    stored: StoredStates | None,
    epoch_max: int,
    excluded_step: int | None,
) -> RestorePlan:
    """Return the newest state of which every shard can be had, and from whom.

    *stored* is what the directory has, as far as it was listed; *epoch_max* the greatest epoch
    that any node reported.
    """
    agents = {m.agent: m.node for m in (*roster.members, *roster.spares)}
    copies = {agents[agent]: list(it.copies) for agent, it in held.items() if agent in agents}
    ranks: dict[str, tuple[int, ...]] = {m.node: () for m in roster.spares if m.agent in held}
    for position, member in enumerate(roster.members):
        first = roster.first_rank(position)
        ranks[member.node] = tuple(range(first, first + member.n_workers))
    copies, persistent = _with_stored(copies, stored)
    return plan_restore(
        RestoreInputs(
            inventories=copies,
            ranks=ranks,
            persistent=persistent,
            excluded_steps=() if excluded_step is None else (excluded_step,),
            epoch_max=max(epoch_max, -1 if stored is None else stored.epoch_max),
        )
    )


def _placed(
    nodes: list[str],
    before: GenerationPlan | None,
    replicas: int,
    domains: Mapping[str, DomainPath],
) -> ReplicaPlacement:
    old = None if before is None else before.placement
    if old is not None and old.requested_replicas == replicas:
        try:
            return rebalance(old, nodes, domains or None)
        except CheckpointError:
            pass  # another program wrote it, and it need not be one of ours
    return place(nodes, replicas, domains or None)


def _with_stored(
    copies: Mapping[str, list[ShardCopy]], stored: StoredStates | None
) -> tuple[dict[str, list[ShardCopy]], list[ShardCopy]]:
    """Return *copies*, and the directory's of the newest states it has whole.

    Which bytes the directory has is in its manifest and compared by who loads them. Here its copy
    counts as equal to those in memory; where these differ among themselves, only it can be loaded.
    """
    newest = () if stored is None else stored.states[:STORED_LOOKED_AT]
    contents: dict[tuple[StateId, Shard], set[tuple[str, Digest]]] = {}
    for copy in _all(copies.values()):
        contents.setdefault((copy.state, copy.shard), set()).add((copy.layout, copy.digest))
    persistent, in_doubt = [], set()
    for state, world in newest:
        for rank in range(world):
            shard = Shard(rank, world)
            known = contents.get((state, shard), set())
            if len(known) > 1:
                in_doubt.add((state, shard))
            layout, digest = min(known, key=str) if len(known) == 1 else ("", Digest(0, b"", ""))
            persistent.append(ShardCopy(state, shard, layout, digest, Tier.PERSISTENT, DIRECTORY))
    kept = {
        node: [copy for copy in of_node if (copy.state, copy.shard) not in in_doubt]
        for node, of_node in copies.items()
    }
    return kept, persistent


def _all(lists: Iterable[list[ShardCopy]]) -> Iterable[ShardCopy]:
    return (copy for of_node in lists for copy in of_node)
