"""What is measured: the rows of ``gpuops ckpt bench``, and more that are of no use to a machine."""

from dataclasses import dataclass

from gpuops.worker.bench.savers import ROWS as OWN_ROWS
from gpuops.worker.bench.savers import BenchPlan

ROWS = (*OWN_ROWS, "kills", "flips", "odds", "peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBenchPlan(BenchPlan):
    """The plan of the measurements; ``is_brief``: long ways alternate between rounds."""

    kills: int = 200
    kill_nbytes: int = 64 * 10**6
    kill_tensors: int = 100
    flips: int = 1000
    flip_nbytes: int = 2 * 10**6
    seed: int = 0
    only: tuple[str, ...] = ROWS
    is_brief: bool = False
