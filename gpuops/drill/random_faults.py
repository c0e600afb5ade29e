"""Faults drawn from a seed: the same seed and the same run give the same faults."""

from collections.abc import Sequence
from random import Random

from gpuops.drill.published import Published
from gpuops.drill.scenario import Wanted
from gpuops.errors import DrillError

# How long each is held, in seconds; (0, 0) for what is not undone.
HELD_S = {
    "kill-rank": (0.0, 0.0),
    "stop-rank": (2.0, 10.0),
    "slow-rank": (5.0, 15.0),
    "kill-agent": (0.0, 0.0),
    "kill-node": (0.0, 0.0),
    "freeze-node": (2.0, 25.0),  # below and above the 15 s after which a node counts as lost
}
# What a run on one node survives by itself.
DEFAULT = ("kill-rank", "stop-rank", "slow-rank", "freeze-node")


def draw(random: Random, scenarios: Sequence[str], states: Sequence[Published]) -> "Drawn":
    """Return a scenario out of *scenarios*, on one agent of *states* that has workers.

    Raises:
        DrillError: There is none.
    """
    busy = sorted((state for state in states if state.pids), key=lambda state: state.node)
    if not busy:
        raise DrillError("nothing to break: no agent of the run has workers now")
    name = random.choice(sorted(scenarios))
    state = random.choice(busy)
    low, high = HELD_S[name]
    held_s = round(random.uniform(low, high), 1)
    by_rank = name.endswith("-rank")
    return name, Wanted(
        node=state.node,
        rank=random.choice(sorted(state.pids)) if by_rank else None,
        for_s=held_s or None,
    )


Drawn = tuple[str, Wanted]
