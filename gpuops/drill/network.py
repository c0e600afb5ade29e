"""What the injectors that touch the network look at first."""

import ipaddress

from gpuops.drill.scenario import Scene
from gpuops.errors import DrillError, UsageError
from gpuops.host.links import interfaces, may_change_links


def check_interface(scene: Scene, interface: str) -> str:
    """Return *interface* if it is one and may be changed.

    Raises:
        UsageError: It is the loopback, which much else on this machine needs.
        DrillError: It is not there, or this process may not change it.
    """
    there = interfaces(scene.root)
    if interface == "lo":
        raise UsageError("--interface lo: too much else on this machine needs the loopback")
    if interface not in there:
        raise DrillError(f"no interface {interface}; there are {', '.join(there) or 'none'}")
    check_permission(scene)
    return interface


def check_permission(scene: Scene) -> None:
    """Return if this process may change links and routes.

    Raises:
        DrillError: It may not.
    """
    if not may_change_links(scene.root):
        raise DrillError("changing the network needs root (CAP_NET_ADMIN); try sudo")


def host_prefix(address: str) -> str:
    """Return *address* with the prefix length that means it alone.

    Raises:
        UsageError: Not an IP address.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(f"--peer {address}: not an IP address") from None
    return f"{parsed}/{parsed.max_prefixlen}"
