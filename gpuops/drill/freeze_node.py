"""Fault injector: a node stands still and later goes on, as a paused virtual machine does."""

from gpuops.drill.fault import Fault, freeze
from gpuops.drill.scenario import Scenario, Scene, Wanted, aim, node_entity, seconds
from gpuops.drill.victims import board_of, family_of

# Above the 15 s after which peers count a silent agent as dead.
FOR_S = 30.0


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: SIGSTOP to the agent and all below it.

    The agent stops first, so that it does not see its workers stop. It also thaws last (what was
    done last is undone first): the worst order for those who must not train any more.
    """
    state, agent = aim(scene, wanted, rank=wanted.rank)
    victims = [agent, *family_of(agent)]
    if wanted.store:
        victims.append(board_of(state, agent))
    for_s = FOR_S if wanted.for_s is None else wanted.for_s
    stores = " and the store of the run" if wanted.store else ""
    return Fault(
        scenario="freeze-node",
        breaks=f"All {len(victims)} processes of {agent}{stores} stand still (SIGSTOP).",
        undone=f"After {seconds(for_s)} they go on (SIGCONT), also when this command ends.",
        entities=node_entity(state),
        changes=freeze(tuple(victims)),
        for_s=for_s,
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="freeze-node",
    summary="Stop everything of the run on a node, then let it go on.",
    options=("node", "rank", "for_s", "store"),
    plan=plan,
)
