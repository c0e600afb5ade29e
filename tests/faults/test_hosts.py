"""The hosts of these tests are hosts: own addresses, links that can be cut, nothing left over."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations

import pytest
from support.hosts import Hosts, remove, run_ip, sweep
from support.runs import is_alive, wait_until

from gpuops.host.procfs import process

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 4321))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(b"hello")
    peer.close()
"""
CALL = """
import socket, sys
socket.create_connection((sys.argv[1], 4321), timeout=float(sys.argv[2])).recv(5)
"""

PRINT_UDP_CODE = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 4321))
print("ready", flush=True)
while True:
    print(server.recv(100).decode(), flush=True)
"""
PRINT_UDP = [sys.executable, "-c", PRINT_UDP_CODE]
SEND_UDP = """
import socket, sys
address, text = sys.argv[1:]
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(text.encode(), (address, 4321))
"""


@pytest.fixture
def hosts(tmp_path):
    with Hosts(2, tmp_path) as made:
        yield made


def can_reach(one, other, limit_s):
    return one.run(sys.executable, "-c", CALL, other.address, str(limit_s)).returncode == 0


def reached(hosts, limit_s):
    """Return which hosts reach which, by name."""
    pairs = list(combinations(hosts, 2))
    with ThreadPoolExecutor(len(pairs)) as pool:
        found = pool.map(lambda pair: can_reach(*pair, limit_s), pairs)
        return {
            (one.name, other.name) for (one, other), yes in zip(pairs, found, strict=True) if yes
        }


def end(hosts):
    for host in hosts:
        host.kill_all()


def send(one, other, text):
    assert one.run(sys.executable, "-c", SEND_UDP, other.address, text).returncode == 0


def listening(host):
    server = host.popen([sys.executable, "-c", LISTEN, host.address], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"ready\n"
    return server


def test_hosts_reach_each_other_until_a_cable_is_pulled(hosts):
    with listening(hosts[1]):
        assert can_reach(hosts[0], hosts[1], 10)

        hosts[1].cut()
        assert not can_reach(hosts[0], hosts[1], 1)

        hosts[1].heal()
        wait_until(lambda: can_reach(hosts[0], hosts[1], 1), 20)
        hosts[1].kill_all()


def test_hosts_of_one_group_reach_each_other_alone(tmp_path):
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(4, tmp_path))
        for host in hosts:
            stack.enter_context(listening(host))

        hosts.partition(hosts[:2], hosts[2:3])  # the last one is in no group
        wait_until(lambda: reached(hosts, 1) == {("n0", "n1")}, 60)
        hosts.partition([hosts[0], hosts[3]], hosts[1:3])
        wait_until(lambda: reached(hosts, 1) == {("n0", "n3"), ("n1", "n2")}, 60)
        hosts.heal()
        wait_until(lambda: len(reached(hosts, 1)) == 6, 60)
        end(hosts)


def test_what_one_host_sends_is_lost_and_what_it_is_sent_arrives(hosts):
    with (
        hosts[0].popen(PRINT_UDP, stdout=subprocess.PIPE) as one,
        hosts[1].popen(PRINT_UDP, stdout=subprocess.PIPE) as other,
    ):
        assert one.stdout.readline() == other.stdout.readline() == b"ready\n"
        hosts.lose(hosts[0], hosts[1])
        send(hosts[0], hosts[1], "lost")
        send(hosts[1], hosts[0], "back")
        assert one.stdout.readline() == b"back\n"

        hosts.heal()
        send(hosts[0], hosts[1], "healed")
        assert other.stdout.readline() == b"healed\n"
        end(hosts)


def test_a_host_reaches_the_machine_around_it(hosts):
    code = (
        "import socket, sys; s = socket.create_server((sys.argv[1], 4321)); print('up', flush=1);"
    )
    around = subprocess.Popen(
        [sys.executable, "-c", f"{code} s.accept()[0].sendall(b'hello')", hosts.address],
        stdout=subprocess.PIPE,
    )
    with around:
        assert around.stdout.readline() == b"up\n"
        assert hosts[0].run(sys.executable, "-c", CALL, hosts.address, "10").returncode == 0


def test_a_host_knows_its_name_and_folders(hosts):
    code = "import os; print(os.environ['SLURMD_NODENAME'], os.environ['GPUOPS_RUN_DIR'])"

    names = [host.run(sys.executable, "-c", code).stdout.split() for host in hosts]

    assert names == [[host.name, str(host.folder / "runs")] for host in hosts]
    assert {host.name for host in hosts} == {"n0", "n1"}


def test_a_frozen_host_stands_still_and_a_thawed_one_goes_on(hosts):
    child = hosts[0].popen(SLEEP)
    other = hosts[1].popen(SLEEP)
    wait_until(lambda: child.pid in hosts[0].pids())

    hosts[0].freeze()
    wait_until(lambda: state_of(child.pid) == "T")
    assert state_of(other.pid) != "T"
    hosts[0].thaw()
    wait_until(lambda: state_of(child.pid) in "SR")


def test_a_killed_host_leaves_no_process(hosts):
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True); print(p.pid, flush=True); time.sleep(600)"
    )
    child = hosts[0].popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with child:
        daemon = int(child.stdout.readline())

        hosts[0].kill_all()

        assert child.returncode == -9
    assert not is_alive(daemon)


def test_a_throttled_link_is_slow_and_then_no_more(hosts):
    hosts[0].throttle(64)
    assert "tbf" in qdisc(hosts[0])
    hosts[0].unslow()
    assert "tbf" not in qdisc(hosts[0])


def test_what_a_killed_session_left_is_removed(tmp_path):
    hosts = Hosts(1, tmp_path)
    child = hosts[0].popen(SLEEP)
    wait_until(lambda: child.pid in hosts[0].pids())
    sweep()
    assert child.poll() is None, "hosts of a living session stay"

    run_ip("link", "set", "dev", hosts.bridge, "alias", f"{os.getpid()} 1")
    sweep()

    assert hosts.bridge not in run_ip("-o", "link", "show")
    assert f"{hosts.bridge}h0" not in run_ip("netns", "list")
    assert child.wait(20) == -9


def test_two_sets_of_hosts_do_not_meet(hosts, tmp_path):
    with Hosts(1, tmp_path / "more") as others:
        assert others.subnet != hosts.subnet
        remove("goonobody")  # names nothing, does nothing
        assert others.bridge in run_ip("-o", "link", "show")


def qdisc(host):
    words = ["tc", "qdisc", "show", "dev", host.link]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def state_of(pid):
    return process(pid).state
