"""Fault injector: the store of the run answers late, up to two seconds each time."""

from gpuops.drill.fault import Fault, Pulse
from gpuops.drill.scenario import Scenario, Scene, Wanted, aim, node_entity, seconds
from gpuops.drill.victims import board_of
from gpuops.errors import UsageError

FOR_S = 60.0
DELAY_MS = 2000.0
# Long enough for what has queued up meanwhile, short beside the delay.
RUNNING_S = 0.1


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: the store's process is stopped again and again."""
    delay_ms = DELAY_MS if wanted.delay_ms is None else wanted.delay_ms
    if delay_ms <= 0:
        raise UsageError(f"--delay {delay_ms:g}: more than 0 ms")
    state, agent = aim(scene, wanted, rank=wanted.rank)
    board = board_of(state, agent)
    for_s = FOR_S if wanted.for_s is None else wanted.for_s
    return Fault(
        scenario="slow-board",
        breaks=f"{board} on node {state.node} answers up to {delay_ms:g} ms late.",
        undone=f"After {seconds(for_s)} it runs freely again, also when this command ends.",
        entities=node_entity(state),
        pulse=Pulse((board,), delay_ms / 1000, RUNNING_S),
        for_s=for_s,
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="slow-board",
    summary="Let the agents' store answer two seconds late.",
    options=("node", "rank", "for_s", "delay_ms"),
    plan=plan,
)
