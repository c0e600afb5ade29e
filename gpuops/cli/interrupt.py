"""Ctrl-C while a command's parts are imported: some of them swallow it, and some abort."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """Take Ctrl-C while nothing has begun: some of what is imported swallows KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as for a shell's background job, or somebody else's
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"gpuops: interrupted\n")
    os._exit(128 + number)
