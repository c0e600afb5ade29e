"""A bound on how long a database connection may take, whatever the server does.

A server that is stopped, or behind a cut cable, never reports its own statement timeout. Shutting
the socket down from this side makes the waiting call fail at once.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

from sqlalchemy import Connection


@contextlib.contextmanager
def bounded(connection: Connection, seconds: float) -> Iterator[None]:
    """Cut *connection* off after *seconds*; SQLite bounds itself by its busy timeout."""
    if connection.dialect.name != "postgresql":
        yield
        return
    descriptor = connection.connection.driver_connection.fileno()  # type: ignore[union-attr] # psycopg has it
    timer = threading.Timer(max(seconds, 0.0), _shut_down, args=(descriptor,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as borrowed:
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()
