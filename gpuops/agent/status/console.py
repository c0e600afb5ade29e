"""Standard output and error of a job that outlives their reader.

torch's threads that show the workers' lines each end in a traceback once a pipe is closed
(``gpuops run … | head -1``). The lines are in the ranks' files in any case, so lines that the
console does not accept are dropped.
"""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class DetachableFile(io.FileIO):
    """The open descriptor *fd*; *on_error* is called once, with the first error of a write."""

    def __init__(self, fd: int, on_error: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._on_error: Callable[[OSError], None] | None = on_error

    def write(self, data: "ReadableBuffer", /) -> int:
        """Return the number of bytes written; all of them where they were dropped."""
        try:
            return super().write(data)
        except OSError as exc:
            on_error, self._on_error = self._on_error, None
            if on_error is not None:
                on_error(exc)
            return memoryview(data).nbytes


def lasting(stream: io.TextIOWrapper, on_error: Callable[[OSError], None]) -> io.TextIOWrapper:
    """Return a line-buffered stream to the file of *stream* whose writes never fail."""
    stream.flush()
    buffer = io.BufferedWriter(DetachableFile(stream.fileno(), on_error))
    return io.TextIOWrapper(
        buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )
