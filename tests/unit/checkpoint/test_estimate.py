"""The figures of a plan: each from its own formula, put together with the right arguments."""

from dataclasses import replace

import pytest

from gpuops.checkpoint.placement.domains import even_domains
from gpuops.checkpoint.placement.estimate import EstimateInput, RamNeed, estimate
from gpuops.checkpoint.placement.replica_placement import place
from gpuops.errors import ConfigError
from gpuops.plan.interval import TierCost, two_tiers

GB = 10**9
NODES = tuple(f"n{number}" for number in range(16))


def job(**more):
    replicas, nodes = more.get("replicas", 2), more.get("nodes", NODES)
    given = {
        "nodes": nodes,
        "replicas": replicas,
        "domains": None,
        "need": RamNeed(ranks=8, bytes_per_rank=12 * GB, replicas=replicas),
        "mtbf_s": 8 * 3600.0,
        "restart_s": 60.0,
        "slowdown": 0.05,
        "nic_bytes_per_s": 10.5e9,
        "disk_bytes_per_s": 30e9,
    }
    return EstimateInput(**{**given, **more})


# bytes per GPU, the ideal stall, a node of eight GPUs over one 100 GbE and to 30 GB/s of NVMe.
@pytest.mark.parametrize(
    ("bytes_per_rank", "stall_s", "replica_s", "persist_s"),
    [
        (12.0, 0.22, 9.1, 3.2),
        (13.1, 0.24, 10.0, 3.5),
        (4.75, 0.09, 3.6, 1.3),
        (3.9, 0.07, 3.0, 1.0),
    ],
)
def test_seconds_of_models_of_all_sizes(bytes_per_rank, stall_s, replica_s, persist_s):
    need = RamNeed(ranks=8, bytes_per_rank=round(bytes_per_rank * GB), replicas=2)
    plan = estimate(job(need=need))

    assert plan.stall_s == pytest.approx(stall_s, abs=0.005)
    assert plan.times.replica_s == pytest.approx(replica_s, abs=0.05)
    assert plan.times.persist_s == pytest.approx(persist_s, abs=0.05)


def test_copies_of_what_replicas_share_are_needed_where_a_holder_has_another_shard():
    need = RamNeed(8, 12 * GB + 10**6, 2, shared_bytes=12 * GB, shards=16)
    alike = estimate(job(need=need, domains=even_domains(NODES, 8)))
    apart = estimate(job(need=replace(need, shards=32), domains=even_domains(NODES, 16)))
    no_replicas = estimate(job(need=replace(need, shards=128)))

    assert alike.job.need.are_alike
    assert alike.times.replica_s == 8e6 / 10.5e9
    # What others wait for after a loss is all of a node's state.
    assert alike.tiers is not None
    restart_s = 60 + alike.job.need.state_bytes / 10.5e9
    assert (
        alike.tiers.memory
        == two_tiers(
            TierCost(alike.stall_s, 8e6 / 10.5e9, restart_s),
            TierCost(alike.times.persist_s * 0.05, alike.times.persist_s, 60 + alike.times.read_s),
            8 * 3600.0,
            alike.missed,
            0.0,
        ).memory
    )
    assert not no_replicas.job.need.are_alike
    assert no_replicas.times.replica_s == no_replicas.job.need.state_bytes / 10.5e9
    at = {node: number % 4 for number, node in enumerate(NODES)}
    assert apart.job.need.are_alike == all(
        at[node] == at[holder] for node in NODES for holder in apart.placement.holders(node)
    )


def test_odds_and_what_they_say_of_failures():
    plan = estimate(job())

    assert [each.odds.lost for each in plan.recoveries] == [1, 2, 3, 4]
    assert [round(each.odds.probability, 3) for each in plan.recoveries] == [1, 0.933, 0.8, 0.615]
    assert [round(each.bound, 3) for each in plan.recoveries] == [1, 0.933, 0.8, 0.6]
    assert [round(each.ring.probability, 3) for each in plan.recoveries] == [1, 0.867, 0.629, 0.363]
    assert plan.missed == pytest.approx(1 / 15)
    assert estimate(job(missed=0.25)).missed == 0.25


def test_the_tiers_get_what_each_of_them_costs():
    plan = estimate(job(replicas=3, stall_s=0.5, missed=0.1, step_s=2.0))
    replica_s, persist_s = 96 / 10.5, 96 / 30

    assert plan.times.replicas_s == pytest.approx(2 * replica_s)
    assert plan.tiers == two_tiers(
        TierCost(0.5, plan.times.replicas_s, 60 + plan.times.replica_s),
        TierCost(persist_s * 0.05, persist_s, 60 + persist_s),
        8 * 3600.0,
        0.1,
        2.0,
    )


def test_without_a_rate_there_are_no_intervals_but_all_else():
    for unknown in ("nic_bytes_per_s", "disk_bytes_per_s"):
        plan = estimate(job(**{unknown: None}))

        assert plan.tiers is None
        assert plan.placement == place(NODES, 2)
    alone = estimate(job(replicas=1, nic_bytes_per_s=None))

    assert alone.times.replicas_s == 0
    assert alone.tiers.memory is None
    assert alone.missed == 1


def test_domains_are_placed_over_and_lost_one_by_one():
    domains = even_domains(NODES, 4)
    plan = estimate(job(domains=domains))

    assert plan.placement == place(NODES, 2, domains.paths)
    assert [loss.n_nodes for loss in plan.losses] == [4] * 4
    assert plan.spreads[0].together == 0
    assert estimate(job()).spreads == estimate(job()).losses == ()


def test_one_node_and_two_have_as_many_rows_as_nodes():
    for count in (1, 2):
        plan = estimate(job(nodes=NODES[:count], replicas=count))

        assert [each.odds.lost for each in plan.recoveries] == list(range(1, count + 1))
        assert plan.missed == 1


def test_a_node_without_a_domain_is_an_error():
    with pytest.raises(ConfigError, match="of n3"):
        estimate(replace(job(), domains=even_domains(NODES[:3], 2), nodes=NODES[:4]))
