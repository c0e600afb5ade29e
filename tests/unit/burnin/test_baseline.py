"""Floors from a fleet's results: what is learned, and how often a healthy node is blamed."""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from gpuops.burnin.baseline import (
    WILKS_RESULTS,
    Distribution,
    Floor,
    FloorStatus,
    changes,
    find_floor,
    floors_in_force,
    learn,
)

DAY_US = 86_400 * 10**6
START_US = 1_793_491_200_000_000  # 2026-11-01


@dataclass
class Result:
    """A measurement as the store has it."""

    node: str
    value: float | None
    part_id: str = "GPU-1"
    t_us: int = START_US
    test: str = "gemm"
    parameters: str = "dtype=bf16 size=8192"
    unit: str = "TFLOP/s"
    higher_is_better: bool = True
    shape: str = "h100-sxm"
    software: dict = field(default_factory=lambda: {"driver": "570.124", "nccl": "2.27"})


def fleet(nodes=8, parts=3, value=lambda node, part: 100.0 + node + part / 10, **changes):
    return [
        Result(f"n{node}", value(node, part), f"GPU-{part}", **changes)
        for node in range(nodes)
        for part in range(parts)
    ]


def floor(**changes):
    values = {"test": "gemm", "value": 98.0, "median": 100.0}
    values |= {"unit": "TFLOP/s", "source": "learned: …", "parts": WILKS_RESULTS}
    return Floor(**{**values, **changes})


def test_149_results_bound_the_quantile_and_148_do_not():
    """Wilks 1941: the chance that the least of n is below the 2 % quantile is 1 - 0.98^n."""
    assert 1 - 0.98**WILKS_RESULTS >= 0.95 > 1 - 0.98 ** (WILKS_RESULTS - 1)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 1), (0.02, 1), (0.25, 1 + 5 / 12), (0.5, 2.5), (0.98, 4), (1.0, 4)],
)
def test_the_quantile_is_definition_8_of_hyndman_and_fan(share, expected):
    found = Distribution([4, 2, 3, 1]).quantile(share)

    assert found == pytest.approx(expected)
    assert found == pytest.approx(np.quantile([1, 2, 3, 4], share, method="median_unbiased"))


def test_a_sample_is_as_similar_to_itself_as_can_be_and_5_percent_slower_is_95():
    values = np.random.default_rng(1).normal(100, 2, 1001).tolist()
    sample = Distribution(values)

    assert sample.similarity(values) == pytest.approx(1)
    assert sample.similarity(sorted(values)[500:501]) == pytest.approx(0.984, abs=0.002)
    slower = [value - 0.05 * sample.median for value in values]
    assert sample.similarity(slower) == pytest.approx(0.95)
    assert sample.similarity([-1000.0]) == 0


def test_similarity_is_the_area_between_the_two_distribution_functions():
    rng = np.random.default_rng(2)
    ours, theirs = rng.normal(100, 5, 97), rng.normal(103, 9, 13)
    grid = np.sort(np.concatenate([ours, theirs]))
    share = [np.searchsorted(np.sort(x), grid[:-1], side="right") / len(x) for x in (ours, theirs)]
    area = float(np.sum(np.abs(share[0] - share[1]) * np.diff(grid)))

    found = Distribution(ours.tolist()).similarity(theirs.tolist())

    assert found == pytest.approx(1 - area / np.median(ours))


def test_a_floor_says_where_it_is_from():
    results = fleet()
    results[0].t_us += 21 * DAY_US
    random.Random(1).shuffle(results)

    learned = learn(results)

    (found,) = learned.floors["h100-sxm"]
    assert found.source == ("learned: 8 nodes, 2026-11-01 to 2026-11-22, driver 570.124, NCCL 2.27")
    assert (found.results, found.parts, found.nodes, found.may_fail) == (24, 24, 8, False)
    assert (found.value, found.median) == (100.0, pytest.approx(103.6))
    assert learned.last_us == START_US + 21 * DAY_US


