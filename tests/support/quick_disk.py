"""Folders in memory, for tests whose subject gives a disk less than a second.

A test beside them may be writing gigabytes of checkpoints: a small file that is synced then waits
for seconds behind them, which says nothing of what is tested.
"""

import os
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ROOM = 2**30


def quick_folder():
    """Return the folder below which to make one's own: in memory, or None where it has no room."""
    try:
        found = os.statvfs(_MEMORY)
    except OSError:
        return None
    has_room = found.f_bavail * found.f_frsize >= _ROOM
    return str(_MEMORY) if has_room and os.access(_MEMORY, os.W_OK) else None


def quick_home(prefix):
    """Return a new folder of that kind whose parents any user may enter."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=quick_folder()))
