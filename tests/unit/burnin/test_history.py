"""Weeks of sweeps: who fails more often than the fleet, and what a history can find at all."""

import math
import random
from fractions import Fraction

import pytest
from support.sweep_fleet import Faults, run_sweep

from gpuops.burnin.history import ALPHA, PairHistory, binomial_tail, history_findings
from gpuops.burnin.pairs import PairOutcome, PairTest, node_pair
from gpuops.model import EntityKind, Status

NODES = [f"n{i:03}" for i in range(64)]


def sweeps(faults, n, *, nodes=NODES, seed=1):
    tests, tested = [], set()
    for night in range(n):
        found, _ = run_sweep(
            nodes, faults, seed=100 * seed + night, tested=tested, sweep=str(night), nightly=True
        )
        tests += found
        tested |= {test.nodes for test in found}
    return tests


def trial(a, b, outcome="pass", *, sweep="0", t_us=10):
    return PairTest(nodes=node_pair(a, b), outcome=PairOutcome(outcome), sweep=sweep, t_us=t_us)


def named(tests, **kwargs):
    return {(o.entity.kind, o.entity.id) for o in PairHistory(tests, **kwargs).offenders()}


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("p", [Fraction(1, 1000), Fraction(1, 5), Fraction(9, 10)])
def test_the_tail_is_exact(n, p):
    for k in range(n + 2):
        exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
        assert binomial_tail(k, n, float(p)) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)


def test_the_tail_of_many_trials_does_not_vanish():
    """The probability of none of 15,000 at 5 % is below the smallest float."""
    assert binomial_tail(1, 15_000, 0.05) == 1
    assert binomial_tail(751, 15_000, 0.05) == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize(("args", "tail"), [((0, 9, 0.0), 1), ((1, 9, 0.0), 0), ((3, 9, 1.0), 1)])
def test_the_tail_at_its_ends(args, tail):
    assert binomial_tail(*args) == tail


def test_nodes_that_fail_a_fifth_of_their_tests_are_named_after_two_weeks():
    bad = {"n003": 0.2, "n017": 0.2, "n042": 0.2}
    found = [named(sweeps(Faults(flaky=bad, base=0.001), 14, seed=seed)) for seed in range(4)]

    names = [name for one in found for _, name in one]
    assert set(names) <= bad.keys()
    assert len(names) >= 11  # of 12; the benchmark has the rate of many fleets


def test_a_healthy_fleet_has_nobody_named_whatever_its_base_rate():
    assert not named(sweeps(Faults(), 14))
    assert not named(sweeps(Faults(base=0.05), 14))


@pytest.mark.parametrize("n", [8, 12])
def test_a_bad_link_is_named_and_not_its_ends(n):
    link = (NODES[2], NODES[5])

    assert named(sweeps(Faults(links={link}), 6, nodes=NODES[:n])) == {
        (EntityKind.PAIR, ",".join(link))
    }


def test_a_bad_node_is_named_and_not_its_links():
    tests = sweeps(Faults(flaky={NODES[2]: 0.5}), 10, nodes=NODES[:8])

    assert named(tests) == {(EntityKind.NODE, NODES[2])}


def failing_then_healthy():
    """n000 fails with everybody until time 100, and passes from then on."""
    rng = random.Random(1)
    for night in range(20):
        order = rng.sample(NODES[:16], 16)
        for a, b in zip(order[::2], order[1::2], strict=True):
            bad = "n000" in (a, b) and night < 10
            yield trial(a, b, "fail" if bad else "pass", sweep=str(night), t_us=10 * night)


def test_a_repair_starts_the_count_anew():
    tests = list(failing_then_healthy())

    assert named(tests) == {(EntityKind.NODE, "n000")}
    assert named(tests, repaired_us={"n000": 50}) == {(EntityKind.NODE, "n000")}
    assert named(tests, repaired_us={"n000": 95}) == set()
    assert named(tests, repaired_us={"n001": 95}) == {(EntityKind.NODE, "n000")}


def test_repeats_of_a_sweep_are_one_trial_and_unmeasured_tests_none():
    one = [trial("a", "b", "fail") for _ in range(8)]
    rest = [trial("a", "c", sweep=str(n)) for n in range(9)]
    unmeasured = [trial("a", "d", "unknown", sweep=str(n)) for n in range(100)]
    many = [trial(f"x{n}", f"y{n}", sweep=str(s)) for n in range(30) for s in range(10)]

    assert named([*one, *rest, *unmeasured, *many]) == set()
    again = [trial("a", f"z{n}", "fail", sweep="9") for n in range(4)]
    (offender,) = PairHistory([*one, *rest, *unmeasured, *many, *again]).offenders()
    assert (offender.n_failed, offender.n_trials) == (5, 14)


def test_two_nodes_are_no_fleet():
    assert named([trial("a", "b", "fail", sweep=str(n)) for n in range(20)]) == set()


def test_an_offender_warns_with_its_figures():
    offenders = PairHistory(list(failing_then_healthy())).offenders()
    (finding,) = history_findings(offenders)

    assert (finding.status, finding.value, finding.unit) == (Status.WARN, 50.0, "%")
    assert "failed 10 of 20 tests since its last repair" in finding.message
    assert offenders[0].probability < ALPHA / 2
    assert "Holm" in finding.source


def test_the_power_says_how_many_sweeps_a_rate_takes():
    tests = sweeps(Faults(base=0.001), 14)
    power = {item.rate: item for item in PairHistory(tests).power()}

    assert list(power) == [0.05, 0.1, 0.2]
    assert power[0.05].found < power[0.1].found < power[0.2].found
    assert power[0.05].sweeps > power[0.1].sweeps > 14 >= power[0.2].sweeps
    assert PairHistory([]).power() == []
    (hopeless,) = PairHistory(sweeps(Faults(base=0.9), 2)).power([0.001])
    assert hopeless.sweeps is None


def test_the_power_is_what_simulated_fleets_show():
    """The histories of 40 fleets with one node that fails a tenth of its tests."""
    found, expected = 0, []
    for seed in range(40):
        rng = random.Random(seed)
        history = PairHistory(_pairs_at_random(rng))
        found += len(history.offenders())
        expected.append(history.power([0.1])[0].found)

    assert found / 40 == pytest.approx(sum(expected) / 40, abs=0.2)  # 2.7 sigma


def _pairs_at_random(rng):
    for number in range(42):
        order = rng.sample(NODES, len(NODES))
        for a, b in zip(order[::2], order[1::2], strict=True):
            is_bad = rng.random() < (0.1 if NODES[0] in (a, b) else 0.001)
            yield trial(a, b, "fail" if is_bad else "pass", sweep=f"{number // 3}")
