"""How much this machine has sent over the interface that has an address.

Sources: ``/proc/net/dev`` (proc_pid_net(5)), which counts what the process' own network namespace
sends; and for adapters that also carry RDMA, past the kernel, ``port_xmit_data`` in units of four
bytes (sysfs-class-infiniband). The counters of an InfiniBand port have what its interface (IPoIB)
sends in them; those of RoCE have not.
"""

import array
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from gpuops.host.files import entries_of, number_of, text_of

_ROOT = Path("/")
_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s24s")
_ADDRESSES_MAX = 1024
_SENT = 8  # column of the bytes that were sent
_INFINIBAND = 32  # linux/if_arp.h
_RDMA_UNIT_BYTES = 4
_READ_BYTES = 2**18


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has *address*, None where none has, or it is none."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        return _interface_of_6(wanted.packed.hex())
    try:
        found = _addresses()
    except OSError:
        return None
    return next((name for name, packed in found if packed == wanted.packed), None)


def _addresses() -> list[tuple[str, bytes]]:
    """Return all IPv4 addresses with their interfaces; see netdevice(7)."""
    room = array.array("B", bytes(_IFREQ.size * _ADDRESSES_MAX))
    where, nbytes = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", nbytes, where))
    (n_found, _where) = struct.unpack("iL", answer)
    found = []
    for at in range(0, n_found, _IFREQ.size):
        label, place = _IFREQ.unpack_from(room, at)
        name = label.split(b"\0")[0].decode(errors="replace").partition(":")[0]
        found.append((name, place[4:8]))
    return found


def _interface_of_6(digits: str, root: Path = _ROOT) -> str | None:
    for line in (text_of(root / "proc/self/net/if_inet6") or "").splitlines():
        words = line.split()
        if len(words) == 6 and words[0] == digits:
            return words[5]
    return None


class Traffic:
    """The counters of *interface*."""

    def __init__(self, interface: str, root: Path = _ROOT) -> None:
        self._name = interface.encode()
        self._dev = root / "proc/self/net/dev"
        here = root / "sys/class/net" / interface
        self._ports = [
            port / "counters/port_xmit_data"
            for adapter in entries_of(here / "device/infiniband")
            for port in entries_of(adapter / "ports")
        ]
        self._is_infiniband = number_of(here / "type") == _INFINIBAND

    def sent_bytes(self) -> int | None:
        """Return how many bytes were sent so far, None where it cannot be read."""
        found = [number_of(port) for port in self._ports]
        rdma = [n * _RDMA_UNIT_BYTES for n in found if n is not None]
        if rdma and self._is_infiniband:
            return sum(rdma)
        own = self._own_bytes()
        return None if own is None else own + sum(rdma)

    def _own_bytes(self) -> int | None:
        # Opened each time: the file is of the thread that opens it, and costs microseconds.
        try:
            fd = os.open(self._dev, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            raw = os.read(fd, _READ_BYTES)
        except OSError:
            return None
        finally:
            os.close(fd)
        for line in raw.splitlines():
            name, _, rest = line.partition(b":")
            if name.strip() == self._name:
                columns = rest.split()
                is_there = len(columns) > _SENT and columns[_SENT].isdigit()
                return int(columns[_SENT]) if is_there else None
        return None
