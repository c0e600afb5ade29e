"""A child that ends with its parent, whatever the parent dies of and whatever the child is in."""

import ctypes
import os
import resource
import signal
import threading
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # prctl(2); not named in Python's standard library
_CHUNK = 4096


def die_with_parent(stdin_fd: int = 0) -> None:
    """End this process at the end of its standard input, or when the parent's thread ends.

    The kernel's signal is for a parent whose end of the pipe somebody else holds as well. A driver
    that crashes this process leaves no core file.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    threading.Thread(target=_wait, args=(stdin_fd,), name="tether", daemon=True).start()


def _wait(stdin_fd: int) -> NoReturn:
    try:
        while os.read(stdin_fd, _CHUNK):
            pass
    except OSError:
        pass
    # The main thread may be in a call that does not return; nothing here needs tidying up.
    os._exit(0)
