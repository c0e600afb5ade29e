"""The values of torchrun's flags, where torch's own check is late or does not name the flag.

All of it happens before anything starts: a wrong value is one line, not a run that failed.
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from gpuops.agent.rundir import why_not_writable
from gpuops.errors import UsageError

_UNCATCHABLE = frozenset({"SIGKILL", "SIGSTOP"})
_STREAMS = frozenset("0123")


def check_values(args: argparse.Namespace, backends: Iterable[str] | None) -> None:
    """Refuse what cannot be; *backends* are the rendezvous that torch knows, if that is known.

    Raises:
        UsageError: A line that names the flag, its value and what is wanted.
    """
    _check_nodes(args.nnodes)
    _check_count(str(args.nproc_per_node))
    for flag in ("redirects", "tee"):
        _check_streams(f"--{flag}", getattr(args, flag))
    if backends is not None and args.rdzv_backend not in backends:
        raise UsageError(
            f"--rdzv-backend={args.rdzv_backend}: torch knows {', '.join(sorted(backends))}"
        )
    if names := getattr(args, "signals_to_handle", None):
        _check_signals(names)


def check_log_dir(log_dir: str | None) -> None:
    """Refuse a place for logs that cannot be written, and make it where it is not there.

    Raises:
        UsageError: See above.
    """
    if not log_dir or log_dir == os.devnull:
        return
    if problem := why_not_writable(Path(log_dir)):
        raise UsageError(f"--log-dir={log_dir} cannot be written: {problem}")


def check_startable(program: str) -> None:
    """Refuse a program that no worker could become.

    The interpreter that runs this needs no look. access(2) asks for the real user without the
    capabilities that start programs below a closed folder, and would refuse it there.

    Raises:
        UsageError: It is not there, or not executable for this user.
    """
    if program == sys.executable or shutil.which(program) is not None:
        return
    is_there = Path(program).exists()
    problem = "not an executable file" if is_there else "No such file or directory"
    raise UsageError(f"cannot start worker 0: {program}: {problem}")


def why_no_interpreter(program: str) -> str | None:
    """Return what is wrong with the interpreter that the script *program* names, if any is."""
    try:
        with Path(program).open("rb") as file:
            first = file.readline(256)
    except OSError:
        return None
    words = first.removeprefix(b"#!").split()
    if not first.startswith(b"#!") or not words:
        return None
    interpreter = os.fsdecode(words[0])
    if os.access(interpreter, os.X_OK, effective_ids=True):
        return None
    return f"its interpreter {interpreter!r} is not there or not executable"


def _check_nodes(value: str) -> None:
    low, colon, high = value.partition(":")
    parts = (low, high) if colon else (low, low)
    if not all(part.isdecimal() for part in parts) or not 0 < int(parts[0]) <= int(parts[1]):
        raise UsageError(f"--nnodes={value}: a number of nodes, or MIN:MAX, is wanted, 1 at least")


def _check_count(value: str) -> None:
    if value.removeprefix("-").isdecimal() and int(value) < 1:
        raise UsageError(f"--nproc-per-node={value}: 1 worker at least is wanted on each node")


def _check_streams(flag: str, value: str) -> None:
    pairs = [part.rpartition(":") for part in value.split(",")]
    is_map = all(colon and rank.isdecimal() for rank, colon, _stream in pairs)
    if (is_map or (":" not in value and len(pairs) == 1)) and {s for *_, s in pairs} <= _STREAMS:
        return
    raise UsageError(
        f"{flag}={value}: 0 (none), 1 (stdout), 2 (stderr) or 3 (both) is wanted, "
        "or such a number for each local rank, as in 0:1,1:3"
    )


def _check_signals(names: str) -> None:
    for name in (part.strip() for part in names.split(",")):
        if name not in signal.Signals.__members__ or name in _UNCATCHABLE:
            raise UsageError(
                f"--signals-to-handle={names}: {name!r} is no signal that can be handled; "
                "names as in SIGTERM,SIGINT are wanted"
            )
