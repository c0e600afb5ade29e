"""One bit in the memory of one node, under a training over nodes: found, named, and over."""

import re

import pytest
from support.cluster_run import ClusterRun
from support.hosts import Hosts

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
TOLD = "replicas of the training state differ"


def test_a_bit_flipped_on_one_node_is_one_incident_until_the_ranks_are_equal_again(tmp_path):
    words = {"script": "flipped_on_nodes.py", "nproc": 2}
    with (
        Hosts(2, tmp_path) as hosts,
        ClusterRun(hosts, tmp_path, "--health-gate=off", **words) as run,
    ):
        run.start()
        run.wait(lambda: run.events("checkpoint.replicas_alike"), "word of it, and its end")
        run.enough()
        assert run.finish() == {"n0": 0, "n1": 0}, run.said()

    opened, closed = (event["payload"] for event in run.events("incident.recorded"))
    (flipped,) = map(int, re.findall(r"flipped after step (\d+)", run.said()))
    title = re.fullmatch(
        r"rank 3 differs from ranks 0-2 in model\.2\.weight at step (\d+) \(equal at step (\d+)\)",
        opened["title"],
    )
    assert title, opened["title"]
    assert int(title[2]) <= flipped < int(title[1])
    (node,) = {agent.host.name for agent in run.agents if "flipped" in agent.said()}
    assert [(c["kind"], c["id"]) for c in opened["culprits"]] == [("rank", "3"), ("node", node)]
    assert opened["failure_class"] == "numerics.replicas_differ"
    assert (opened["state"], opened["side"], opened["actions"]) == ("open", "ambiguous", [])
    assert (closed["id"], closed["state"]) == (opened["id"], "closed")
    assert re.match(r"ranks 0-3 are equal again at step \d+$", closed["resolution"])
    assert run.said().count(TOLD) == 1
    assert run.events("checkpoint.replicas_apart") == []
    assert run.decisions() == []  # it ended nothing