def test_too_few_nodes_or_results_make_no_floor_and_say_so():
    seven, few = fleet(7), fleet(8, parts=2, test="hbm")

    learned = learn([*seven, *few, Result("n1", None, test="none")])

    assert learned.floors == {}
    about = "dtype=bf16 size=8192, driver 570.124"
    assert learned.remarks == (
        f"no floor for h100-sxm: gemm {about}: 21 results of 7 nodes passed",
        f"no floor for h100-sxm: hbm {about}: 16 results of 8 nodes passed",
    )
    assert len(learn([*seven, *few], nodes_min=7, results_min=16).floors["h100-sxm"]) == 2


def test_each_shape_driver_and_nccl_has_its_own():
    drivers = [{"driver": "570"}, {"driver": "580"}, {"driver": "580", "nccl": "2.28"}]
    results = [item for software in drivers for item in fleet(software=software)]
    results += fleet(shape="a100")

    found = learn(results).floors

    assert {(shape, x.driver, x.nccl) for shape, floors in found.items() for x in floors} == {
        ("h100-sxm", "570", ""),
        ("h100-sxm", "580", ""),
        ("h100-sxm", "580", "2.28"),
        ("a100", "570.124", "2.27"),
    }


def test_of_a_latency_the_floor_is_the_highest_that_is_healthy():
    (found,) = learn(fleet(unit="us", higher_is_better=False)).floors["h100-sxm"]

    assert (found.value, found.median) == (pytest.approx(107.2), pytest.approx(103.6))
    assert found.fail_bound == pytest.approx(103.6 * 1.12)
    assert found.judge([106.0]) is FloorStatus.MET
    assert found.judge([110.0]) is FloorStatus.NOTE
    assert found.judge([117.0]) is FloorStatus.WARN


def test_a_node_unlike_the_fleet_is_named():
    def value(node, part):
        return 94.0 if node == 3 else 100.0 + part / 10

    learned = learn(fleet(20, value=value))

    (found,) = learned.remarks
    assert found.startswith("n3 is unlike its fleet in h100-sxm: gemm dtype=bf16 size=8192")
    assert "similarity 0.94" in found or "similarity 0.93" in found
    assert found.endswith("below 0.95; its median is -6.1 % off")


@pytest.mark.parametrize(
    ("repeats", "changes", "expected"),
    [
        ([98.0, 98.0, 98.0], {}, FloorStatus.MET),
        ([97.9, 97.9, 97.9], {}, FloorStatus.NOTE),
        ([88.1, 88.1, 88.1], {}, FloorStatus.NOTE),
        ([87.9, 87.9, 87.9], {}, FloorStatus.FAIL),
        ([87.9, 87.9, 99.0], {}, FloorStatus.WARN),
        ([87.9, 87.9], {}, FloorStatus.WARN),
        ([99.0, 99.0, 50.0], {}, FloorStatus.MET),
        ([87.9, 87.9, 87.9], {"parts": WILKS_RESULTS - 1}, FloorStatus.WARN),
        # Three times the distance from median to floor is more than 12 %.
        ([86.0, 86.0, 86.0], {"value": 95.0}, FloorStatus.NOTE),
        ([84.9, 84.9, 84.9], {"value": 95.0}, FloorStatus.FAIL),
        ([97.9, 97.9, 97.9], {"median": None}, FloorStatus.WARN),
        ([1.0, 1.0, 1.0], {"median": None}, FloorStatus.WARN),
    ],
)
def test_a_fail_needs_three_repeats_far_below_and_enough_results(repeats, changes, expected):
    assert floor(**changes).judge(repeats) is expected


def test_the_floor_that_says_most_about_a_measurement_is_used():
    general = floor(parameters="kernel=copy")
    exact = floor(parameters="kernel=copy size=2048MiB")
    of_driver = floor(parameters="kernel=copy size=2048MiB", driver="570", nccl="2.27")
    other = floor(parameters="kernel=copy size=2048MiB x=1", driver="580")
    floors = [other, general, of_driver, exact, floor(test="hbm")]
    about = {"test": "gemm", "parameters": "kernel=copy size=2048MiB", "unit": "TFLOP/s"}

    def found(driver="570", nccl="2.27", **changes):
        in_force = floors_in_force(floors, driver=driver, nccl=nccl)
        return find_floor(in_force, **{**about, **changes})

    assert found() is of_driver
    assert found(nccl="2.28") is exact
    assert found(driver="580") is exact
    assert found(parameters="kernel=copy size=1MiB") is general
    assert found(parameters="kernel=triad size=1MiB") is None
    assert found(test="links") is None
    assert found(unit="GB/s") is None


