"""How connections between nodes are set up."""

import socket

# A peer whose machine is gone sends no word of it: found out after 60 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


def set_lasting(sock: socket.socket) -> None:
    """Have small messages sent at once, and the connection end 60 s after its other machine did."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
