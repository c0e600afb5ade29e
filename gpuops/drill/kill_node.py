"""Fault injector: a node is lost, as far as the run can see: all its processes die at once."""

from contextlib import suppress

from gpuops.drill.fault import Fault, strike
from gpuops.drill.scenario import Scenario, Scene, Wanted, aim, node_entity
from gpuops.drill.victims import board_of, family_of
from gpuops.errors import DrillError


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: SIGKILL to the agent, to all below it, and to the store of the run here."""
    state, agent = aim(scene, wanted, rank=wanted.rank)
    victims = [agent, *family_of(agent)]
    with suppress(DrillError):
        victims.append(board_of(state, agent))
    stores = "; the store of the run is among them" if victims[-1].what.startswith("the s") else ""
    return Fault(
        scenario="kill-node",
        breaks=f"All {len(victims)} processes of {agent} get SIGKILL{stores}.",
        undone="Nothing undoes it; start `gpuops run` on this node again.",
        entities=node_entity(state),
        changes=strike(tuple(victims)),
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="kill-node",
    summary="Kill everything of the run on a node at once.",
    options=("node", "rank"),
    plan=plan,
)
