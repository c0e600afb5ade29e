"""What processes and their children did: bytes through files and TCP, and processor time.

``/proc/PID/io`` does not count ``recv`` and ``send``; the kernel counts them for each connection
(``tcpi_bytes_received``, ``tcpi_bytes_acked`` in linux/tcp.h) and answers by sock_diag(7), which
needs no privilege. Connections of another network namespace are not seen.
"""

import os
import re
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from gpuops.host.trust import text_of

_IO = re.compile(r"^(?:[rw]char|read_bytes): (\d+)$", re.MULTILINE)
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_PPID, _UTIME, _STIME = 1, 11, 12  # of the fields after the name in proc(5)'s stat
_TREE_MAX = 256
_SOCK_DIAG = 4  # the netlink family NETLINK_SOCK_DIAG; the rest is of linux/inet_diag.h
_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_INFO = 2
_ALL_STATES = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_NEAR_OFFSET, _FAR_OFFSET, _PORTS_OFFSET, _ADDRESS_SIZE = 8, 24, 4, 16
_PORTS = struct.Struct("!HH")
_INODE_OFFSET, _ATTRIBUTES_OFFSET = 68, 72
_ATTRIBUTE = struct.Struct("=HH")
_ACKED_OFFSET = 120
_AMOUNTS = struct.Struct("=QQ")
_ENDS = frozenset({2, 3})  # NLMSG_ERROR, NLMSG_DONE
_ANSWER_S = 1.0
# Object stores and proxies listen below it, the ranks of a job never do.
_RANK_PORT_MIN = 1024
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as IPv6 writes it


class TrafficKind(StrEnum):
    """What a counter counts."""

    FILES = "files"  # of one process, both ways
    MAIN_THREAD = "main_thread"  # of files, by the main thread alone
    RECEIVED = "received"  # of one connection
    SENT = "sent"
    CPU_TICKS = "cpu_ticks"  # of one process
    FROM_RANK = "from_rank"  # received of another rank, or of what may be one on another host


class TcpEnd(NamedTuple):
    """One end of a connection: an address as bytes, without padding, and a port."""

    address: bytes
    port: int


class Connection(NamedTuple):
    """What a TCP connection has received and sent, and its ends."""

    received: int
    sent: int
    near: TcpEnd
    far: TcpEnd


# By kind, and process or inode of the connection.
Traffic = Mapping[tuple[TrafficKind, int], int]


def read_traffic(pids: Iterable[int], root: Path = Path("/")) -> dict[int, Traffic]:
    """Return for each of *pids* the bytes so far, of its tree of processes; what can be read.

    *pids* are the ranks of one job here.
    """
    trees = process_trees(pids, root)
    inodes = {pid: {n for each in tree for n in _inodes(each, root)} for pid, tree in trees.items()}
    connections = tcp_bytes() if any(inodes.values()) else {}
    held = {
        pid: {n: connections[n] for n in own if n in connections} for pid, own in inodes.items()
    }
    owners = {(c.near, c.far): pid for pid, own in held.items() for c in own.values()}
    found: dict[int, Traffic] = {}
    for pid, tree in trees.items():
        counters = {(TrafficKind.FILES, each): _file_bytes(f"{each}", root) for each in tree}
        counters |= {(TrafficKind.CPU_TICKS, each): _ticks(each, root) for each in tree}
        counters[TrafficKind.MAIN_THREAD, pid] = _file_bytes(f"{pid}/task/{pid}", root)
        for inode, connection in held[pid].items():
            counters[TrafficKind.RECEIVED, inode] = connection.received
            counters[TrafficKind.SENT, inode] = connection.sent
            if leads_to_rank(connection, pid, owners):
                counters[TrafficKind.FROM_RANK, inode] = connection.received
        found[pid] = counters
    return found


