"""Floors that are learned from a fleet's own results, and what a result below one means.

A floor is the 2 % quantile of what nodes measured that passed, for one machine shape, test,
parameters, driver and NCCL; for latencies everything is mirrored. The quantile is Hyndman and Fan's
definition 8 (The American Statistician 50, 1996, p. 361), which they recommend: its median is
nearly right whatever the distribution. For 2 % and a few results it is their minimum.

A result below its floor is a note: one in fifty healthy results is. Below the median by
`FAIL_SHARE`, or by `FAIL_SPREADS` times the distance from median to floor if that is more, it
fails; but only after three repeats, and only if the quantile is known: of `WILKS_RESULTS`
independent results the minimum is below the 2 % quantile with 95 % confidence, as
1 - 0.98 ** 149 > 0.95 (Wilks, Determination of Sample Sizes for Setting Tolerance Limits, Annals of
Mathematical Statistics 12, 1941, p. 91). Results of one part on several days are not independent:
parts are counted. 12 % and the factor 3 are judgement; `tests/unit/burnin/test_baseline.py`
simulates how many healthy nodes they fail, and says for which distributions.
"""

import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from gpuops.units import iso_utc

if TYPE_CHECKING:  # the store's own library is not needed to judge
    from gpuops.store.queries.burnin_queries import MeasurementRow

NODES_MIN = 8
RESULTS_MIN = 20
QUANTILE = 0.02
WILKS_RESULTS = 149
FAIL_SHARE = 0.12
FAIL_SPREADS = 3.0
FAIL_REPEATS = 3
SIMILARITY_MIN = 0.95
MOVED_PERCENT = 2.0
LEARNED = "learned:"


class FloorStatus(StrEnum):
    """How a result compares with its floor."""

    MET = "met"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least that a healthy part measures, in ``unit``; for a latency the most.

    Its fields are the keys of a ``[[floor]]``. ``driver`` and ``nccl``: the versions that it holds
    for, "" for any. It was learned from ``results`` of ``parts`` of ``nodes``, with this
    ``median``; None: ``source`` is quoted.
    """

    test: str
    parameters: str = ""
    driver: str = ""
    nccl: str = ""
    unit: str
    source: str
    value: float
    median: float | None = None
    higher_is_better: bool = True
    results: int = 0
    parts: int = 0
    nodes: int = 0

    @property
    def may_fail(self) -> bool:
        return self.median is not None and self.parts >= WILKS_RESULTS

    @property
    def fail_bound(self) -> float | None:
        """Return the value beyond which a result is no healthy one's, in ``unit``."""
        if self.median is None:
            return None
        margin = max(FAIL_SHARE * self.median, FAIL_SPREADS * abs(self.median - self.value))
        return self.median - margin if self.higher_is_better else self.median + margin

    def covers(self, test: str, parameters: str, unit: str) -> bool:
        """Return whether a measurement with *parameters* has those of this floor, and its unit."""
        has_all = {*parameters.split()}.issuperset(self.parameters.split())
        return has_all and (self.test, self.unit) == (test, unit)

    def judge(self, repeats: Sequence[float]) -> FloorStatus:
        """Return how the results of *repeats* of the test, in ``unit``, compare; one at least.

        A floor that was not learned only warns.
        """
        found, bound = statistics.median(repeats), self.fail_bound
        if not self._is_beyond(found, self.value):
            return FloorStatus.MET
        if bound is not None and not self._is_beyond(found, bound):
            return FloorStatus.NOTE
        below = sum(self._is_beyond(result, self.value) for result in repeats)
        is_sure = self.may_fail and below >= FAIL_REPEATS
        return FloorStatus.FAIL if is_sure else FloorStatus.WARN

    def _is_beyond(self, result: float, limit: float) -> bool:
        return result < limit if self.higher_is_better else result > limit


