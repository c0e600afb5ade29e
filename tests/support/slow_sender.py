"""The library ``slow_sender.c``: programs that load it wait before each message that they send."""

import shutil
import subprocess
from pathlib import Path

from support.services import unavailable

SOURCE = Path(__file__).with_suffix(".c")


def slow_sender(folder):
    """Return the library, compiled into *folder*; skip (in CI: fail) without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        unavailable("no C compiler for the slow node")
    library = folder / "slow_sender.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library
