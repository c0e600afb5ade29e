"""The server of a control store: one event loop, for as long as agents of the run are connected."""

import asyncio
import resource
import socket
import time
from dataclasses import dataclass, field

from gpuops.control.tcp.server_connection import (
    CONNECTIONS_MAX,
    ControlServerConnection,
    ServerState,
)

LEASE_S = 120.0
# An agent puts this key once the run is over: nobody will come back for long.
RUN_OVER_KEY = "over"
RUN_OVER_LEASE_S = 30.0
# What remains of the lease once a signal has asked for the end: agents beat every second.
SHUTDOWN_LEASE_S = 5.0
_IDLE_CHECK_S = 0.5
_BACKLOG = 4096
# The loop accepts so many before it reads again: a burst of clients must not be admitted, and cut
# off an agent, before what the agent has sent already is read.
_ACCEPT_BATCH = 64
# For our own files, and for batches that are accepted before those that they cut off are closed.
# Without a free file asyncio accepts nothing for a second.
_FILES_KEPT = 64 + 4 * _ACCEPT_BATCH


@dataclass(slots=True)
class ControlStoreServer:
    """Serves *state* until silence has lasted for the lease."""

    state: ServerState
    lease_s: float = LEASE_S
    is_shutting_down: bool = field(init=False, default=False)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begin to listen; raises OSError where the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family)
        server = await asyncio.get_running_loop().create_server(
            lambda: ControlServerConnection(self.state), sock=sock, backlog=_ACCEPT_BATCH
        )
        sock.listen(_BACKLOG)  # the kernel's queue is longer than asyncio's batch
        return server

    def begin_shutdown(self) -> None:
        """End soon after the last agent: a signal to a job step must not end its control store."""
        self.is_shutting_down = True

    @property
    def idle_timeout_s(self) -> float:
        """Return for how long silence is borne.

        Shorter once `OVER` is on the control store (its value: seconds), and once a signal came.
        """
        lease_s = min(self.lease_s, SHUTDOWN_LEASE_S) if self.is_shutting_down else self.lease_s
        over_entry = self.state.kv_map.get(RUN_OVER_KEY)
        return min(lease_s, run_over_lease_s(over_entry.value)) if over_entry.version else lease_s

    async def wait_until_idle(self) -> None:
        """Return when nobody who holds the token has sent anything for as long as that."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def check_idle() -> None:
            left_s = self.state.last_request_s + self.idle_timeout_s - time.monotonic()
            if left_s <= 0:
                ended.set_result(None)
            else:
                loop.call_later(min(left_s, _IDLE_CHECK_S), check_idle)

        check_idle()
        await ended


def run_over_lease_s(value: bytes) -> float:
    """Return the seconds that the value of `OVER` says, `OVER_S` where it says none up to that."""
    try:
        seconds = float(value)
    except ValueError:
        return RUN_OVER_LEASE_S
    return seconds if 0 <= seconds <= RUN_OVER_LEASE_S else RUN_OVER_LEASE_S


def raise_files_limit() -> int:
    """Let this process have as many files as it may; return how many connections that allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    requested = CONNECTIONS_MAX + _FILES_KEPT
    limit = requested if hard == resource.RLIM_INFINITY else min(hard, requested)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit - _FILES_KEPT, limit // 2, 1)
