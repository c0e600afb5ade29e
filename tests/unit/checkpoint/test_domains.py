"""Failure domains: Slurm's topology.conf and lines of labels, and what is wrong with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.placement.domains import LEVELS_MAX, even_domains, parse_domains
from gpuops.errors import ConfigError

TREE = """
# leaves
SwitchName=s[0-1] Nodes=  # a spare rack
SwitchName=leaf0 Nodes=gpu[01-02] LinkSpeed=400
switchname=leaf1 nodes=gpu[03-04,09]
SwitchName=spine Switches=leaf[0-1],s[0-1]
"""


def test_a_tree_of_switches_gives_each_node_its_path_from_the_widest():
    found = parse_domains(TREE, "topology.conf")

    assert found.levels == ("switch 1 up", "switch")
    assert found.paths["gpu01"] == ("spine", "leaf0")
    assert found.paths["gpu09"] == ("spine", "leaf1")
    assert len(found.paths) == 5


def test_a_leaf_that_hangs_higher_is_alone_under_itself():
    found = parse_domains(
        "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n"
        "SwitchName=mid Switches=a\nSwitchName=top Switches=mid\n"
        "SwitchName=c Nodes=n3\nSwitchName=low Switches=c\n",
        "t",
    )

    assert found.paths == {
        "n1": ("top", "mid", "a"),
        "n2": ("b", "b", "b"),
        "n3": ("low", "low", "c"),
    }
    assert found.levels == ("switch 2 up", "switch 1 up", "switch")


def test_blocks_are_one_level():
    found = parse_domains(
        "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 \\\n  Nodes=n[3-4]\nBlockSizes=2,4\n", "t"
    )

    assert found.levels == ("block",)
    assert found.paths == {"n1": ("b1",), "n2": ("b1",), "n3": ("b2",), "n4": ("b2",)}


def test_labels_are_a_host_list_and_a_path():
    found = parse_domains("gpu[1-2] row1/rack1 # first\n\ngpu3   /row1/rack2/\n", "labels")

    assert found.levels == ("domain 1 up", "domain")
    assert found.paths["gpu2"] == ("row1", "rack1")
    assert found.paths["gpu3"] == ("row1", "rack2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no node"),
        ("# nothing\n", "names no node"),
        ("SwitchName=a\n", "names no node"),
        ("gpu1\n", "f:1: 'gpu1' is not a host list and a path"),
        ("gpu1 a b\n", "not a host list and a path"),
        ("gpu1 a//b\n", "'a//b' is not a path"),
        ("gpu1 /\n", "'/' is not a path"),
        ("gpu1 " + "/".join("x" * (LEVELS_MAX + 1)), "is not a path"),
        ("gpu[1-2] a/b\ngpu3 a\n", "f:2: 'a' has 1 levels, and the lines before have 2"),
        ("gpu[1-2] a\ngpu2 b\n", "f:2: gpu2 is in b and in a"),
        ("gpu[1- a\n", "is no host list"),
        ("gpu* a\n", "is a pattern"),
        ("SwitchName=a Nodes=n1 Switches=b\n", "a has both Nodes and Switches"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", "f:2: a is already in f:1"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", "n1 is under a and b"),
        ("SwitchName=a Switches=b\n", "switch b of a is not in f"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Switches=a\nSwitchName=c Switches=a\n",
            "under b and",
        ),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "below itself"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", "both SwitchName and BlockName"),
        ("SwitchName=a Nodes=n1\nInclude other\n", "f:2: 'Include' is not a Name=Value"),
        ("SwitchName=a Nodes=n1\nNodeName=b\n", "SwitchName and BlockName are"),
    ],
)
def test_what_contradicts_itself_is_one_clear_error(text, words):
    with pytest.raises(ConfigError, match=r"^f") as caught:
        parse_domains(text, "f")

    assert words in str(caught.value)
    assert caught.value.exit_code == 64


@given(st.text(alphabet="SwitchNameBlock=,[]0-9 \n\\#/abc", max_size=200) | st.text(max_size=80))
def test_any_text_is_domains_or_a_config_error(text):
    try:
        found = parse_domains(text, "f")
    except ConfigError:
        return
    assert all(len(path) == len(found.levels) for path in found.paths.values())


def test_nodes_without_a_domain_are_named():
    found = parse_domains("gpu[1-2] a\n", "f")

    assert found.of(["gpu2"]) == {"gpu2": ("a",)}
    with pytest.raises(ConfigError, match="of x1, x2, x3 and 2 more: the topology names 2 other"):
        found.of(["x1", "gpu1", "x2", "x3", "x4", "x5"])


@given(st.integers(1, 60), st.data())
def test_even_domains_differ_by_one_node_and_are_neighbours(n_nodes, data):
    n_domains = data.draw(st.integers(1, n_nodes))
    nodes = [f"n{number}" for number in range(n_nodes)]
    order = [even_domains(nodes, n_domains).paths[node] for node in nodes]
    sizes = [order.count(path) for path in set(order)]

    assert len(sizes) == n_domains
    assert max(sizes) - min(sizes) <= 1
    assert order == sorted(order)


@pytest.mark.parametrize("n_domains", [0, 4])
def test_fewer_nodes_than_domains_is_an_error(n_domains):
    with pytest.raises(ConfigError, match=f"3 nodes cannot be in {n_domains} failure domains"):
        even_domains(["a", "b", "c"], n_domains)
