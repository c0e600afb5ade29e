"""Algorithm and bus bandwidth of a collective, as nccl-tests computes them.

Source: nccl-tests, ``doc/PERFORMANCE.md``: the bus bandwidth is what the slowest link must carry,
whatever the number of ranks, and can be held against the hardware's peak.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

_FACTORS: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda n: 2 * (n - 1) / n,
        "all_gather": lambda n: (n - 1) / n,
        "reduce_scatter": lambda n: (n - 1) / n,
        "all_to_all": lambda n: (n - 1) / n,
        "broadcast": lambda _n: 1.0,
        "send_recv": lambda _n: 1.0,
    }
)
COLLECTIVES = tuple(_FACTORS)


def algbw_gbs(size_bytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth in GB/s (1e9 bytes).

    *size_bytes*: the buffer of one rank; of `all_gather`, `reduce_scatter` and `all_to_all` the
    buffers of all ranks together.
    """
    return size_bytes / seconds / 1e9


def busbw_gbs(collective: str, n_ranks: int, size_bytes: int, seconds: float) -> float:
    """Return the bus bandwidth in GB/s of *collective*, one of `COLLECTIVES`; see `algbw_gbs`."""
    return algbw_gbs(size_bytes, seconds) * _FACTORS[collective](n_ranks)


def size_text(size_bytes: int) -> str:
    """Return *size_bytes* as parameters and floors name it: ``8B``, ``16MiB``, ``8GiB``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"
