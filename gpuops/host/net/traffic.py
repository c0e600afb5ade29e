"""Network interfaces, routes and queueing disciplines, and how much an interface has sent.

Sources: ``/proc/net/dev`` (proc_pid_net(5)), which counts what the process' own network namespace
sends; and for adapters that also carry RDMA, bypassing the kernel, ``port_xmit_data`` in units of
four bytes (sysfs-class-infiniband). The counters of an InfiniBand port include what its interface
(IPoIB) sends; those of RoCE do not.
"""

import array
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process.command import ask, find
from gpuops.host.procfs import read_text
from gpuops.host.trust import entries_of, number_of, text_of
from gpuops.model import UnknownReason

TIMEOUT_S = 5.0
_CAP_NET_ADMIN = 12  # linux/capability.h
_CAPABILITIES = re.compile(r"^CapEff:\s+([0-9a-fA-F]+)$", re.MULTILINE)
# Words of `ip route show` on a route's state, which `ip route replace` does not accept.
_STATE = frozenset({"linkdown", "dead", "offload", "trap", "pervasive", "notify"})
_ADDRESS6 = re.compile(r"\binet6 (\S+) scope global\b")
_QDISC = re.compile(r"^qdisc (\S+) (\S+): .*\broot\b", re.MULTILINE)


def interfaces(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the names of the network interfaces, sorted; none if they cannot be listed."""
    try:
        return tuple(sorted(path.name for path in (root / "sys/class/net").iterdir()))
    except OSError:
        return ()


def may_change_links(root: Path = Path("/")) -> bool:
    """Return whether this process has CAP_NET_ADMIN."""
    try:
        match = _CAPABILITIES.search(read_text(root / "proc/self/status"))
    except ProbeError:
        return False
    return match is not None and bool(int(match[1], 16) >> _CAP_NET_ADMIN & 1)


def routes(interface: str) -> tuple[tuple[str, ...], ...]:
    """Return the routes over *interface*, each as arguments for ``ip route replace``.

    A link that goes down loses them; the kernel restores only those of its own addresses.

    Raises:
        ProbeError: ``ip`` is missing, or fails.
    """
    return parse_routes(_output(["ip", "-o", "route", "show", "dev", interface]))


def parse_routes(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the routes in *text*, without the words on a route's state."""
    lines = (line.replace("\\", " ").split() for line in text.splitlines())
    return tuple(tuple(word for word in words if word not in _STATE) for words in lines if words)


def global_addresses6(interface: str) -> tuple[str, ...]:
    """Return the global IPv6 addresses of *interface* (``fd00::1/64``), lost when it goes down.

    Raises:
        ProbeError: As for `routes`.
    """
    return tuple(_ADDRESS6.findall(_output(["ip", "-6", "-o", "addr", "show", "dev", interface])))


def own_qdisc(interface: str) -> str | None:
    """Return the configured queueing discipline of *interface*, None for the kernel's default.

    Raises:
        ProbeError: ``tc`` is missing, or fails.
    """
    return parse_qdisc(_output(["tc", "qdisc", "show", "dev", interface]))


def parse_qdisc(text: str) -> str | None:
    """Return the name of the root discipline in *text*; the kernel's own have the handle 0."""
    match = _QDISC.search(text)
    return match[1] if match is not None and match[2] != "0" else None


def _output(words: Sequence[str]) -> str:
    program = find(Path("/"), words[0])
    if program is None:
        raise ProbeError(f"this machine has no {words[0]}", UnknownReason.MISSING_TOOL)
    answer = ask([program, *words[1:]], TIMEOUT_S)
    if answer.exit_code != 0:
        message = answer.first_line() or answer.ending
        raise ProbeError(f"`{' '.join(words)}`: {message}", UnknownReason.CRASH)
    return answer.output


_ROOT = Path("/")
_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s24s")
_ADDRESSES_MAX = 1024
_SENT = 8  # column of the bytes that were sent
_INFINIBAND = 32  # linux/if_arp.h
_RDMA_UNIT_BYTES = 4
_READ_BYTES = 2**18


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has *address*, None if there is none."""
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
    buffer = array.array("B", bytes(_IFREQ.size * _ADDRESSES_MAX))
    where, nbytes = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", nbytes, where))
    (n_found, _where) = struct.unpack("iL", answer)
    found = []
    for at in range(0, n_found, _IFREQ.size):
        label, sockaddr = _IFREQ.unpack_from(buffer, at)
        name = label.split(b"\0")[0].decode(errors="replace").partition(":")[0]
        found.append((name, sockaddr[4:8]))
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
        """Return how many bytes were sent so far, None if they cannot be read."""
        found = [number_of(port) for port in self._ports]
        rdma = [n * _RDMA_UNIT_BYTES for n in found if n is not None]
        if rdma and self._is_infiniband:
            return sum(rdma)
        own = self._own_bytes()
        return None if own is None else own + sum(rdma)

    def _own_bytes(self) -> int | None:
        # Opened each time: the file belongs to the thread that opens it; this costs microseconds.
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
