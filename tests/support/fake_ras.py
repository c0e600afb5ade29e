"""A second implementation of the service that NCCL's RAS offers on a node, as its source has it."""

import contextlib
import socket
import threading
from collections.abc import Iterator

STATUS = """Job summary
===========

Communicators... (2.00s)
Group     Comms     Ranks    Status  Errors
    0         1         4   RUNNING  INCOMPLETE
  Missing ranks: 3
"""


class FakeRas:
    """Answers one line after another, and closes the connection behind a status.

    *is_hung*: it accepts, and never says anything.
    """

    def __init__(self, status: str = STATUS, *, is_hung: bool = False) -> None:
        self.status = status
        self.is_hung = is_hung
        self.heard: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        if self.is_hung:
            connection.recv(1)
            while connection.recv(4096):
                pass
            return
        with connection.makefile("rb") as lines:
            for line in lines:
                self.heard.append(word := line.decode().strip().lower())
                if word in {"status", "verbose status"}:
                    connection.sendall(self.status.encode())
                    return
                connection.sendall(self._answer(word).encode())

    @staticmethod
    def _answer(word: str) -> str:
        if word.startswith("client protocol "):
            return "SERVER PROTOCOL 2\n"
        if word.startswith("timeout ") and word.split()[1].isdecimal():
            return "OK\n"
        return f"ERROR: Unknown command {word}\n"


@contextlib.contextmanager
def fake_ras(status: str = STATUS, *, is_hung: bool = False) -> Iterator[FakeRas]:
    """Serve for the time of the block."""
    server = FakeRas(status, is_hung=is_hung)
    try:
        yield server
    finally:
        server.close()