def test_what_moved_is_compared_with_the_same_software_else_with_another():
    old = [floor(driver="570"), floor(driver="575", median=110.0), floor(test="hbm")]
    now = [floor(driver="580", median=99.0, parts=9), floor(driver="575", median=100.0)]
    now.append(floor(test="links"))

    first, second, third, fourth = changes(old, now)

    assert (first.before, first.now, first.is_moved) == (old[0], now[0], False)
    assert first.percent == pytest.approx(-1)
    assert (second.before, second.percent) == (old[1], pytest.approx(-100 / 11))
    assert second.is_moved
    assert (third.before, third.now, third.is_moved) == (None, now[2], True)
    assert (fourth.before, fourth.now, fourth.is_moved) == (old[2], None, True)


def test_a_quoted_floor_neither_moves_nor_goes():
    quoted = floor(median=None, value=96.0)

    (found,) = changes([quoted, replace(quoted, test="hbm")], [floor()])

    assert (found.before, found.now) == (None, floor())


def drawn(rng, kind, nodes, days):
    """Return three repeats of a test on each of eight GPUs of healthy nodes, on each day.

    A node and its GPUs differ from others for ever, as chips do, and a little from day to day.
    """
    spread = {"node": (0.03, 0.02), "wide": (0.01, 0.04)}.get(kind, (0.01, 0.02))
    of_node, of_gpu = (
        rng.normal(0, x, (nodes, n, 1, 1)) for x, n in zip(spread, (1, 8), strict=True)
    )
    noise = rng.normal(0, 0.005, (nodes, 8, days, 3))
    if kind == "skewed":  # few chips are much slower than most
        of_gpu = -rng.exponential(0.01, of_gpu.shape)
    if kind == "heavy":  # something else ran meanwhile
        noise = 0.01 * rng.standard_t(3, noise.shape)
    return 100 * np.exp(of_node + of_gpu + noise)


def passed(medians):
    """Return which nodes had no GPU 7 % below the others: only from these floors are learned."""
    return medians.min(axis=(1, 2)) > 0.93 * np.median(medians, axis=(1, 2))


@pytest.mark.parametrize(
    ("kind", "nodes", "days"),
    [(kind, 32, 1) for kind in ("normal", "wide", "node", "skewed", "heavy")] + [("wide", 128, 3)],
)
def test_at_most_one_in_a_thousand_healthy_nodes_fails_a_burn_in(kind, nodes, days):
    """25 tests, as many as a full burn-in has of one GPU; each with a floor of its own."""
    rng = np.random.default_rng([nodes, *map(ord, kind)])
    burnins, failed = 2000, set()
    for _test in range(25):
        medians = np.median(drawn(rng, kind, nodes, days), axis=3)
        medians = medians[passed(medians)]
        sample = Distribution(medians.ravel().tolist())
        learned = floor(value=sample.quantile(0.02), median=sample.median, parts=8 * len(medians))
        repeats = drawn(rng, kind, burnins, 1)[:, :, 0, :]
        for node, gpu in np.argwhere(np.median(repeats, axis=2) < learned.fail_bound):
            if learned.judge(repeats[node, gpu].tolist()) is FloorStatus.FAIL:
                failed.add(int(node))

    assert learned.may_fail
    assert len(failed) / burnins <= 0.001


def test_a_gpu_a_sixth_slower_than_its_fleet_fails():
    rng = np.random.default_rng(7)
    medians = np.median(drawn(rng, "normal", 32, 1), axis=3)
    sample = Distribution(medians.ravel().tolist())
    learned = floor(value=sample.quantile(0.02), median=sample.median, parts=256)
    slow = drawn(rng, "normal", 500, 1)[:, 0, 0, :] * (1 - 1 / 6)

    statuses = [learned.judge(repeats.tolist()) for repeats in slow]

    assert statuses.count(FloorStatus.FAIL) > 0.9 * len(statuses)
