"""Fault injector: kill the store through which the agents of a run agree."""

from gpuops.drill.fault import Fault, strike
from gpuops.drill.scenario import Scenario, Scene, Wanted, aim, node_entity
from gpuops.drill.victims import board_of


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: SIGKILL to the process that serves the board."""
    state, agent = aim(scene, wanted, rank=wanted.rank)
    board = board_of(state, agent)
    return Fault(
        scenario="kill-board",
        breaks=f"{board} on node {state.node} gets SIGKILL.",
        undone="Nothing undoes it: without it the agents end with exit code 85.",
        entities=node_entity(state),
        changes=strike((board,)),
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="kill-board",
    summary="Kill the process that holds the agents' store.",
    options=("node", "rank"),
    plan=plan,
)
