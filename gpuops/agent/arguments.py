"""The command line of ``gpuops run``: torchrun's own parser plus a few flags of ours.

People type what they are used to, so these are the same: ``run script.py``, ``run torchrun
script.py``, ``run -- torchrun script.py``, ``run python -m torch.distributed.run script.py``.
"""

import argparse
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gpuops.agent.values import why_no_interpreter
from gpuops.errors import UsageError

RESTARTS_DEFAULT = 3
MASTER_PORT_DEFAULT = 29500  # torchrun's, for its static rendezvous
_EPILOG = (
    "With a range of nodes (--nnodes=2:4) torch waits 30 s for more of them at each restart; "
    "--rdzv-conf=last_call_timeout=5 makes that 5 s."
)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_LAUNCHER_MODULES = frozenset({"torch.distributed.run"})


class HelpAskedError(Exception):
    """The user wants the help text, which is this exception's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for. ``torch`` is the namespace that torch's own functions take."""

    torch: argparse.Namespace
    command: tuple[str, ...]
    run_name: str | None
    store: str | None
    spool: str | None
    run_dir: str | None
    is_private: bool
    master: tuple[str, int] | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `gpuops run --help`)")


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise HelpAskedError(parser.format_help())


def parse(
    args: Sequence[str], env: Mapping[str, str], torch_parser: argparse.ArgumentParser
) -> Request:
    """Return what *args* ask for.

    Raises:
        UsageError: Whatever argparse refuses, in one line; no script; a script that cannot run.
        HelpAskedError: ``--help`` stood before the script.
    """
    parser = _parser(torch_parser, env)
    found = _unwrap(parser, list(args))
    if found.tee is None and found.redirects is None:
        found.tee, found.redirects = "3", "0"
    found.tee, found.redirects = found.tee or "0", found.redirects or "0"
    _check_program(found)
    master, is_private = _choose_rendezvous(found)
    return Request(
        torch=found,
        command=tuple(args),
        run_name=found.run_name,
        store=found.store,
        spool=found.spool,
        run_dir=found.run_dir,
        is_private=is_private,
        master=master,
    )


def help_text(torch_parser: argparse.ArgumentParser, env: Mapping[str, str]) -> str:
    """Return what ``gpuops run --help`` prints: our flags and torchrun's."""
    return _parser(torch_parser, env).format_help()


def _parser(torch_parser: argparse.ArgumentParser, env: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog="gpuops run",
        description="Run a training job as torchrun does; it recovers, and what broke is recorded.",
        parents=[torch_parser],
        epilog=_EPILOG,
        conflict_handler="resolve",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="Show this and exit.")
    ours = parser.add_argument_group("gpuops", "These stand before the script, like all flags.")
    ours.add_argument("--run-name", metavar="NAME", help="Name in reports; default: the script's.")
    ours.add_argument("--store", metavar="URL", help="The incident store (GPUOPS_STORE).")
    ours.add_argument("--spool", metavar="DIR", help="Where events wait for it (GPUOPS_SPOOL).")
    ours.add_argument("--run-dir", metavar="DIR", help="Parent of the run's own folder.")
    # None tells what the user left out; torch 2.8 would say 29500 for the port.
    defaults: dict[str, Any] = {
        **dict.fromkeys(("tee", "redirects", "master_port")),
        "max_restarts": RESTARTS_DEFAULT,
    }
    parser.set_defaults(
        **{key: value for key, value in defaults.items() if f"PET_{key.upper()}" not in env}
    )
    return parser


def _unwrap(parser: _Parser, args: list[str]) -> argparse.Namespace:
    """Parse, and parse again what stands behind a launcher's name; flags of both count."""
    found = argparse.Namespace()
    while True:
        if args[:1] == ["--"]:
            args = args[1:]
        found = parser.parse_args(args, found)
        rest = list(found.training_script_args)
        name = Path(found.training_script).name
        if found.no_python or found.module:
            return found
        if name == "torchrun":
            args = rest
        elif _PYTHON.fullmatch(name):
            args = _behind_python(rest)
        else:
            return found


def _behind_python(words: list[str]) -> list[str]:
    """Return torchrun's arguments for what was typed after ``python``."""
    while words[:1] == ["-u"]:  # workers are always unbuffered
        words = words[1:]
    if words[:1] == ["-m"] and words[1:2] and words[1] in _LAUNCHER_MODULES:
        return words[2:]
    if words[:1] == ["-m"] or (words and not words[0].startswith("-")):
        return words
    shown = " ".join(words[:1]) or "nothing"
    raise UsageError(f"after `python` a script or `-m module` is wanted, not {shown}")


def _check_program(found: argparse.Namespace) -> None:
    script = found.training_script
    if found.module:
        if found.no_python:
            raise UsageError("--no-python and --module exclude each other")
        return
    if found.no_python:
        place = shutil.which(script)
        if place is None:
            raise UsageError(
                f"the program {script!r} is not executable, or not there and not on "
                "PATH; chmod +x it, or leave out --no-python if it is a Python script"
            )
        if problem := why_no_interpreter(place):
            raise UsageError(f"cannot execute {script}: {problem}")
        return
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script!r} is a directory; name a script, or use -m")
    if not path.exists():
        raise UsageError(f"the script {script!r} does not exist in {Path.cwd()}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {script!r} cannot be read by this user")


def _choose_rendezvous(found: argparse.Namespace) -> tuple[tuple[str, int] | None, bool]:
    """Settle the rendezvous as torchrun does; return the workers' master where the user named one.

    On one node there is nobody to meet: see `PrivateRendezvous`. The address and port that the
    user gave stay what the workers see.
    """
    alone = _is_one_node(found.nnodes)
    is_static = found.rdzv_backend == "static" and not found.rdzv_endpoint
    private = bool(found.standalone) or (is_static and alone)
    master = None
    if private:
        if not found.standalone and found.master_port is not None:
            master = (found.master_addr, found.master_port)
        found.rdzv_backend, found.rdzv_endpoint = "static", ""
        found.rdzv_id = str(uuid.uuid4())
        found.local_addr = found.local_addr or "127.0.0.1"
    if found.master_port is None:
        found.master_port = MASTER_PORT_DEFAULT
    return master, private


def _is_one_node(nnodes: str) -> bool:
    return nnodes.rpartition(":")[2] == "1"
