"""Fault injector: take the node away as Slurm does: a signal to the agent, and time to end."""

from gpuops.drill.fault import Fault, strike
from gpuops.drill.scenario import Scenario, Scene, Wanted, aim, node_entity
from gpuops.errors import UsageError

# What `--signal=USR1@120` sends ahead of the end, and what scancel and preemption send.
SIGNALS = ("SIGUSR1", "SIGTERM")


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: SIGUSR1 or SIGTERM to the agent."""
    name = wanted.signal or SIGNALS[0]
    if name not in SIGNALS:
        raise UsageError(f"--signal {name}: Slurm announces the end by {' or '.join(SIGNALS)}")
    state, agent = aim(scene, wanted, rank=wanted.rank)
    return Fault(
        scenario="preempt",
        breaks=f"{agent} gets {name}, as from Slurm: the run saves what it can and ends.",
        undone="Nothing undoes it; submit the job again.",
        entities=node_entity(state),
        changes=strike((agent,), name),
        run_id=state.run_id,
        generation=state.generation,
    )


SCENARIO = Scenario(
    name="preempt",
    summary="Announce the end of the job as Slurm does.",
    options=("node", "rank", "signal"),
    plan=plan,
)
