"""The four boards behind one face, a server that ends with its test, a proxy that does harm."""

import contextlib
import os
import secrets
import selectors
import signal
import socket
import threading
import time

from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.memory import MemoryControlStore
from gpuops.control.postgres.store import PostgresControlStore
from gpuops.control.tcp.process import start_server
from gpuops.control.tcp.store import TcpControlStore
from gpuops.host.clock import SystemClock

RUN_KEY = "job-4711"
TOKEN = "a token of the job"
# The machines that run these tests are busy.
DEADLINE_S = 20.0


class Boards:
    """Opens handles on one board and closes them at the end."""

    def __init__(self, new):
        self._new = new
        self._stack = contextlib.ExitStack()

    def open(self):
        """Return a new handle."""
        return self._stack.enter_context(contextlib.closing(self._new()))

    def close(self):
        self._stack.close()


@contextlib.contextmanager
def memory_boards():
    """Yield handles on one state in this process."""
    first = MemoryControlStore(SystemClock())
    boards = Boards(first.new_handle)
    yield boards
    boards.close()


@contextlib.contextmanager
def server(**wanted):
    """Yield a real server process on a free port."""
    process = start_server("127.0.0.1", 0, **{"run_key": RUN_KEY, "token": TOKEN, **wanted})
    try:
        yield process
    finally:
        if process.pid is not None:
            os.kill(process.pid, signal.SIGCONT)
        process.kill()


def tcp_board(port, **changes):
    """Return a client of the server at *port*."""
    wanted = {"run_key": RUN_KEY, "token": TOKEN, "deadline_s": DEADLINE_S, **changes}
    return TcpControlStore("127.0.0.1", port, **wanted)


@contextlib.contextmanager
def tcp_boards():
    """Yield handles on one real server process."""
    with server() as process:
        boards = Boards(lambda: tcp_board(process.port))
        yield boards
        boards.close()


@contextlib.contextmanager
def postgres_boards(url, **changes):
    """Yield handles on a table of a real Postgres."""
    wanted = {"run_key": RUN_KEY, "token": TOKEN, "deadline_s": DEADLINE_S, **changes}
    boards = Boards(lambda: PostgresControlStore(url, **wanted))
    yield boards
    boards.close()


@contextlib.contextmanager
def etcd_boards(url, **changes):
    """Yield handles on the keys of a run of its own in a real etcd."""
    wanted = {"run_key": secrets.token_hex(8), "token": TOKEN, "deadline_s": DEADLINE_S, **changes}
    boards = Boards(lambda: EtcdControlStore(url, **wanted))
    yield boards
    boards.close()


def eventually(is_so, what, seconds=60.0):
    """Return once *is_so()* holds; fail with *what* after *seconds*."""
    end_s = time.monotonic() + seconds
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < end_s, what
        pause.wait(0.01)


class Proxy:
    """Forwards connections to *port*; on the way ``change`` may see, delay or change bytes.

    ``change(direction, data)`` returns what goes on; direction is "up" towards the server. Where
    ``frozen`` is set nothing goes on in either direction, as when packets are lost.
    """

    def __init__(self, port, change=lambda _direction, data: data):
        self._to = port
        self.change = change
        self.frozen = threading.Event()
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(30)
        self._listener.close()

    def _run(self):
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _events in selector.select(0.02):
                    if self.frozen.is_set():
                        self._stop.wait(0.02)
                    elif key.fileobj is self._listener:
                        self._accept(selector, stack)
                    else:
                        self._forward(selector, key)

    def _accept(self, selector, stack):
        self.accepted += 1
        client = stack.enter_context(self._listener.accept()[0])
        ours = stack.enter_context(socket.create_connection(("127.0.0.1", self._to)))
        selector.register(client, selectors.EVENT_READ, ("up", ours))
        selector.register(ours, selectors.EVENT_READ, ("down", client))

    def _forward(self, selector, key):
        direction, other = key.data
        data = b""
        with contextlib.suppress(OSError):
            data = key.fileobj.recv(65536)
        changed = self.change(direction, data) if data else None
        if changed is None:
            for end in (key.fileobj, other):
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(end)
                end.close()
            return
        with contextlib.suppress(OSError):
            other.sendall(changed)
