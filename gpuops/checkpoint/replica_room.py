"""Room in memory for what a node holds for others: planned, and refused with figures."""

import os
import threading
from collections.abc import Callable

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.node_memory import Available, margin_bytes
from gpuops.checkpoint.states import CheckpointError, KeeperError
from gpuops.units import format_bytes

_BLOCK_BYTES = 512  # of `st_blocks`, stat(2)


class ReplicaRoom:
    """Makes the memory of replicas where *available* bytes hold them, too. Thread-safe.

    *promised* says how much of that is promised to this node's own ranks: those come first.
    """

    def __init__(self, available: Available, promised: Callable[[], int]) -> None:
        self._available = available
        self._promised = promised
        self._lock = threading.Lock()
        self._made: list[SlotMemory] = []

    def make(self, name: str, nbytes: int) -> SlotMemory:
        """Return new memory; the kernel hands it out as it is written.

        Raises:
            KeeperError: It does not fit; says with which figures.
            CheckpointError: The kernel refuses.
        """
        with self._lock:
            room = self._available()
            margin = margin_bytes(room)
            promised = self._promised() + self._missing()
            if nbytes + promised + margin > room:
                raise KeeperError(
                    f"a replica of {format_bytes(nbytes)} does not fit into memory: "
                    f"{format_bytes(room)} are available, {format_bytes(promised)} of it are "
                    f"promised to other slots and {format_bytes(margin)} are left to the system"
                )
            memory = SlotMemory.create(name, nbytes)
            self._made.append(memory)
            return memory

    def missing_bytes(self) -> int:
        """Return how much of what was made the kernel has still to hand out."""
        with self._lock:
            return self._missing()

    def _missing(self) -> int:
        living: list[SlotMemory] = []
        missing = 0
        for memory in self._made:
            try:
                taken = os.fstat(memory.fd).st_blocks * _BLOCK_BYTES
            except (CheckpointError, OSError):
                continue  # it is closed
            living.append(memory)
            missing += max(memory.nbytes - taken, 0)
        self._made = living
        return missing
