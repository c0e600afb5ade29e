"""``gpuops sweep --hosts``: four hosts in namespaces, with a cut link and a slow host."""

import json
import os
import subprocess
import sys

import pytest
from support.hosts import Host, Hosts

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def four_hosts(tmp_path):
    with Hosts(4, tmp_path) as hosts:
        for host in hosts:
            host.throttle(400_000)  # the network decides, not how busy this machine is
        yield hosts


def fake_ssh(hosts, folder):
    """Return a program that runs a command in the namespace of the host with that address."""
    lines = ["#!/bin/sh", "host=$1; shift", "case $host in"]
    for host in hosts:
        if host.namespace is None:
            continue
        settings = [f"SLURMD_NODENAME={host.name}", f"GPUOPS_STATE={host.folder}/state"]
        words = ["ip", "netns", "exec", host.namespace, "env", *settings]
        lines.append(f'{host.address}) exec {" ".join(words)} "$@";;')
    lines += ["*) echo 'no route to host' >&2; exit 255;;", "esac"]
    program = folder / "ssh"
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return program


def swept(hosts, folder, *words):
    """Return the exit code of a sweep of *hosts* and what it printed as JSON."""
    names = ",".join(host.address for host in hosts)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gpuops", "sweep", "--hosts", names, "--json"),
            *("--ssh", str(fake_ssh(hosts, folder)), "--remote", f"{sys.executable} -m gpuops"),
            *("--no-check", "--no-record", "--size", "2MiB", "--seconds", "0.5", *words),
        ],
        env={**os.environ, "GPUOPS_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_cut_link_and_the_slow_host_are_named_and_nothing_else(four_hosts, tmp_path):
    n0, n1, _n2, n3 = four_hosts
    four_hosts.lose(n0, n1)
    four_hosts.lose(n1, n0)
    n3.throttle(20_000)
    cut, slow = ("pair", f"{n0.address},{n1.address}"), ("node", n3.address)
    # Where this machine is so busy that all hosts are slow, nobody is slower than the others.
    for _ in range(3):
        code, result = swept(four_hosts, tmp_path, "--timeout", "10")
        named = {(v["kind"], v["entity"]["id"]): v["status"] for v in result["verdicts"]}
        assert named.keys() <= {cut, slow}, result
        if slow in named:
            break
    assert named.keys() == {cut, slow}, result
    assert named[slow] == "fail"
    assert code == 1
    outcomes = {t["outcome"] for t in result["tests"] if ",".join(t["nodes"]) == cut[1]}
    assert outcomes <= {"timeout", "fail"}


def test_a_host_that_ssh_does_not_reach_is_named_and_the_others_are_swept(four_hosts, tmp_path):
    nowhere = Host("nowhere", "10.255.255.1", tmp_path)
    code, result = swept([four_hosts[0], four_hosts[1], nowhere], tmp_path)
    assert code == 3
    assert result["missing"] == {"10.255.255.1": "exited with code 255: no route to host"}
    assert [test["outcome"] for test in result["tests"]] == ["pass"]
