"""Fault injector: one rank is slow, because it is stopped for a part of each fifth of a second."""

from gpuops.drill.fault import Fault, Pulse
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
from gpuops.errors import UsageError

FOR_S = 60.0
SHARE = 0.5
PERIOD_S = 0.2


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: the rank runs for only a share of the time."""
    rank, share = needed_rank(wanted), SHARE if wanted.share is None else wanted.share
    if not 0 < share < 1:
        raise UsageError(f"--share {share:g}: the part of the time that it stands still, 0 to 1")
    state, agent = aim(scene, wanted, rank=rank)
    victim = worker_of(state, rank, agent)
    for_s = FOR_S if wanted.for_s is None else wanted.for_s
    return Fault(
        scenario="slow-rank",
        breaks=f"{victim} on node {state.node} stands still for {share:.0%} of the time.",
        undone=f"After {seconds(for_s)} it runs freely again, also when this command ends.",
        entities=rank_entity(rank),
        pulse=Pulse((victim,), share * PERIOD_S, (1 - share) * PERIOD_S),
        for_s=for_s,
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="slow-rank",
    summary="Slow one rank down by stopping it again and again.",
    options=("node", "rank", "for_s", "share"),
    plan=plan,
)
