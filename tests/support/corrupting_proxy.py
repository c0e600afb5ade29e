"""A TCP proxy that flips single bits of what passes, at places that a seed decides."""

import contextlib
import random
import select
import socket
import threading


class CorruptingProxy:
    """Listens on a port of its own for *port*; flips a bit every *gap_bytes* or so, both ways."""

    def __init__(self, port, *, seed, gap_bytes, first_bytes=0):
        self.n_flips = 0
        self._target = ("127.0.0.1", port)
        self._random = random.Random(seed)
        self._gap_bytes = gap_bytes
        self._next = first_bytes + self._random.randrange(1, 2 * gap_bytes)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self):
        """End every connection."""
        self._ends.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_why):
        self.close()

    def _accept(self):
        while not self._ends.is_set():
            with contextlib.suppress(OSError):
                client, _address = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client):
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(self._target, 10) as server,
        ):
            for side in (client, server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._ends.is_set():
                for side in select.select([client, server], [], [], 0.1)[0]:
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
