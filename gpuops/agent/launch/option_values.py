"""The values of torchrun's flags, checked before anything starts.

All of it happens before anything starts: a wrong value is one line, not a run that failed.
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.journal.run_dir import why_not_writable
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

    The interpreter that runs this needs no check. access(2) asks for the real user without the
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


# torch's defaults for its keep-alive; see `Timing`.
INTERVAL_S, ATTEMPTS = 5.0, 3
_TAKEN = frozenset(
    (
        "join_timeout",
        "last_call_timeout",
        "is_host",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "store_lost_timeout",
        "quorum",
    )
)
# Of torch's own store and rendezvous, of which nothing is left here.
_NEEDLESS = frozenset(
    ("rank", "timeout", "close_timeout", "read_timeout", "store_type", "use_libuv")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousTimeouts:
    """What ``--rdzv-conf`` says; None where it is silent.

    ``dead_s`` is torch's keep_alive_interval times keep_alive_max_attempt: silence that is death.
    ``store_lost_s`` has no key of torch's: after so long without the control store
    a run is given up; nor has ``quorum``: several nodes hold the control store. ``ignored`` are
    keys that change nothing.
    """

    join_timeout_s: float | None = None
    last_call_s: float | None = None
    dead_s: float | None = None
    store_lost_s: float | None = None
    is_host: bool | None = None
    quorum: bool | None = None
    ignored: tuple[str, ...] = ()


def parse_conf(text: str, shown: str = "--rdzv-conf") -> RendezvousTimeouts:
    """Return what ``key=value,key=value`` says.

    Raises:
        UsageError: Not of that form, or a value that is not what its key takes.
    """
    pairs: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{shown}: {item!r} is not key=value")
        pairs[key.strip().lower()] = value.strip()
    return RendezvousTimeouts(
        join_timeout_s=_seconds(pairs, "join_timeout", shown),
        last_call_s=_seconds(pairs, "last_call_timeout", shown),
        dead_s=_dead_s(pairs, shown),
        store_lost_s=_seconds(pairs, "store_lost_timeout", shown),
        is_host=_truth(pairs, "is_host", shown),
        quorum=_truth(pairs, "quorum", shown),
        ignored=tuple(sorted(pairs.keys() - _TAKEN - _NEEDLESS)),
    )


def _dead_s(pairs: Mapping[str, str], shown: str) -> float | None:
    if not pairs.keys() & {"keep_alive_interval", "keep_alive_max_attempt"}:
        return None
    interval_s = _seconds(pairs, "keep_alive_interval", shown) or INTERVAL_S
    attempts = _seconds(pairs, "keep_alive_max_attempt", shown) or ATTEMPTS
    return interval_s * attempts


def _seconds(pairs: Mapping[str, str], key: str, shown: str) -> float | None:
    if key not in pairs:
        return None
    try:
        seconds = float(pairs[key])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{shown}: {key}={pairs[key]}: a number above zero is wanted")
    return seconds


def _truth(pairs: Mapping[str, str], key: str, shown: str) -> bool | None:
    words = {"1": True, "true": True, "t": True, "yes": True, "y": True}
    words |= {"0": False, "false": False, "f": False, "no": False, "n": False}
    if key not in pairs:
        return None
    if pairs[key].lower() not in words:
        raise UsageError(f"{shown}: {key}={pairs[key]}: 1 or 0 is wanted")
    return words[pairs[key].lower()]
