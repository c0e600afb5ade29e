"""A TCP proxy that flips single bits of what passes, at places that a seed decides."""

import random
import socket
import threading

from support.listening import Between, readable


class CorruptingProxy(Between):
    """Listens on a port of its own for *port*; flips a bit every *gap_bytes* or so, both ways."""

    def __init__(self, port, *, seed, gap_bytes, first_bytes=0):
        self.n_flips = 0
        self._random = random.Random(seed)
        self._gap_bytes = gap_bytes
        self._next = first_bytes + self._random.randrange(1, 2 * gap_bytes)
        self._lock = threading.Lock()
        super().__init__(port)

    def pass_on(self, client, server):
        for side in (client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not self.ends.is_set():
            for side in readable(client, server, within_s=0.1):
                data = side.recv(1 << 14)
                if not data:
                    return
                (server if side is client else client).sendall(self._spoilt(data))

    def _spoilt(self, data):
        data = bytearray(data)
        with self._lock:
            while self._next < len(data):
                data[self._next] ^= 1 << self._random.randrange(8)
                self.n_flips += 1
                self._next += self._random.randrange(1, 2 * self._gap_bytes)
            self._next -= len(data)
        return data
