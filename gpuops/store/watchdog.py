"""A bound on how long a database connection may take, whatever the server does.

A server that is stopped, or behind a cut cable, never reports its own statement timeout. Shutting
the socket down from this side makes the waiting call fail at once.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

from sqlalchemy import Connection


class Watchdog:
    """Cuts a connection off after *seconds*; ``barked`` says whether it did.

    SQLite needs none: it bounds itself by its busy timeout.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, 0.0)
        self.barked = False

    @contextlib.contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        """Watch over *connection* for the time of a block."""
        if connection.dialect.name != "postgresql":
            yield
            return
        descriptor = connection.connection.driver_connection.fileno()  # type: ignore[union-attr] # psycopg has it
        timer = threading.Timer(self.seconds, self._bark, args=(descriptor,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _bark(self, descriptor: int) -> None:
        self.barked = True
        _shut_down(descriptor)


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as borrowed:
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()
