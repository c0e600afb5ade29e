"""Ports for those who listen only later, in another process."""

import random
import socket
from contextlib import suppress

# Below those that Linux gives to connections and to whoever asks for any: of the thousands that
# other tests make, one would have the port before it is used, or while its server is down.
PORTS = range(20_000, 32_000)
_RANDOM = random.SystemRandom()


def free_port(address="127.0.0.1"):
    """Return a port of *address* that nobody uses now; any where it is not ours to try."""
    (port,) = free_ports(1, address)
    return port


def free_ports(count, address="127.0.0.1"):
    """Return so many, all different."""
    tried = address if _is_ours(address) else "127.0.0.1"
    free = (port for port in _RANDOM.sample(PORTS, 100 + count) if _is_free(tried, port))
    return [next(free) for _ in range(count)]


def _is_ours(address):
    return _is_free(address, 0)


def _is_free(address, port):
    with socket.socket() as probe, suppress(OSError):
        probe.bind((address, port))
        return True
    return False
