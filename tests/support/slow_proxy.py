"""A TCP proxy that keeps what the server answers back for a while."""

import contextlib
import select
import socket
import threading
import time
from collections import deque


class SlowProxy:
    """Listens on a port of its own for *port*; answers take *delay_s*, at first none."""

    def __init__(self, port):
        self.delay_s = 0.0
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self):
        """End every connection."""
        self._ends.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self):
        while not self._ends.is_set():
            if select.select([self._listener], [], [], 0.1)[0]:
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
            self._pass_on(client, server)

    def _pass_on(self, client, server):
        held = deque()
        while not self._ends.is_set():
            ready = select.select([client, server], [], [], 0.02)[0]
            if client in ready:
                data = client.recv(1 << 16)
                if not data:
                    return
                server.sendall(data)
            if server in ready:
                data = server.recv(1 << 16)
                if not data:
                    return
                held.append((time.monotonic() + self.delay_s, data))
            while held and held[0][0] <= time.monotonic():
                client.sendall(held.popleft()[1])
