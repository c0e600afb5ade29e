"""Network interfaces and bonds, from ``/sys/class/net``.

Documentation/ABI/testing/sysfs-class-net and networking/bonding.rst of Linux name the files. A file
that cannot be read is None: ``carrier`` of an interface that is switched off, ``speed`` of one
without link, the LACP partner without CAP_NET_ADMIN.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.trust import entries_of, is_there, number_of, text_of

_IFF_UP = 0x1  # linux/if.h
_DOWN = frozenset({"down", "lowerlayerdown", "notpresent"})
_ADDRESS = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5,19}")
_NO_ADDRESS = re.compile(r"[0:]*")
# Mb/s; an unknown speed is -1, in some drivers as an unsigned number.
_SPEED_MAX = 10**7
_MBITS_PER_GB = 8000
# IEEE 802.1AX, the actor's port state: nothing was heard from a partner, or not for a while.
_DEFAULTED, _EXPIRED = 0x40, 0x80
LACP = "802.3ad"


@dataclass(frozen=True, slots=True, kw_only=True)
class BondSlave:
    """An interface's part in its bond; ``actor_state``: the bits of LACP, None in other modes."""

    mii_status: str | None = None
    actor_state: int | None = None

    @property
    def is_alone(self) -> bool:
        """Return whether no LACP partner answers on this interface."""
        return self.actor_state is not None and bool(self.actor_state & (_DEFAULTED | _EXPIRED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One interface; None: not reported.

    ``address`` is the hardware's own, also in a bond. ``is_physical``: it belongs to a device,
    ``has_rdma``: to one with an RDMA port, ``is_usb``: to one on USB. ``rate_gbs``: of slaves, in
    GB/s; sysfs gives Mb/s.
    """

    name: str
    address: str | None = None
    is_physical: bool = False
    has_rdma: bool = False
    is_usb: bool = False
    is_switched_on: bool | None = None
    carrier: bool | None = None
    operstate: str | None = None
    rate_gbs: float | None = None
    carrier_downs: int | None = None
    slave: BondSlave | None = None

    @property
    def has_link(self) -> bool | None:
        """Return whether it can carry data, None if it does not say."""
        if self.is_switched_on is False:
            return False
        if self.carrier is not None:
            return self.carrier
        if self.operstate == "up":
            return True
        return False if self.operstate in _DOWN else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bond:
    """One bond: ``mode`` as ``802.3ad``, the names of its slaves, the partner of its LACP group.

    ``has_partner`` is None in other modes, and for a reader without CAP_NET_ADMIN.
    """

    name: str
    mode: str | None = None
    slaves: tuple[str, ...] = ()
    has_partner: bool | None = None


@dataclass(frozen=True, slots=True)
class Interfaces:
    """The interfaces of this network namespace, and its bonds.

    ``in_host_namespace``: it is the machine's first one, not a container's; None if unknown.
    """

    interfaces: tuple[Interface, ...] = ()
    bonds: tuple[Bond, ...] = ()
    in_host_namespace: bool | None = None


def read_interfaces(root: Path = Path("/")) -> Interfaces:
    """Return all interfaces and bonds; none if they cannot be listed."""
    # That file of the bonding driver is no interface.
    folders = [
        path for path in entries_of(root / "sys/class/net") if path.name != "bonding_masters"
    ]
    return Interfaces(
        tuple(_interface(folder) for folder in folders),
        tuple(_bond(folder) for folder in folders if is_there(folder / "bonding")),
        _is_first_namespace(root / "proc/sys/net/core"),
    )


def _is_first_namespace(settings: Path) -> bool | None:
    """Return whether the kernel shows the settings that are not of one namespace, None if none.

    linux net/core/sysctl_net_core.c: only the first namespace has ``netdev_max_backlog``, and each
    has ``somaxconn``.
    """
    if is_there(settings / "netdev_max_backlog"):
        return True
    return False if is_there(settings / "somaxconn") else None


def _interface(folder: Path) -> Interface:
    is_slave, is_physical = is_there(folder / "bonding_slave"), is_there(folder / "device")
    # Reading the speed asks the adapter's firmware, and the others are compared with nothing.
    speed = number_of(folder / "speed") if is_slave else None
    downs = number_of(folder / "carrier_down_count") if is_physical else None
    flags = number_of(folder / "flags", 16)
    return Interface(
        name=folder.name,
        address=_address(folder / ("bonding_slave/perm_hwaddr" if is_slave else "address")),
        is_physical=is_physical,
        has_rdma=is_there(folder / "device/infiniband"),
        is_usb=is_physical and is_there(folder / "device/bInterfaceNumber"),
        is_switched_on=None if flags is None else bool(flags & _IFF_UP),
        carrier={"0": False, "1": True}.get(text_of(folder / "carrier") or ""),
        operstate=text_of(folder / "operstate") or None,
        rate_gbs=speed / _MBITS_PER_GB if speed and 0 < speed < _SPEED_MAX else None,
        carrier_downs=downs if downs is not None and downs >= 0 else None,
        slave=_slave(folder / "bonding_slave") if is_slave else None,
    )


def _slave(folder: Path) -> BondSlave:
    return BondSlave(
        mii_status=text_of(folder / "mii_status") or None,
        actor_state=number_of(folder / "ad_actor_oper_port_state"),
    )


def _bond(folder: Path) -> Bond:
    mode = (text_of(folder / "bonding/mode") or "").partition(" ")[0]
    partner = text_of(folder / "bonding/ad_partner_mac") if mode == LACP else None
    return Bond(
        name=folder.name,
        mode=mode or None,
        slaves=tuple((text_of(folder / "bonding/slaves") or "").split()),
        has_partner=None if not partner else _NO_ADDRESS.fullmatch(partner) is None,
    )


def _address(path: Path) -> str | None:
    text = text_of(path) or ""
    return text if _ADDRESS.fullmatch(text) and not _NO_ADDRESS.fullmatch(text) else None