def floors_in_force(floors: Iterable[Floor], *, driver: str, nccl: str) -> tuple[Floor, ...]:
    """Return those of *floors* that hold for this software, for each test the most specific one."""
    fitting = [x for x in floors if x.driver in {driver, ""} and x.nccl in {nccl, ""}]
    fitting.sort(key=lambda floor: bool(floor.driver) + bool(floor.nccl))
    return tuple({_series(floor): floor for floor in fitting}.values())


def find_floor(floors: Iterable[Floor], *, test: str, parameters: str, unit: str) -> Floor | None:
    """Return the floor for a measurement: of several the one that names the most parameters."""
    fitting = [floor for floor in floors if floor.covers(test, parameters, unit)]
    return max(fitting, key=lambda floor: len(floor.parameters.split()), default=None)


class Distribution:
    """The values of a sample, sorted."""

    def __init__(self, values: Iterable[float]) -> None:
        self.ordered = sorted(values)
        self._sums = [0.0, *accumulate(self.ordered)]

    @property
    def median(self) -> float:
        return statistics.median(self.ordered)

    def quantile(self, share: float) -> float:
        """Return the quantile of *share* by definition 8 of Hyndman and Fan (1996)."""
        size = len(self.ordered)
        place = min(max((size + 1 / 3) * share + 1 / 3, 1.0), float(size))
        low = int(place)
        first, second = self.ordered[low - 1], self.ordered[min(low, size - 1)]
        return first + (place - low) * (second - first)

    def similarity(self, values: Iterable[float]) -> float:
        """Return how alike *values* are to this sample: 1 for the same distribution, 0 the least.

        It is 1 less the area between the two empirical distribution functions, as a share of this
        sample's median. That area, and 0.95 as the bound, are from SuperBench's Validator
        (USENIX ATC 2024, arXiv 2402.06194); to divide by the median is ours: so a node that is 5 %
        slower in all it measures has 0.95.
        """
        found = sorted(values)
        size, step, area = len(self.ordered), len(self.ordered) / len(found), 0.0
        for number, value in enumerate(found):
            # The n-th of m values is compared with the n-th m-th of the sample.
            low, high = number * step, min((number + 1) * step, size)
            middle = min(max(bisect_left(self.ordered, value), low), high)
            area += value * (2 * middle - low - high)
            area += self._sum(low) + self._sum(high) - 2 * self._sum(middle)
        return min(max(1 - area / size / abs(self.median), 0.0), 1.0)

    def _sum(self, place: float) -> float:
        """Return the sum of the first *place* values; of the last of them a part, perhaps."""
        whole = int(place)
        rest = place - whole
        return self._sums[whole] + (rest * self.ordered[whole] if rest else 0.0)


class Cell(NamedTuple):
    """What results must have in common to be compared."""

    shape: str
    test: str
    parameters: str
    driver: str
    nccl: str
    unit: str
    higher_is_better: bool

    def __str__(self) -> str:
        text = f"{self.shape}: {self.test} {self.parameters}".rstrip()
        return text + f", driver {self.driver}" * bool(self.driver)


