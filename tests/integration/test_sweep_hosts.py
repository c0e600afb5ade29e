"""``gpuops sweep --hosts``: four hosts in namespaces, with a cut link and a slow host."""

import pytest
from support.hosts import Host, Hosts
from support.stories import Teller, burnin, envelopes
from support.swept_hosts import run, shown, store_url, swept

from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def four_hosts(tmp_path):
    with Hosts(4, tmp_path) as hosts:
        for host in hosts:
            host.throttle(400_000)  # the network decides, not how busy this machine is
        yield hosts


def test_the_cut_link_and_the_slow_host_are_named_and_nothing_else(four_hosts, tmp_path):
    n0, n1, _n2, n3 = four_hosts
    four_hosts.lose(n0, n1)
    four_hosts.lose(n1, n0)
    n3.throttle(20_000)
    cut, slow = ("pair", f"{n0.address},{n1.address}"), ("node", n3.address)
    # Where this machine is so busy that all hosts are slow, nobody is slower than the others.
    recorded = set()
    for _ in range(3):
        code, result = swept(four_hosts, tmp_path, "--timeout", "10")
        recorded.add(result["sweep"])
        named = {(v["kind"], v["entity"]["id"]): v["status"] for v in result["verdicts"]}
        assert named.keys() <= {cut, slow}, result
        if slow in named:
            break
    assert named.keys() == {cut, slow}, result
    assert named[slow] == "fail"
    assert code == 1
    outcomes = {t["outcome"] for t in result["tests"] if ",".join(t["nodes"]) == cut[1]}
    assert outcomes <= {"timeout", "fail"}

    measured_tests = [test for test in result["tests"] if test["outcome"] != "unknown"]
    stored = shown(tmp_path, "sweep", "show", result["sweep"])
    assert stored == {**result, "tests": measured_tests}
    text = run(tmp_path, "sweep", "show").stdout
    signs = [line.split()[2:] for line in text.splitlines() if line.startswith("10.")][:4]
    assert signs[0][1] in "TX"
    assert sum(sign in "sXT" for sign in signs[3][:3]) >= 2
    assert f"node {n3.address}" in text

    burnt_in(tmp_path, n3.address)
    node = shown(tmp_path, "node", "show", n3.address)
    assert node["sweep"]["sweep"] == result["sweep"]
    assert [f["entity"]["id"] for f in node["sweep"]["findings"]] == [n3.address]
    assert node["burnin"]["status"] == "pass"
    assert [item["value"] for item in node["burnin"]["measurements"]] == [790.5]
    text = run(tmp_path, "node", "show", n3.address).stdout
    assert "1 of 1 measurements passed" in text
    assert f"sweep {result['sweep']}: " in text

    history = shown(tmp_path, "sweep", "history")
    assert history["sweeps"] == len(recorded)
    assert history["tests"] >= len({tuple(test["nodes"]) for test in measured_tests})
    assert {f["entity"]["id"] for f in history["findings"]} <= {cut[1], slow[1]}


@pytest.mark.parametrize("words", [(), ("--seed", "1")])
def test_a_large_sweep_asks_for_the_pairs_of_earlier_ones_unless_its_own_are_given(tmp_path, words):
    hosts = (
        "sweep",
        "--hosts",
        "127.0.0.[1-17]",
        "--ssh",
        "sh -c 'exit 255'",
        "--no-check",
        "--no-record",
    )
    done = run(tmp_path, *hosts, *words)

    assert "127.0.0.17: did not join" in done.stdout
    assert (
        "does not know which pairs earlier ones tested: cannot open" in done.stderr
    ) is not bool(words)


def burnt_in(folder, node):
    """Have the store know of a burn-in of *node*."""
    teller = Teller()
    burnin(teller, node, values=(790.5,))
    with open_store(store_url(folder), mode="write") as store, store.begin() as connection:
        ingest(connection, envelopes(teller.lines, cluster="default"), 7)


def test_a_host_that_ssh_does_not_reach_is_named_and_the_others_are_swept(four_hosts, tmp_path):
    nowhere = Host("nowhere", "10.255.255.1", tmp_path)
    code, result = swept([four_hosts[0], four_hosts[1], nowhere], tmp_path)
    assert code == 3
    assert result["missing"] == {"10.255.255.1": "exited with code 255: no route to host"}
    assert [test["outcome"] for test in result["tests"]] == ["pass"]
