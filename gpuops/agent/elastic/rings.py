"""The agent's end of the heartbeat ring that one rank writes; outlives the rank."""

import mmap
import os
from pathlib import Path

from gpuops.wire.ring import (
    HEADER_BYTES,
    RING_BYTES,
    SLOTS_MAX,
    STEP_UNKNOWN,
    AgentRequest,
    Beat,
    WorkerFlag,
    read_beats,
    read_flags,
    write_request,
)

_BYTES_MAX = RING_BYTES + SLOTS_MAX * 64


class RingReader:
    """Returns each beat once. A ring that is not there yet, or is damaged, has no beats.

    The same way back go the agent's requests.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_seq = 0
        self._ring: mmap.mmap | None = None
        self._is_damaged = False
        self._is_writable = False
        self._wanted: tuple[AgentRequest, int] | None = None

    def poll(self) -> list[Beat]:
        """Return the beats since the last call, oldest first; the ring holds the newest 1024."""
        if self._ring is None:
            self._open()
        if self._ring is None or self._is_damaged:
            return []
        try:
            beats = read_beats(memoryview(self._ring), self.last_seq)
        except ValueError:  # RingError, or a number that is none of ours
            self._is_damaged = True
            return []
        if beats:
            self.last_seq = beats[-1].seq
        return beats

    @property
    def flags(self) -> WorkerFlag:
        """Return what the worker said of itself by its last beat; nothing where there is no ring.

        With `Flag.TERM_IS_OURS` SIGKILL takes nothing from the script that SIGTERM would not have
        taken: it has no handler for it. `Flag.ASKED` says that the script looks at
        `gpuops.should_stop`; one that never does is stopped after its next step.
        """
        if self._ring is None or self._is_damaged:
            return WorkerFlag(0)
        return read_flags(memoryview(self._ring))

    def request(self, request: AgentRequest, stop_step: int = STEP_UNKNOWN) -> bool:
        """Ask *request* of the worker, from *stop_step* on; return whether it can see that now.

        A worker without a ring yet is asked once it has one. Give all ranks of a run the same
        *stop_step*, above the last step of each: they leave their loops at the same step then.
        """
        self._wanted = request, stop_step
        if self._ring is None:
            self._open()
        else:
            self._ask()
        return self._ring is not None and self._is_writable and not self._is_damaged

    def _ask(self) -> None:
        if self._wanted is not None and self._ring is not None and self._is_writable:
            write_request(memoryview(self._ring), *self._wanted)

    def close(self) -> None:
        """Let go of the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _open(self) -> None:
        for mode, prot in (
            (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE),
            (os.O_RDONLY, mmap.PROT_READ),
        ):
            try:
                fd = os.open(self.path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if HEADER_BYTES <= os.fstat(fd).st_size <= _BYTES_MAX:
                    self._ring = mmap.mmap(fd, 0, prot=prot)
                    self._is_writable = mode == os.O_RDWR
                    self._ask()
                    return
            except (OSError, ValueError):
                self._is_damaged = True
            finally:
                os.close(fd)
