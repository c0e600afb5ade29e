"""Whether the script can be what a worker runs; said in one line before anything starts."""

import argparse
import os
import shutil
from pathlib import Path

from gpuops.agent.values import why_no_interpreter
from gpuops.errors import UsageError

_ELF = b"\x7fELF"
_FIRST_BYTES = 256


def check_program(found: argparse.Namespace) -> None:
    """Refuse a script that no worker could run.

    Raises:
        UsageError: It is not there, not readable, not executable, or not Python.
    """
    script = found.training_script
    if found.module:
        if found.no_python:
            raise UsageError("--no-python and --module exclude each other")
        return
    if found.no_python:
        _check_executable(script)
        return
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script!r} is a directory; name a script, or use -m")
    if not path.exists():
        raise UsageError(f"the script {script!r} does not exist in {Path.cwd()}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {script!r} cannot be read by this user")
    if problem := why_not_python(path):
        raise UsageError(
            f"{script!r} is {problem}, not a Python script; put --no-python before it "
            "and each worker runs it as it is"
        )


def why_not_python(path: Path) -> str | None:
    """Return what the file *path* is where it says itself that it is not Python."""
    if path.suffix in {".py", ".pyc", ".pyz"}:  # some begin as a shell script, and are Python too
        return None
    try:
        with path.open("rb") as file:
            first = file.read(_FIRST_BYTES)
    except OSError:
        return None
    if first.startswith(_ELF):
        return "a compiled program"
    words = first.partition(b"\n")[0].removeprefix(b"#!").split()
    if not first.startswith(b"#!") or not words or any(b"py" in word for word in words):
        return None
    return f"a script for {os.fsdecode(words[0])}"


def _check_executable(script: str) -> None:
    place = shutil.which(script)
    if place is None:
        raise UsageError(
            f"the program {script!r} is not executable, or not there and not on "
            "PATH; chmod +x it, or leave out --no-python if it is a Python script"
        )
    if problem := why_no_interpreter(place):
        raise UsageError(f"cannot execute {script}: {problem}")
