"""Which state a generation loads, and where copies are placed; pure, and called by the leader.

`plan_generation` and `newest_restorable` derive the plan of a generation from the inventories of
the agents.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from gpuops.agent.checkpoint.messages import GenerationPlan, Inventory, StoredStates
from gpuops.checkpoint.agreement.recovery import (
    REASONS_MAX,
    RestoreInputs,
    RestorePlan,
    plan_restore,
)
from gpuops.checkpoint.placement.domains import DomainPath, align_paths
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement, place, rebalance
from gpuops.checkpoint.placement.survival import n_colocated
from gpuops.checkpoint.types import CheckpointError, Digest, Shard, ShardCopy, StateId, Tier
from gpuops.control.record import Member, Roster

# Newest states of the directory that are considered: the newest may have failed after a load.
STORED_CONSIDERED = 3
DIRECTORY = "the directory"


def plan_generation(
    roster: Roster,
    held: Mapping[str, Inventory],
    before: GenerationPlan | None,
    *,
    replicas: int,
    excluded_step: int | None,
) -> GenerationPlan:
    """Return the checkpoint plan that is shared by all members of *roster*.

    Args:
        roster: Members and spares.
        held: The inventories of the agents that have a keeper.
        before: The plan of the previous generation, None without one.
        replicas: The number of nodes that are to have each state, its own included.
        excluded_step: The step of the state that must not be loaded.
    """
    missing = tuple(m.node for m in roster.members if m.agent not in held)
    epochs = [-1 if before is None else before.epoch_max]
    stored_max = max((h.stored_max for h in held.values()), default=-1)
    epochs += [stored_max, *(h.epoch_max for h in held.values())]
    epochs += [one.state.epoch for h in held.values() for one in h.states]
    if before is not None and before.restore is not None:
        epochs.append(before.restore.epoch)
    plan = GenerationPlan(is_kept=not missing, missing=missing, epoch_max=max(epochs))
    if missing:
        return plan
    everybody = (*roster.members, *roster.spares)
    domains = align_paths({m.node: held[m.agent].domain for m in roster.members})
    placement = _place_replicas([m.node for m in roster.members], before, replicas, domains)
    plan = replace(
        plan,
        placement=placement,
        n_domains=len(set(domains.values())) or None,
        together=n_colocated(placement, domains),
        peers={
            m.node: (m.address, held[m.agent].port)
            for m in everybody
            if m.agent in held and held[m.agent].port
        },
    )
    if before is None:
        # Only the ranks know whether the directory has a newer state, of a former run.
        return plan
    found = newest_restorable(roster, held, None, plan.epoch_max, excluded_step)
    if found.state is None or found.state.epoch < stored_max:
        return plan  # the directory may have a newer one: the first node lists it
    return replace(plan, restore=found)


def newest_restorable(
    roster: Roster,
    held: Mapping[str, Inventory],
    stored: StoredStates | None,
    epoch_max: int,
    excluded_step: int | None,
) -> RestorePlan:
    """Return the newest state of which every shard is available, and its sources.

    *stored* are the states of the directory, None where it was not listed; *epoch_max* is the
    greatest epoch that any node reported.
    """
    considered = () if stored is None else stored.states[:STORED_CONSIDERED]
    served = [(m, held[m.agent]) for m in (*roster.members, *roster.spares) if m.agent in held]
    ranks: dict[str, tuple[int, ...]] = {m.node: () for m in roster.spares if m.agent in held}
    world = 0  # counted once: the sums of `Roster` over 4,096 members would take a second
    for member in roster.members:
        ranks[member.node] = tuple(range(world, world + member.n_workers))
        world += member.n_workers
    states = {one.state for _member, it in served for one in it.states}
    states |= {state for state, _world in considered}
    epochs = [epoch_max, -1 if stored is None else stored.epoch_max, *(s.epoch for s in states)]
    inputs = RestoreInputs(
        inventories={},
        ranks=ranks,
        excluded_steps=() if excluded_step is None else (excluded_step,),
        epoch_max=max(epochs),
    )
    why: list[str] = []
    for state in sorted(states, reverse=True):  # an older one is unpacked only where it is needed
        copies = {m.node: _loadable(m, it, state, ranks, world) for m, it in served}
        copies, persistent = _with_stored(copies, [row for row in considered if row[0] == state])
        found = plan_restore(replace(inputs, inventories=copies, persistent=persistent))
        if found.state is not None:
            return replace(found, why=(*why, *found.why)[:REASONS_MAX])
        why += found.why
    return replace(plan_restore(inputs), why=tuple(why[:REASONS_MAX]))


def _loadable(
    member: Member,
    held: Inventory,
    state: StateId,
    ranks: Mapping[str, Collection[int]],
    world: int,
) -> list[ShardCopy]:
    """Return the copies of *state* on a node that some node can load: others need its port."""
    copies = held.copies(state, member.node)
    if held.port:
        return copies
    own = {Shard(rank, world) for rank in ranks.get(member.node, ())}
    return [copy for copy in copies if copy.shard in own]


def _place_replicas(
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
            pass  # it was written by another version of gpuops
    return place(nodes, replicas, domains or None)


def _with_stored(
    copies: dict[str, list[ShardCopy]], stored: Collection[tuple[StateId, int]]
) -> tuple[dict[str, list[ShardCopy]], list[ShardCopy]]:
    """Return *copies*, and those of the states with their worlds that are *stored*.

    The digests of the directory's files are in its manifest and are verified on load. Here its copy
    counts as equal to those in memory; where these differ from each other, only it can be loaded.
    """
    if not stored:
        return copies, []
    contents: dict[tuple[StateId, Shard], set[tuple[str, Digest]]] = {}
    for copy in (copy for of_node in copies.values() for copy in of_node):
        contents.setdefault((copy.state, copy.shard), set()).add((copy.layout, copy.digest))
    persistent, inconsistent = [], set()
    for state, world in stored:
        for rank in range(world):
            shard = Shard(rank, world)
            known = contents.get((state, shard), set())
            if len(known) > 1:
                inconsistent.add((state, shard))
            layout, digest = min(known, key=str) if len(known) == 1 else ("", Digest(0, b"", ""))
            persistent.append(ShardCopy(state, shard, layout, digest, Tier.PERSISTENT, DIRECTORY))
    kept = {
        node: [copy for copy in of_node if (copy.state, copy.shard) not in inconsistent]
        for node, of_node in copies.items()
    }
    return kept, persistent
