"""Links are cut and slowed as the injectors say, and are whole again however the injector ends."""

import json
import subprocess
import sys

import pytest
from support.hosts import Hosts
from support.runs import wait_until


@pytest.fixture
def hosts(tmp_path):
    with Hosts(2, tmp_path) as made:
        yield made


def start_drill(host, *words):
    return host.popen(
        [sys.executable, "-m", "gpuops", "drill", *words, "--yes"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def routes(host):
    return sorted(host.run("ip", "route", "show").stdout.split("\n"))


def link_is_up(host):
    return "state UP" in host.run("ip", "-o", "link", "show", "dev", "eth0").stdout


def test_an_interface_goes_down_and_comes_back_with_its_routes_and_addresses(hosts):
    host = hosts[0]
    host.run("ip", "route", "add", "default", "via", hosts.address)
    host.run("ip", "-6", "addr", "add", "fd00:7::1/64", "dev", "eth0", "nodad")
    before = routes(host)
    assert any(route.startswith("default") for route in before)
    drill = start_drill(host, "cut-link", "--interface", "eth0", "--for", "3600")
    wait_until(lambda: not link_is_up(host))
    assert not any(route.startswith("default") for route in routes(host))

    drill.kill()

    wait_until(lambda: routes(host) == before)
    wait_until(lambda: "fd00:7::1" in host.run("ip", "-6", "addr", "show").stdout)


def test_a_cut_heals_after_its_time(hosts):
    done = hosts[0].gpuops(
        "drill", "cut-link", "--interface", "eth0", "--for", "0.3", "--yes", "--json"
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["faults"][0]["not_undone"] == []
    wait_until(lambda: link_is_up(hosts[0]))


def test_peers_are_cut_off_one_by_one(hosts):
    host, peer = hosts[0], hosts[1].address
    drill = start_drill(host, "cut-link", "--peer", peer, "--for", "3600")
    wait_until(lambda: f"blackhole {peer}" in "".join(routes(host)))
    assert link_is_up(host)

    drill.kill()

    wait_until(lambda: "blackhole" not in "".join(routes(host)))


def test_a_route_that_somebody_else_made_is_not_taken_away(hosts):
    host, peer = hosts[0], hosts[1].address
    host.run("ip", "route", "add", "blackhole", f"{peer}/32")

    done = host.gpuops("drill", "cut-link", "--peer", peer, "--for", "0.2", "--yes")

    assert done.returncode == 1
    assert "nothing was done" in done.stderr
    assert f"blackhole {peer}" in "".join(routes(host))


def test_a_link_is_throttled_and_then_no_more(hosts):
    def discipline():
        return hosts[0].run("tc", "qdisc", "show", "dev", "eth0").stdout

    drill = start_drill(
        hosts[0], "slow-link", "--interface", "eth0", "--rate", "1", "--for", "3600"
    )
    wait_until(lambda: "tbf" in discipline())
    again = hosts[0].gpuops("drill", "slow-link", "--interface", "eth0", "--rate", "2", "--yes")
    assert again.returncode == 1
    assert "already has a queueing discipline (tbf)" in again.stderr
    assert "tbf" in discipline()

    drill.kill()

    wait_until(lambda: "tbf" not in discipline())


def test_delay_is_there_or_the_kernel_is_said_to_lack_it(hosts):
    done = hosts[0].gpuops(
        *("drill", "slow-link", "--interface", "eth0", "--delay", "20", "--for", "0.2", "--yes")
    )

    if done.returncode == 0:
        assert "injected, held 0.2 s and undone" in done.stdout
    else:
        assert done.returncode == 1
        assert "this kernel has no sch_netem" in done.stderr


def test_only_who_may_change_the_network_is_let(hosts):
    done = hosts[0].run(
        *("setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"),
        *(sys.executable, "-m", "gpuops", "drill", "cut-link", "--interface", "eth0", "--yes"),
    )

    assert done.returncode == 1
    assert "CAP_NET_ADMIN" in done.stderr
    assert link_is_up(hosts[0])
