"""Servers for tests: each connection has a thread, and all of it ends with the server."""

import contextlib
import selectors
import socket
import threading


class Listening:
    """Listens on a port of its own; `serve` is called with each connection until ``ends``."""

    def __init__(self):
        self.n_calls = 0
        self.ends = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._socks = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def serve(self, sock):
        """Do something with *sock*; what goes wrong with it is nobody's matter."""
        raise NotImplementedError

    def close(self):
        """End every connection."""
        self.ends.set()
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_why):
        self.close()

    def _accept(self):
        while not self.ends.is_set():
            with contextlib.suppress(OSError):
                sock, _address = self._listener.accept()
                self.n_calls += 1
                self._socks.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock):
        with sock, contextlib.suppress(OSError):
            self.serve(sock)


class Between(Listening):
    """Passes connections on to *port*; `pass_on` is called with both ends of each."""

    def __init__(self, port):
        self._target = ("127.0.0.1", port)
        super().__init__()

    def serve(self, sock):
        with socket.create_connection(self._target, 10) as server:
            self.pass_on(sock, server)

    def pass_on(self, client, server):
        """Pass on what comes from either, until one of them ends."""
        raise NotImplementedError


def readable(*socks, within_s):
    """Return those of *socks* that something can be read from, none after *within_s*."""
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(within_s)]
