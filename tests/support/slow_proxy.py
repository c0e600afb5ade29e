"""A TCP proxy that keeps what the server answers back for a while."""

import time
from collections import deque

from support.listening import Between, readable


class SlowProxy(Between):
    """Listens on a port of its own for *port*; answers take *delay_s*, at first none."""

    def __init__(self, port):
        self.delay_s = 0.0
        super().__init__(port)

    def pass_on(self, client, server):
        held = deque()
        while not self.ends.is_set():
            ready = readable(client, server, within_s=0.02)
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
