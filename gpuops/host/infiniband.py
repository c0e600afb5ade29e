"""Network adapters for RDMA (InfiniBand, RoCE), from ``/sys/class/infiniband``.

Documentation/ABI/stable/sysfs-class-infiniband of Linux names the files; a counter that the adapter
does not have is missing or cannot be read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuops.host.trust import entries_of, is_there, number_of, text_of

_RATE = re.compile(r"([0-9.]+) Gb/sec")
_BITS_PER_BYTE = 8
# Counters of the port itself saturate at their greatest value until they are cleared (InfiniBand
# Architecture Specification, volume 1, PortCounters attribute); those of hw_counters/ do not.
_FULL = {
    "link_downed": 0xFF,
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of one adapter; None: not reported.

    ``guid`` is the adapter's node GUID. ``state`` and ``phys_state`` are words (``ACTIVE``,
    ``LinkUp``); ``rate_gbs`` is in GB/s, and sysfs gives Gb/s. ``counters`` are error counts since
    the driver was loaded, by the names of their files; ``carrier_downs`` among them says how often
    the network interface lost its carrier.
    """

    device: str
    number: int
    guid: str
    state: str | None = None
    phys_state: str | None = None
    rate_gbs: float | None = None
    link_layer: str | None = None
    firmware: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return ``"mlx5_0/1"``."""
        return f"{self.device}/{self.number}"

    @property
    def is_active(self) -> bool:
        """Return whether data can flow: the subnet manager or the network interface is up."""
        return self.state == "ACTIVE"


def is_full(port: Port, name: str) -> bool:
    """Return whether the counter *name* of *port* is saturated."""
    return name in _FULL and port.counters.get(name) == _FULL[name]


@dataclass(frozen=True, slots=True)
class RdmaPorts:
    """All ports of this node's adapters, without those of virtual functions."""

    ports: tuple[Port, ...] = ()


def read_fabric(root: Path = Path("/")) -> RdmaPorts:
    """Return the ports; none without an RDMA driver."""
    return RdmaPorts(tuple(port for device in _adapters(root) for port in _ports(device)))


def _adapters(root: Path) -> Iterator[Path]:
    for device in entries_of(root / "sys/class/infiniband"):
        # A virtual function belongs to a guest, which monitors its ports.
        if not is_there(device / "device/physfn"):
            yield device


def _ports(device: Path) -> list[Port]:
    guid, firmware = text_of(device / "node_guid"), text_of(device / "fw_ver")
    ports = []
    for folder in entries_of(device / "ports"):
        if not folder.name.isdecimal():
            continue
        ports.append(
            Port(
                device=device.name,
                number=int(folder.name),
                guid=guid or device.name,
                state=_word(folder / "state"),
                phys_state=_word(folder / "phys_state"),
                rate_gbs=_rate_gbs(folder / "rate"),
                link_layer=text_of(folder / "link_layer"),
                firmware=firmware or None,
                counters=_counters(device, folder),
            )
        )
    return ports


def _word(path: Path) -> str | None:
    """Return ``"ACTIVE"`` of ``"4: ACTIVE"``."""
    text = text_of(path)
    return text.rpartition(": ")[2] if text else None


def _rate_gbs(path: Path) -> float | None:
    match = _RATE.match(text_of(path) or "")
    return None if match is None else float(match[1]) / _BITS_PER_BYTE


def _counters(device: Path, port: Path) -> Mapping[str, int]:
    counters = {}
    for folder in (port / "counters", port / "hw_counters"):
        for file in entries_of(folder):
            if _is_traffic(file.name):
                continue
            value = number_of(file)
            if value is not None:
                counters[file.name] = value
    downs = _carrier_downs(device, port)
    if downs is not None:
        counters["carrier_downs"] = downs
    return counters


def _is_traffic(name: str) -> bool:
    return name.endswith(("_data", "_packets", "_requests", "lifespan", "_pkts")) or "cast" in name


def _carrier_downs(device: Path, port: Path) -> int | None:
    """Return the losses of carrier of the one network interface of *device*'s port."""
    for interface in entries_of(device / "device/net"):
        number = number_of(interface / "dev_port")
        if number is None or number + 1 == int(port.name):
            downs = number_of(interface / "carrier_down_count")
            if downs is not None:
                return downs
            changes = number_of(interface / "carrier_changes")
            return None if changes is None else changes // 2
    return None


# InfiniBand Architecture Specification, volume 1, partition keys: the low bits are the partition (0
# is none), the top bit is full membership. Limited members reach only full members.
_PARTITION, _FULL_MEMBER = 0x7FFF, 0x8000


@dataclass(frozen=True, slots=True, kw_only=True)
class PkeyTable:
    """The valid P_Keys of one InfiniBand port, as far as they were read.

    ``is_complete``: all entries were read, so that a key which is not among ``keys`` is missing.
    """

    device: str
    number: int
    guid: str
    is_active: bool
    keys: tuple[int, ...] = ()
    is_complete: bool = False

    def has(self, key: int) -> bool:
        """Return whether the port is a member as *key* says; a full one is a limited one, too."""
        return key in self.keys or key | _FULL_MEMBER in self.keys


@dataclass(frozen=True, slots=True)
class PkeyTables:
    """The tables of all InfiniBand ports, without those of virtual functions."""

    ports: tuple[PkeyTable, ...] = ()


def limited(key: int) -> int:
    """Return the P_Key of the same partition without full membership."""
    return key & _PARTITION


def read_pkeys(root: Path, expected: Sequence[int]) -> PkeyTables:
    """Return the P_Keys of each InfiniBand port.

    Each entry asks the adapter's firmware, and a table has 128 of them: reading ends when all
    *expected* keys are found; without any, at the first valid one.
    """
    tables = []
    for device in _adapters(root):
        guid = text_of(device / "node_guid") or device.name
        for folder in entries_of(device / "ports"):
            # A RoCE port has one entry, for form's sake.
            if folder.name.isdecimal() and text_of(folder / "link_layer") == "InfiniBand":
                table = PkeyTable(
                    device=device.name,
                    number=int(folder.name),
                    guid=guid,
                    is_active=_word(folder / "state") == "ACTIVE",
                )
                tables.append(_with_keys(table, folder / "pkeys", expected))
    return PkeyTables(tuple(tables))


def _with_keys(table: PkeyTable, folder: Path, expected: Sequence[int]) -> PkeyTable:
    entries = sorted(
        (path for path in entries_of(folder) if path.name.isdecimal()),
        key=lambda path: int(path.name),
    )
    unread = 0
    for entry in entries:
        key = number_of(entry, 16)
        if key is None or not 0 <= key <= _PARTITION | _FULL_MEMBER:
            unread += 1
        elif limited(key):
            table = replace(table, keys=(*table.keys, key))
            if all(table.has(wanted) for wanted in expected):
                return table
    return replace(table, is_complete=bool(entries) and not unread)
