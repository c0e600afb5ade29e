"""The simulated sweeps beside the peers' schemes, in small; `bench_sweep_sim` has all of them."""

import pytest
from bench_sweep_sim import HARD, drawn_links, goals, measure, planted, swept
from support.sweep_fleet import Faults
from support.sweep_peers import ALL_PAIRS, SCHEMES

N = 64
SEEDS = range(4)


def row(scheme, faults_of, *, n_bad=3):
    """Return what *scheme* finds of nodes whose faults *faults_of* returns."""
    seeds = SEEDS[:1] if scheme in ALL_PAIRS else SEEDS
    bad = [(seed, planted(N, n_bad, seed)) for seed in seeds]
    return swept(scheme, N, [(seed, faults_of(nodes), nodes, set()) for seed, nodes in bad])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_locates_nodes_that_always_fail(scheme):
    found = row(scheme, lambda bad: Faults(hard=bad))

    assert (found["located_percent"], found["blamed"]) == (100, 0)


def test_only_dlrover_misses_nodes_that_are_a_quarter_slower():
    found = {
        scheme: row(scheme, lambda bad: Faults(slow=bad))["located_percent"] for scheme in SCHEMES
    }

    assert found == {scheme: 0 if "dlrover" in scheme else 100 for scheme in SCHEMES}


def test_a_bad_link_is_named_by_who_tests_it_twice_or_tests_all_pairs():
    links = [(seed, drawn_links(N, 2, seed)) for seed in SEEDS]

    def located(scheme):
        cases = [(seed, Faults(links=bad), set(), bad) for seed, bad in links]
        return swept(scheme, N, cases[:1] if scheme in ALL_PAIRS else cases)["located_percent"]

    assert located("gpuops") == 100
    assert located("SuperBench, pair-wise") == 100
    assert located("Cluster Readiness Engine, halves") == 0


def test_rounds_are_those_of_the_published_schemes():
    rounds = {s: row(s, lambda bad: Faults(hard=bad), n_bad=1)["rounds_max"] for s in SCHEMES}

    assert rounds["gpuops"] == 4
    assert rounds["dlrover, 2 rounds"] == rounds["cluster-health-scanner, 2 passes"] == 2
    assert rounds["SuperBench, pair-wise"] == N - 1
    assert rounds["gcm, one by one"] == N * (N - 1) / 2
    assert rounds["Cluster Readiness Engine, halves"] == 7  # log2 N, and the last two alone


def test_every_goal_is_judged(monkeypatch):
    sizes = {64: 1}
    for name in ("HARD", "SLOW", "HISTORY", "PARTNERS"):
        monkeypatch.setattr(f"bench_sweep_sim.{name}", sizes)
    monkeypatch.setattr("bench_sweep_sim.LINKS", {64: 3})
    monkeypatch.setattr("bench_sweep_sim.schedule_cost", lambda: {"processor_s": 9, "peak_mb": 1})
    reached = goals(measure(1.0))

    assert [name for name, goal in reached.items() if not goal["met"]] == [
        "two bad pairs of one node, named as pairs, %",
        "schedule of 16,384 nodes, s",
    ]
    assert max(HARD) == 16_384
