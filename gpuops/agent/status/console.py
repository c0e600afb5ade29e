"""Standard output and error of a job that outlives their reader.

torch's threads that show the workers' lines each end in a traceback once a pipe is closed
(``gpuops run … | head -1``). The lines are in the rank's files all the same, so what the console
does not take is dropped.
"""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class DetachableFile(io.FileIO):
    """The open descriptor *fd*; *lost* is called once, with the first error of a write to it."""

    def __init__(self, fd: int, lost: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._lost: Callable[[OSError], None] | None = lost

    def write(self, data: "ReadableBuffer", /) -> int:
        """Return how much was taken; all of it where it was dropped."""
        try:
            return super().write(data)
        except OSError as exc:
            lost, self._lost = self._lost, None
            if lost is not None:
                lost(exc)
            return memoryview(data).nbytes


def lasting(stream: io.TextIOWrapper, lost: Callable[[OSError], None]) -> io.TextIOWrapper:
    """Return a stream, by whole lines, to where *stream* goes, that no reader can break."""
    stream.flush()
    buffer = io.BufferedWriter(DetachableFile(stream.fileno(), lost))
    return io.TextIOWrapper(
        buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )
