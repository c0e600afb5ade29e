"""A simulated fleet in every storm at once, in small; `bench_fuse` runs a year of 2,000 nodes."""

import pytest
from support.fuse_fleet import DAY_S, simulate

from gpuops.store.fuse import FuseSettings

N_NODES = 100


@pytest.fixture(scope="module")
def tallies():
    """What became of the fleet under the gate's rule, and under the one before it."""
    return {
        rule: simulate(rule, n_nodes=N_NODES, apart_s=4 * DAY_S, seed=12)
        for rule in ("by the table", "the third node")
    }


def test_no_job_starts_on_hardware_that_reports_a_fault_below_the_cap(tallies):
    """With the store silent, too; before, jobs started from the third node on."""
    assert tallies["by the table"].jobs["hardware_below_cap"] == 0
    assert tallies["the third node"].jobs["hardware_below_cap"] > 50


def test_a_wrong_rule_drains_no_more_healthy_nodes_than_the_fuse_allows(tallies):
    limit = FuseSettings().limit(N_NODES)

    def healthy(rule):
        storms = tallies[rule].by_storm
        return [n["healthy"] for name, n in storms.items() if "wrong rule" in name]

    assert max(healthy("by the table")) <= limit
    assert max(healthy("the third node")) > N_NODES / 2


def test_a_storm_of_a_shared_cause_drains_few_and_one_of_hardware_the_cap(tallies):
    storms, settings = tallies["by the table"].by_storm, FuseSettings()

    assert storms["file server"]["broken"] <= settings.limit(N_NODES)
    assert storms["file server, store silent"]["broken"] == 0
    assert 0 < storms["bad driver"]["broken"] <= settings.cap(N_NODES)
    assert storms["row of racks overheats"]["jobs"] == 0
    assert storms["row of racks overheats, store silent"]["jobs"] == 0
