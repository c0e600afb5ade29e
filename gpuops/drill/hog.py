"""Holds memory until its standard input closes: ``python -m gpuops.drill.hog BYTES``.

It offers itself to the kernel's OOM killer before anything else, and cannot take more than it was
asked to.
"""

import contextlib
import mmap
import os
import resource
import sys
from pathlib import Path

_SPARE_BYTES = 512 * 2**20  # of address space, for Python itself


def main() -> None:
    """Take the memory, touch every page of it, say ``full``, wait."""
    size = int(sys.argv[1])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = size + _SPARE_BYTES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = b"\1"
    for offset in range(0, size, mmap.PAGESIZE):
        held[offset : offset + 1] = page
    os.write(1, b"full\n")
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main()
