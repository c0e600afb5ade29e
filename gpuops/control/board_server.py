"""The server of a board: one event loop, until nobody of the run is heard any more."""

import asyncio
import resource
import time
from dataclasses import dataclass, field

from gpuops.control.board_peer import Peer
from gpuops.control.board_room import CONNECTIONS_MAX, Room

LEASE_S = 120.0
# An agent puts this key once the run is over: nobody will come back for long.
OVER = "over"
OVER_S = 30.0
# What remains of the lease once a signal has asked for the end: agents beat every second.
PARTING_S = 5.0
_LOOK_S = 0.5
_BACKLOG = 4096
_FILES_KEPT = 64


@dataclass(slots=True)
class BoardServer:
    """Serves *room* until silence has lasted for the lease."""

    room: Room
    lease_s: float = LEASE_S
    is_parting: bool = field(init=False, default=False)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begin to listen; raises OSError where the address cannot be had."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            lambda: Peer(self.room), host, port, backlog=_BACKLOG, reuse_address=True
        )

    def part(self) -> None:
        """End soon after the last agent: a signal to a whole job step must not take its board."""
        self.is_parting = True

    @property
    def silence_s_max(self) -> float:
        """Return for how long silence is borne.

        Shorter once `OVER` is on the board (its value: seconds), and once a signal came.
        """
        least = min(self.lease_s, PARTING_S) if self.is_parting else self.lease_s
        over = self.room.shelf.get(OVER)
        return min(least, over_s(over.value)) if over.version else least

    async def until_unused(self) -> None:
        """Return when nobody who holds the token has sent anything for as long as that."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def look() -> None:
            left_s = self.room.heard_s + self.silence_s_max - time.monotonic()
            if left_s <= 0:
                ended.set_result(None)
            else:
                loop.call_later(min(left_s, _LOOK_S), look)

        look()
        await ended


def over_s(value: bytes) -> float:
    """Return the seconds that the value of `OVER` says, `OVER_S` where it says none up to that."""
    try:
        seconds = float(value)
    except ValueError:
        return OVER_S
    return seconds if 0 <= seconds <= OVER_S else OVER_S


def raise_files_limit() -> int:
    """Let this process have as many files as it may; return how many connections that allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + _FILES_KEPT
    limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit - _FILES_KEPT, 1)
