"""What the benchmark is to measure; known without torch."""

from dataclasses import dataclass

SCHEMA = "gpuops.checkpoint-bench/1"
ROWS = ("save", "small", "recovery", "kills", "flips", "odds", "peer")
# Those that test gpuops itself, or measure others: none says anything about this machine.
SOURCE_TREE_ROWS = ("kills", "flips", "odds", "peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured; ``only`` are names of `ROWS`. Each row has one cold round more.

    ``n_beside``: steps before and after a save that it is compared with. ``is_brief``: in the
    benchmark of the source tree, ways that take long take turns at the rounds.
    """

    nbytes: int = 2 * 10**9
    n_tensors: int = 300
    small_tensors: int = 20_000
    small_tensor_bytes: int = 64
    rounds: int = 7
    step_s: float = 0.01
    n_beside: int = 30
    kills: int = 200
    kill_nbytes: int = 64 * 10**6
    kill_tensors: int = 100
    flips: int = 1000
    flip_nbytes: int = 2 * 10**6
    seed: int = 0
    only: tuple[str, ...] = ROWS
    is_brief: bool = False
