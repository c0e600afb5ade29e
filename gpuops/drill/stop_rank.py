"""Fault injector: stop one rank (SIGSTOP), as a debugger or a frozen driver call would."""

from gpuops.drill.fault import Fault, freeze, strike
from gpuops.drill.scenario import (
    Scenario,
    Scene,
    Wanted,
    aim,
    needed_rank,
    rank_entity,
    seconds,
)
from gpuops.drill.victims import worker_of


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: the rank stands still, for good where no time is given."""
    rank = needed_rank(wanted)
    state, agent = aim(scene, wanted, rank=rank)
    victim = worker_of(state, rank, agent)
    stays = wanted.for_s is None
    return Fault(
        scenario="stop-rank",
        breaks=f"{victim} on node {state.node} stands still (SIGSTOP).",
        undone=f"Nothing undoes it; `kill -CONT {victim.pid}` would."
        if wanted.for_s is None
        else f"After {seconds(wanted.for_s)} it goes on (SIGCONT), also when this command ends.",
        entities=rank_entity(rank),
        changes=strike((victim,), "SIGSTOP") if stays else freeze((victim,)),
        for_s=wanted.for_s,
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="stop-rank",
    summary="Stop one rank (SIGSTOP); with --for it goes on again.",
    options=("node", "rank", "for_s"),
    plan=plan,
)
