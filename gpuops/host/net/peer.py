"""The user at the other end of a TCP connection within this machine."""

import ipaddress
import socket
import struct
from pathlib import Path

_UID = 6  # behind the column of the own end in /proc/net/tcp, see proc_pid_net(5)


def peer_uid(sock: socket.socket, root: Path = Path("/")) -> int | None:
    """Return the uid of the socket that *sock* is connected to; None if it is not of this machine.

    SO_PEERCRED answers for Unix sockets only. A socket that its process has closed is root's in the
    table; nobody reads what is sent to it.
    """
    name = "tcp6" if sock.family == socket.AF_INET6 else "tcp"
    try:
        ends = f" {_shown(*sock.getpeername()[:2])} {_shown(*sock.getsockname()[:2])} ".encode()
        table = (root / "proc/self/net" / name).read_bytes()
    except OSError:
        return None
    # Not line by line: the table of a busy node has megabytes, and whoever asks costs us this.
    row = table[table.find(ends) :].partition(b"\n")[0] if ends in table else b""
    return int(row.split()[_UID]) if row else None


def _shown(address: str, port: int) -> str:
    """Return an end as the kernel prints it: 32-bit words in the machine's byte order."""
    packed = ipaddress.ip_address(address.partition("%")[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
