"""Which addresses are this machine's, and what to listen on."""

import shutil
import socket
import subprocess
import sys

import pytest

from gpuops.control.tcp.client_connection import is_local, listen_address


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "0.0.0.0"])
def test_our_own_addresses_are_local(host):
    assert is_local(host)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_our_own_ipv6_address_is_local():
    assert is_local("::1")
    assert listen_address("::1") == "::1"
    assert not is_local("2001:db8::1")


# RFC 5737 and RFC 2606: nobody's.
@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "", "not a host"])
def test_others_are_not(host):
    assert not is_local(host)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")]
)
def test_a_loopback_that_was_asked_for_is_listened_on(host, expected):
    assert listen_address(host) in (expected, "::1")


def test_there_is_nothing_to_listen_on_for_another_machine():
    with pytest.raises(OSError, match="no address of this machine"):
        listen_address("192.0.2.1")


IN_A_NAMESPACE = """
import subprocess, sys
def ip(*words): subprocess.run(["ip", *words], check=True)
ip("link", "set", "lo", "up")
ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
ip("addr", "add", "10.77.0.5/24", "dev", "v0")
ip("link", "set", "v0", "up")
if sys.argv[1] == "nonlocal":
    open("/proc/sys/net/ipv4/ip_nonlocal_bind", "w").write("1")
from gpuops.control.tcp.client_connection import is_local, listen_address
print([is_local(host) for host in ("10.77.0.5", "10.77.0.6", "192.0.2.1", "127.0.0.1")])
print(listen_address("10.77.0.5"))
"""


def can_unshare():
    return (
        shutil.which("ip")
        and shutil.which("unshare")
        and subprocess.run(
            ["unshare", "--net", "true"], check=False, capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.parametrize("binding", ["ordinary", "nonlocal"])
def test_inside_a_network_namespace_its_own_addresses_count(binding):
    if not can_unshare():
        pytest.skip("needs root and network namespaces")
    command = ["unshare", "--net", "--mount", sys.executable, "-c", IN_A_NAMESPACE, binding]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "veth" in done.stderr or "Read-only" in done.stderr:
        pytest.skip(done.stderr)

    assert done.stdout.split("\n")[:2] == ["[True, False, False, True]", "10.77.0.5"], done.stderr