def leads_to_rank(
    connection: Connection, pid: int, owners: Mapping[tuple[TcpEnd, TcpEnd], int]
) -> bool:
    """Return whether *connection* of rank *pid* leads to another rank, or perhaps to one.

    *owners* are the ranks here by the ends of their connections.
    """
    near, far = connection.near, connection.far
    if near.address == far.address:  # on this host
        return owners.get((far, near), pid) != pid
    return min(near.port, far.port) >= _RANK_PORT_MIN


def process_trees(pids: Iterable[int], root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """Return each of *pids* with its descendants, itself first."""
    children: dict[int, list[int]] = {}
    for entry in _entries(root / "proc"):
        if entry.isdecimal():
            fields = _stat_fields(int(entry), root)
            if len(fields) > _PPID:
                children.setdefault(int(fields[_PPID]), []).append(int(entry))
    trees = {}
    for pid in pids:
        tree = [pid]
        for each in tree:  # grows meanwhile
            tree += children.get(each, ()) if len(tree) < _TREE_MAX else ()
        trees[pid] = tuple(tree)
    return trees


def tcp_bytes() -> dict[int, Connection]:
    """Return the TCP connections here, by inode."""
    found: dict[int, Connection] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asker:
                asker.settimeout(_ANSWER_S)
                request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ALL_STATES)
                size = _HEADER.size + len(request)
                asker.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
                found |= dict(_connections(asker))
        except (OSError, struct.error):
            continue  # a kernel or a sandbox without it
    return found


def _connections(asker: socket.socket) -> Iterator[tuple[int, Connection]]:
    while True:
        data, offset = asker.recv(2**17), 0
        while offset < len(data):
            size, kind, *_ = _HEADER.unpack_from(data, offset)
            if kind in _ENDS or size < _HEADER.size:
                return
            body = data[offset + _HEADER.size : offset + size]
            amounts = _amounts(body)
            if amounts is not None:
                inode = int.from_bytes(body[_INODE_OFFSET:_ATTRIBUTES_OFFSET], "little")
                yield inode, Connection(*amounts, *_endpoints(body))
            offset += size + 3 & ~3


def _endpoints(body: bytes) -> tuple[TcpEnd, TcpEnd]:
    near_port, far_port = _PORTS.unpack_from(body, _PORTS_OFFSET)
    near, far = _address(body, _NEAR_OFFSET), _address(body, _FAR_OFFSET)
    return TcpEnd(near, near_port), TcpEnd(far, far_port)


def _address(body: bytes, offset: int) -> bytes:
    """Return an address of one answer; the same bytes, whichever family its end is of."""
    address = body[offset : offset + _ADDRESS_SIZE]
    return address[:4] if body[0] == socket.AF_INET else address.removeprefix(_MAPPED)


def _amounts(body: bytes) -> tuple[int, int] | None:
    """Return the bytes received and sent in one answer; None where the kernel has none."""
    offset = _ATTRIBUTES_OFFSET
    while offset + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, offset)
        if kind == _INFO and size >= _ATTRIBUTE.size + _ACKED_OFFSET + _AMOUNTS.size:
            sent, received = _AMOUNTS.unpack_from(body, offset + _ATTRIBUTE.size + _ACKED_OFFSET)
            return received, sent
        offset += max(size + 3 & ~3, _ATTRIBUTE.size)
    return None


def _inodes(pid: int, root: Path) -> Iterator[int]:
    folder = root / f"proc/{pid}/fd"
    for name in _entries(folder):
        try:
            match = _SOCKET.fullmatch(str((folder / name).readlink()))
        except OSError:
            continue
        if match:
            yield int(match[1])


def _ticks(pid: int, root: Path) -> int:
    return sum(map(int, _stat_fields(pid, root)[_UTIME : _STIME + 1]))


def _stat_fields(pid: int, root: Path) -> list[str]:
    return (text_of(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()


def _file_bytes(task: str, root: Path) -> int:
    return sum(map(int, _IO.findall(text_of(root / f"proc/{task}/io") or "")))


def _entries(folder: Path) -> Collection[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError:
        return ()
