"""Whether an address is this machine's, and what to listen on, told by the kernel.

Our own host name is not looked up: inside a container, a network namespace or a badly kept
``/etc/hosts`` it leads elsewhere. What others call us is in the endpoint.
"""

import ipaddress
import socket
import time
from contextlib import suppress

from gpuops.control.tcp.client_connection import SocketAddress, is_literal, resolve

RESOLVE_TIMEOUT_S = 5.0
_DISCARD_PORT = 9
_LOCAL_NAMES = ("localhost", "ip6-localhost")


def is_local(host: str, *, timeout_s: float = RESOLVE_TIMEOUT_S) -> bool:
    """Say whether *host* (a name or an address) is an address of this machine.

    False where no name server knows it.
    """
    return bool(_local_addresses(host, timeout_s))


def listen_address(host: str, *, timeout_s: float = RESOLVE_TIMEOUT_S) -> str:
    """Return the address to listen on so that others reach us as *host*.

    Debian's ``/etc/hosts`` gives a machine's own name the address 127.0.1.1, where others do not
    come: every address then, guarded by the job's token.

    Raises:
        OSError: *host* is no address of this machine.
    """
    local = _local_addresses(host, timeout_s)
    if not local:
        raise OSError(f"{host} is no address of this machine")
    if is_literal(host) or host in _LOCAL_NAMES:
        return local[0]
    reachable = [address for address in local if not ipaddress.ip_address(address).is_loopback]
    return reachable[0] if reachable else "::" if ":" in local[0] else "0.0.0.0"  # noqa: S104 see above


def _local_addresses(host: str, timeout_s: float) -> list[str]:
    try:
        found = resolve(host, 0, time.monotonic() + timeout_s)
    except OSError:
        return []
    return [str(address[1][0]) for address in found if _is_local_address(address)]


def _is_local_address(address: SocketAddress) -> bool:
    family, (host, _port, *rest) = address
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0, *rest))
    except OSError:
        return False
    plain = ipaddress.ip_address(str(host).partition("%")[0])
    if plain.is_unspecified or plain.is_loopback:
        return True
    # Machines with floating addresses (ip_nonlocal_bind) bind any; but the way to an address of
    # another machine begins at one of ours. Nothing is sent.
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT, *rest))
        return bool(probe.getsockname()[0] == host)
    return False
