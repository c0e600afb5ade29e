"""Map what a new worker will load, while its script still imports torch, which takes seconds.

The kernel takes as long to map a page of 4 KiB as a core takes to copy it, so `restore` takes half
of the time where the pages are mapped by then. It does not depend on it: what is not mapped, or is
of another state than the ranks load, is read as if nothing had been mapped.
"""

import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from gpuops.checkpoint.image import read_layout
from gpuops.checkpoint.keeper.connection import KeeperConnection
from gpuops.checkpoint.keeper.messages import HelloReply, OpenedShard
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import Shard

_CALL_S = 5.0


class MappedImages:
    """The newest image of a rank, and those of the ranks that own a part of it, mapped in a thread.

    *socket_path* is the keeper's. Nothing here raises, waits, or keeps the process from ending.
    """

    def __init__(self, socket_path: Path, *, rank: int, world: int) -> None:
        self._socket_path = socket_path
        self._rank, self._world = rank, world
        self._is_wanted = True
        self._mapped: dict[tuple[int, int], SharedBuffer] = {}
        self._thread = threading.Thread(target=self._run, name="gpuops-map-ahead", daemon=True)
        self._thread.start()

    def take(self, image: SharedBuffer) -> SharedBuffer | None:
        """Return the mapping of the memory of *image*, None where there is none; maybe incomplete.

        The caller closes it.
        """
        return self._mapped.pop(_identity(image), None)

    def close(self) -> None:
        """Map no more, and release what was not taken."""
        self._is_wanted = False
        while self._mapped:
            with suppress(KeyError):  # the other thread does it
                self._mapped.popitem()[1].close()

    def wait(self) -> None:
        """Wait until all is mapped: for measurements and tests."""
        self._thread.join()

    def _run(self) -> None:
        with suppress(Exception), ExitStack() as stack:  # boundary: nothing depends on it
            connection = KeeperConnection(self._socket_path, deadline_s=_CALL_S)
            stack.callback(connection.close)
            connection.call(HelloReply, "hello", role="probe")
            own = self._map(connection, self._rank)
            owners = set() if own is None else set(read_layout(own.view).owner_by_name.values())
            for rank in owners - {self._rank}:
                self._map(connection, rank)

    def _map(self, connection: KeeperConnection, rank: int) -> SharedBuffer | None:
        shard = Shard(rank, self._world)
        opened, fds = connection.call_for_fds(OpenedShard, "newest_image", shard=shard)
        if not fds:
            return None
        memory = SharedBuffer.attach(fds[0], nbytes=opened.nbytes, writable=False)
        self._mapped[_identity(memory)] = memory
        if not self._is_wanted:
            self.close()
        memory.populate(lambda: not self._is_wanted)
        return memory


_started: list[MappedImages] = []  # by the shim, for the `Checkpointer` of the script


def start(socket_path: Path, *, rank: int, world: int) -> MappedImages:
    """Begin to map what the rank will load; `take_mapped` returns it once."""
    _started[:] = [MappedImages(socket_path, rank=rank, world=world)]
    return _started[0]


def take_mapped(*, is_wanted: bool) -> MappedImages | None:
    """Return what `start` began in this process, once; close it instead if it is not wanted."""
    found = _started.pop() if _started else None
    if found is not None and not is_wanted:
        found.close()
        return None
    return found


def _identity(memory: SharedBuffer) -> tuple[int, int]:
    found = os.fstat(memory.fd)
    return found.st_dev, found.st_ino
