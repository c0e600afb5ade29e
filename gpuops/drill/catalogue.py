"""Every injector there is: the one list."""

from gpuops.drill import (
    cut_link,
    fill_disk,
    freeze_node,
    kill_agent,
    kill_board,
    kill_node,
    kill_rank,
    memory_hog,
    preempt,
    sick_gpu,
    slow_board,
    slow_link,
    slow_rank,
    stop_rank,
    xid_storm,
)
from gpuops.drill.scenario import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    kill_rank.SCENARIO,
    stop_rank.SCENARIO,
    slow_rank.SCENARIO,
    kill_agent.SCENARIO,
    kill_node.SCENARIO,
    freeze_node.SCENARIO,
    preempt.SCENARIO,
    kill_board.SCENARIO,
    slow_board.SCENARIO,
    cut_link.SCENARIO,
    slow_link.SCENARIO,
    fill_disk.SCENARIO,
    memory_hog.SCENARIO,
    sick_gpu.SCENARIO,
    xid_storm.SCENARIO,
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def needs_run(scenario: Scenario) -> bool:
    """Say whether *scenario* is about a process of a run."""
    return "node" in scenario.options
