"""What must hold before anything starts: a script that can run, no agent around this one."""

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from gpuops.agent.launch.option_values import why_no_interpreter
from gpuops.errors import UsageError
from gpuops.host.container import ContainerFacts

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
        if place := shutil.which(script):
            raise UsageError(
                f"{script!r} is a program ({place}), not a script in {Path.cwd()}; write that path "
                "or -m MODULE for a Python program, or --no-python before it for any other; of "
                "launchers, accelerate, deepspeed, litgpt, torchrun and trl are known"
            )
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


def refuse_foreign_proc(container: ContainerFacts) -> None:
    """Refuse to run where the numbers of processes in ``/proc`` are those of another namespace.

    Raises:
        UsageError: A signal could go to a process that has the number by chance.
    """
    if container.has_foreign_proc:
        raise UsageError(
            "this process is in a PID namespace of its own, and /proc shows another one: gpuops "
            "could take other processes for its workers; mount /proc in it, as container runtimes "
            "and `unshare --pid --fork --mount-proc` do"
        )


_SHIM = "gpuops.worker.shim"
_WRAPPER_BYTES_MAX = 1 << 16


def why_unseen(found: argparse.Namespace) -> str | None:
    """Return what gpuops does not see of a program that is not started by Python, and the remedy.

    None where that program, or the wrapper script that it is, starts Python with the shim.
    """
    if not found.no_python:
        return None
    script = found.training_script
    words = [script, *found.training_script_args]
    place = shutil.which(script)
    try:
        with open(place or script, "rb") as file:  # noqa: PTH123 a name on PATH
            words.append(os.fsdecode(file.read(_WRAPPER_BYTES_MAX)))
    except OSError:
        pass
    if any(_SHIM in word for word in words):
        return None
    return (
        f"{script} runs as it is (--no-python): its steps are not seen, hangs are not detected, "
        "and exceptions and stacks are not recorded; for that, write in it "
        f"`python -m {_SHIM} SCRIPT …` (or `-m {_SHIM} -m MODULE …`) in place of `python SCRIPT …`"
    )


AGENT_PID = "GPUOPS_AGENT_PID"  # in the environment of every worker


def refuse_nested(env: Mapping[str, str], proc: Path = Path("/proc")) -> None:
    """Refuse to run as a worker, or from one, of a `gpuops run` that is still there.

    Raises:
        UsageError: See above.
    """
    pid = env.get(AGENT_PID, "")
    if not pid.isdecimal():
        return
    try:
        words = (proc / pid / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return  # it has ended, or is of another machine or container
    names = [os.path.basename(word) for word in words]  # noqa: PTH119 bytes
    if b"run" in words and any(name.startswith(b"gpuops") for name in names):
        raise UsageError(
            f"this is a worker of a `gpuops run` already (process {pid}); a script started by it "
            "must not start another: name the script itself"
        )