@dataclass(slots=True)
class _Sample:
    by_node: dict[str, "array[float]"] = field(default_factory=dict)
    parts: set[tuple[str, str]] = field(default_factory=set)
    first_us: int = 2**63
    last_us: int = 0

    @property
    def results(self) -> int:
        return sum(map(len, self.by_node.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The floors of each shape; ``remarks``: nodes unlike their fleet, and too few results.

    ``last_us``: when the newest result was measured, 0 without any.
    """

    floors: Mapping[str, tuple[Floor, ...]]
    remarks: tuple[str, ...]
    last_us: int


def learn(
    results: "Iterable[MeasurementRow]",
    *,
    nodes_min: int = NODES_MIN,
    results_min: int = RESULTS_MIN,
) -> Learned:
    """Return the floors of each cell with enough *results*, in any order, of enough nodes."""
    samples: dict[Cell, _Sample] = {}
    for item in results:
        if item.value is not None:
            sample = samples.setdefault(_cell_of(item), _Sample())
            sample.by_node.setdefault(item.node, array("d")).append(item.value)
            sample.parts.add((item.node, item.part_id))
            sample.first_us = min(sample.first_us, item.t_us)
            sample.last_us = max(sample.last_us, item.t_us)
    floors: dict[str, tuple[Floor, ...]] = {}
    remarks: list[str] = []
    for cell, sample in sorted(samples.items()):
        if len(sample.by_node) < nodes_min or sample.results < results_min:
            few = f"{sample.results} results of {len(sample.by_node)} nodes passed"
            remarks.append(f"no floor for {cell}: {few}")
            continue
        fleet = Distribution(value for values in sample.by_node.values() for value in values)
        floors[cell.shape] = (*floors.get(cell.shape, ()), _floor(cell, sample, fleet))
        remarks += _unlike_nodes(cell, sample, fleet)
    last_us = max((sample.last_us for sample in samples.values()), default=0)
    return Learned(floors=floors, remarks=tuple(remarks), last_us=last_us)


def _cell_of(item: "MeasurementRow") -> Cell:
    return Cell(
        item.shape,
        item.test,
        item.parameters,
        item.software.get("driver", ""),
        item.software.get("nccl", ""),
        item.unit,
        item.higher_is_better,
    )


def _floor(cell: Cell, sample: _Sample, fleet: Distribution) -> Floor:
    days = f"{iso_utc(sample.first_us)[:10]} to {iso_utc(sample.last_us)[:10]}"
    software = [("driver", cell.driver), ("NCCL", cell.nccl)]
    versions = [f"{name} {version}" for name, version in software if version]
    about = cell._asdict()
    del about["shape"]
    return Floor(
        **about,
        value=fleet.quantile(QUANTILE if cell.higher_is_better else 1 - QUANTILE),
        source=", ".join([f"{LEARNED} {len(sample.by_node)} nodes", days, *versions]),
        results=sample.results,
        parts=len(sample.parts),
        nodes=len(sample.by_node),
        median=fleet.median,
    )


def _unlike_nodes(cell: Cell, sample: _Sample, fleet: Distribution) -> Iterable[str]:
    for node, values in sorted(sample.by_node.items()):
        found = fleet.similarity(values)
        if found < SIMILARITY_MIN:
            off = 100 * (statistics.median(values) / fleet.median - 1)
            yield (
                f"{node} is unlike its fleet in {cell}: similarity {found:.3f}, below"
                f" {SIMILARITY_MIN}; its median is {off:+.1f} % off"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorChange:
    """A learned floor of before and the one of now for the same test; None: there is none.

    ``percent``: by how much the median moved.
    """

    before: Floor | None
    now: Floor | None

    @property
    def percent(self) -> float | None:
        old = None if self.before is None else self.before.median
        new = None if self.now is None else self.now.median
        return None if old is None or new is None else 100 * (new / old - 1)

    @property
    def is_moved(self) -> bool:
        """Return whether it is new or gone, or moved by `MOVED_PERCENT`, which is judgement."""
        return self.percent is None or abs(self.percent) >= MOVED_PERCENT


def changes(before: Sequence[Floor], now: Sequence[Floor]) -> list[FloorChange]:
    """Return what became of each learned floor: beside that of the same software, else of another.

    Of several of other software it is the one with the most results. Quoted floors did not move.
    """
    before = [floor for floor in before if floor.median is not None]
    found, used = [], set()
    for floor in now:
        same = [old for old in before if _series(old) == _series(floor)]
        old = max(same, key=lambda x: (_software(x) == _software(floor), x.results), default=None)
        found.append(FloorChange(before=old, now=floor))
        used.add(_series(floor))
    gone = [FloorChange(before=old, now=None) for old in before if _series(old) not in used]
    return [*found, *gone]


def _series(floor: Floor) -> tuple[str, ...]:
    return floor.test, floor.parameters, floor.unit


def _software(floor: Floor) -> tuple[str, str]:
    return floor.driver, floor.nccl
