"""A small file system that only those see who are given its path: a full one is no one else's.

Every node check looks at all mounts of its own namespace, and other tests run at the same time.
"""

import contextlib
import subprocess
from pathlib import Path

from support.services import unavailable

_HOLD = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && echo ready && exec sleep infinity'


@contextlib.contextmanager
def small_disk(folder, size):
    """Yield the path of a tmpfs of *size* (``32m``), mounted on *folder* in a namespace of its own.

    The path leads through the process that holds the namespace, and is good for root only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = ["unshare", "--mount", "sh", "-c", _HOLD, "sh", size, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        try:
            if holder.stdout.readline() != b"ready\n":
                unavailable(f"no file system can be mounted here: {holder.stderr.read().decode()}")
            yield Path(f"/proc/{holder.pid}/root{folder}")
        finally:
            holder.kill()
