"""What Slurm tells a step of where its node hangs in the network."""

import pytest

from gpuops.slurm.topology import LEVELS_MAX, domain_of


def env(address, pattern, node="gpu017"):
    return {
        "SLURM_TOPOLOGY_ADDR": address,
        "SLURM_TOPOLOGY_ADDR_PATTERN": pattern,
        "SLURMD_NODENAME": node,
    }


@pytest.mark.parametrize(
    ("address", "pattern", "found"),
    [
        ("spine.leaf3.gpu017", "switch.switch.node", ("spine", "leaf3")),
        (
            "root_switch.CELL1.iswi1r4s0c1l1.gpu017",
            "switch.switch.switch.node",
            ("root_switch", "CELL1", "iswi1r4s0c1l1"),
        ),
        ("block05.gpu017", "block.node", ("block05",)),
        # Two leaves: both fail with the node's links, and another pair is another domain.
        ("spine.leaf[3-4].gpu017", "switch.switch.node", ("spine", "leaf[3-4]")),
        # A level without a switch of its own hangs under the one above, or else below.
        ("spine..gpu017", "switch.switch.node", ("spine", "spine")),
        (".leaf3.gpu017", "switch.switch.node", ("leaf3", "leaf3")),
    ],
)
def test_the_switches_or_the_block_of_a_node(address, pattern, found):
    assert domain_of(env(address, pattern)) == found
    assert domain_of(env(address, pattern, node="")) == found


def test_a_node_whose_name_has_dots():
    told = env("spine.leaf3.gpu017.site.org", "switch.switch.node", "gpu017.site.org")
    assert domain_of(told) == ("spine", "leaf3")
    assert domain_of({**told, "SLURMD_NODENAME": ""}) == ("spine", "leaf3")


@pytest.mark.parametrize(
    ("address", "pattern"),
    [
        ("gpu017", "node"),
        ("", ""),
        ("..gpu017", "switch.switch.node"),
        ("torus:0:1:2.gpu017", "torus:x:y:z.node"),
        ("spine.gpu017", "switch.switch.node"),
        ("a.b.c.gpu017", "switch.switch.node"),
        ("spine.leaf3.gpu017", "switch.switch"),
        (".".join(["s"] * 99), ".".join(["switch"] * (LEVELS_MAX + 1) + ["node"])),
    ],
)
def test_without_a_topology_that_is_understood_there_is_no_domain(address, pattern):
    assert domain_of(env(address, pattern)) == ()


def test_outside_of_slurm_there_is_no_domain():
    assert domain_of({}) == ()
