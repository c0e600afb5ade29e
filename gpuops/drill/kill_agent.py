"""Fault injector: kill the agent of a node and leave its workers, as the OOM killer might."""

from gpuops.drill.fault import Fault, strike
from gpuops.drill.scenario import Scenario, Scene, Wanted, aim, node_entity


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: SIGKILL to the agent alone."""
    state, agent = aim(scene, wanted, rank=wanted.rank)
    return Fault(
        scenario="kill-agent",
        breaks=f"{agent} gets SIGKILL. Its workers die with it.",
        undone="Nothing undoes it; start `gpuops run` on this node again.",
        entities=node_entity(state),
        changes=strike((agent,)),
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="kill-agent",
    summary="Kill the agent of a node, not its workers.",
    options=("node", "rank"),
    plan=plan,
)
