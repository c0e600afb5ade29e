"""The list of all injectors, and faults drawn from a seed.

The same seed and the same run give the same faults.
"""

from collections.abc import Sequence
from random import Random

from gpuops.drill import gpu, machine, network, processes
from gpuops.drill.fault import DrillOptions, Scenario
from gpuops.drill.find import AgentStateFile
from gpuops.errors import DrillError

SCENARIOS: tuple[Scenario, ...] = (
    processes.kill_rank,
    processes.stop_rank,
    processes.slow_rank,
    processes.kill_agent,
    processes.kill_node,
    processes.freeze_node,
    processes.preempt,
    processes.kill_board,
    processes.slow_board,
    network.cut_link,
    network.slow_link,
    machine.fill_disk,
    machine.memory_hog,
    gpu.sick_gpu,
    gpu.xid_storm,
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def needs_run(scenario: Scenario) -> bool:
    """Return whether *scenario* acts on a process of a run."""
    return "node" in scenario.options


# How long each is held, in seconds; (0, 0): it is not undone.
HOLD_RANGE_S = {
    "kill-rank": (0.0, 0.0),
    "stop-rank": (2.0, 10.0),
    "slow-rank": (5.0, 15.0),
    "kill-agent": (0.0, 0.0),
    "kill-node": (0.0, 0.0),
    "freeze-node": (2.0, 25.0),  # below and above the 15 s after which a node counts as lost
}
# Faults that a run on one node survives by itself.
RANDOM_DEFAULT = ("kill-rank", "stop-rank", "slow-rank", "freeze-node")


def draw_fault(
    rng: Random, scenarios: Sequence[str], states: Sequence[AgentStateFile]
) -> "DrawnFault":
    """Return a scenario out of *scenarios*, on one agent of *states* that has workers.

    Raises:
        DrillError: No agent has workers.
    """
    with_workers = sorted((state for state in states if state.pids), key=lambda state: state.node)
    if not with_workers:
        raise DrillError("nothing to break: no agent of the run has workers now")
    name = rng.choice(sorted(scenarios))
    state = rng.choice(with_workers)
    low, high = HOLD_RANGE_S[name]
    held_s = round(rng.uniform(low, high), 1)
    by_rank = name.endswith("-rank")
    return name, DrillOptions(
        node=state.node,
        rank=rng.choice(sorted(state.pids)) if by_rank else None,
        for_s=held_s or None,
    )


DrawnFault = tuple[str, DrillOptions]
