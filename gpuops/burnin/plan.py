"""Which tests a burn-in runs, and for how many seconds each. Pure.

A tier is a time and a list of tests, each with its share of it (gpuops judgement: products and
patterns find most, so that they get most). The time of a process start is not in it.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpuops.checks.core.suite import unknown_name
from gpuops.errors import UsageError
from gpuops.hostlist import compress

TEST_S_MIN = 0.2
# Programs of others that the test ``tools`` runs, and the test that is DCGM's.
TOOLS = ("all_reduce_perf", "nvbandwidth", "fio", "ib_write_bw")
DIAGNOSTIC = "dcgm"


@dataclass(frozen=True, slots=True, kw_only=True)
class BurninTest:
    """One test: its ``name`` is that of its program in `gpuops.worker.burnin`.

    ``on_parts``: one process for each GPU, or group of processors, all at once; else one for the
    node. ``together``: these are the ranks of one group. ``seconds``: how long it measures.
    """

    name: str
    about: str
    on_parts: bool = True
    together: bool = False
    seconds: float = 0.0

    @property
    def check(self) -> str:
        """Return the name of its findings; checks have names without a slash."""
        return f"burnin/{self.name}"


_ALL = (
    BurninTest(name="gemm", about="matrix products: rate, and the same bits"),
    BurninTest(name="hbm", about="memory bandwidth: copy and triad"),
    BurninTest(
        name="links",
        about="copies between the host, its NUMA nodes and GPUs; kernel launches",
        on_parts=False,
    ),
    BurninTest(
        name="collectives",
        about="collectives between the parts: bus bandwidth, and what each rank received",
        together=True,
    ),
    BurninTest(
        name="host",
        about="processors: memory, integers and floating point, one core and all",
        on_parts=False,
    ),
    BurninTest(
        name="patterns",
        about="memory keeps what is written: addresses, complements, moving inversions",
    ),
    BurninTest(name="soak", about="products under load: rate, clocks, heat"),
    BurninTest(
        name="disk",
        about="a file on each local disk: direct I/O and fsync, read back",
        on_parts=False,
    ),
    BurninTest(
        name="tools",
        about="nccl-tests, nvbandwidth, fio and ib_write_bw, where installed",
        on_parts=False,
    ),
    BurninTest(name=DIAGNOSTIC, about="NVIDIA's own diagnostic, level 3", on_parts=False),
)
TESTS: Mapping[str, BurninTest] = MappingProxyType({test.name: test for test in _ALL})
# Names that users may know of, with what to say.
_LATER = MappingProxyType(
    {"golden": "the kernels with exact answers come with the corruption checks of a later release"}
)
_TEN = {"gemm": 4, "hbm": 2, "links": 1, "collectives": 2, "host": 1}
_THIRTY = {**_TEN, "patterns": 6, "soak": 5, "disk": 2, "tools": 2}
TIERS: Mapping[str, tuple[float, Mapping[str, float]]] = MappingProxyType(
    {
        "10m": (600.0, _TEN),
        "30m": (1800.0, _THIRTY),
        "60m": (3600.0, {**_THIRTY, "patterns": 12, "soak": 12, "disk": 3, DIAGNOSTIC: 12}),
    }
)


def make_tests(
    tier: str,
    only: Sequence[str] = (),
    duration_s: float | None = None,
    absent: Collection[str] = (),
) -> tuple[BurninTest, ...]:
    """Return the tests of *tier* with their seconds; of all tests those in *only*, if given.

    *duration_s*: the seconds of all tests together; default: the tier's. *absent*: tests of the
    tier that need what this node does not have.

    Raises:
        UsageError: There is no such test.
    """
    total_s, shares = TIERS[tier]
    for name in only:
        _check_name(name)
    wanted = only or shares.keys() - set(absent)
    chosen = [test for test in _ALL if test.name in wanted]
    weights = {test.name: shares.get(test.name, 1.0) for test in chosen}
    a_share_s = (duration_s or total_s) / sum(weights.values())
    return tuple(
        replace(test, seconds=max(weights[test.name] * a_share_s, TEST_S_MIN)) for test in chosen
    )


def _check_name(name: str) -> None:
    if name in _LATER:
        raise UsageError(f"--only {name}: {_LATER[name]}")
    if name not in TESTS:
        raise UsageError(f"--only: {unknown_name('test', name, TESTS)}")


def split_cpus(cpus: Sequence[int], groups_max: int = 8) -> tuple[tuple[int, ...], ...]:
    """Return *cpus* in at most *groups_max* groups of nearly the same size, in order.

    Eight as on most GPU nodes: the judge compares one with the others.
    """
    count = min(groups_max, len(cpus))
    size, more = divmod(len(cpus), count)
    ends = [size * number + min(number, more) for number in range(count + 1)]
    return tuple(tuple(cpus[start:end]) for start, end in itertools.pairwise(ends))


def cpus_text(cpus: Sequence[int]) -> str:
    """Return *cpus* as ``0-3,8``, the list format of cpuset(7)."""
    return compress(map(str, cpus)).strip("[]")
