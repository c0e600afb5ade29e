"""What another launcher would start: it runs here up to that point, in a process of its own.

``python -m gpuops.agent.launch.captured accelerate|deepspeed|trl ARGUMENTS`` prints one line of
JSON behind `MARK`. accelerate and trl end in torch's launcher, or start the script by themselves;
both are intercepted, so that their configuration files and defaults count, of whatever version.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

from gpuops.config.resolve import environ

MARK = "gpuops-captured:"
_RUN = "torch.distributed.run"


class _StartedError(BaseException):
    """The launcher was about to start workers; its own handlers of errors must not see this."""

    def __init__(self, found: Mapping[str, Any], env: Mapping[str, str]) -> None:
        super().__init__()
        self.found, self.env = found, env


def main(argv: Sequence[str]) -> None:
    """Print what the launcher *argv* would start; it prints its own errors and help, and exits."""
    before = environ()
    try:
        found = _READERS[argv[0]](argv[1:])
    except _StartedError as started:
        added = {k: v for k, v in started.env.items() if before.get(k) != v}
        found = {**started.found, "env": added}
    except Exception as exc:  # noqa: BLE001 boundary: the launcher's own error, for its user
        found = {"error": f"{type(exc).__name__}: {exc}"}
    print(f"\n{MARK}{json.dumps(found)}")  # noqa: T201 the answer


def _accelerate(args: Sequence[str]) -> dict[str, Any]:
    launch = _intercepted()
    launch.launch_command(launch.launch_command_parser().parse_args(list(args)))
    return {"error": "it starts no worker on this machine"}


def _trl(args: Sequence[str]) -> dict[str, Any]:
    _intercepted()
    cli = importlib.import_module("trl.cli")
    sys.argv = ["trl", *args]
    cli.main()
    return {"error": "it starts no training"}


def _deepspeed(args: Sequence[str]) -> dict[str, Any]:
    runner = importlib.import_module("deepspeed.launcher.runner")
    return {"deepspeed": vars(runner.parse_args(list(args)))}


_READERS = {"accelerate": _accelerate, "deepspeed": _deepspeed, "trl": _trl}


def _intercepted() -> Any:  # noqa: ANN401 a module without types
    """Return accelerate's module, which now starts nothing."""
    torch_run, launch = map(importlib.import_module, (_RUN, "accelerate.commands.launch"))
    names = {**vars(launch.subprocess), "Popen": _start_command}
    launch.subprocess = SimpleNamespace(**names)  # type: ignore[attr-defined]
    torch_run.run = _start_torchrun  # type: ignore[attr-defined]
    launch.simple_launcher = partial(_start_once, launch.simple_launcher)  # type: ignore[attr-defined]
    return launch


def _start_once(start: Callable[[Any], object], args: Any) -> None:  # noqa: ANN401
    """Call *start* of accelerate, which starts one process, however many *args* ask for."""
    try:
        start(args)
    except _StartedError as started:
        started.found = {**started.found, "asked": getattr(args, "num_processes", None) or 1}
        raise


def _start_command(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    raise _StartedError({"command": [str(word) for word in words]}, env)


def _start_torchrun(args: argparse.Namespace) -> NoReturn:
    parser = importlib.import_module(_RUN).get_args_parser()
    defaults = vars(parser.parse_args([args.training_script]))
    given = {k: getattr(args, k) for k, v in defaults.items() if getattr(args, k, v) != v}
    given = {k: v for k, v in given.items() if v is not None and v is not False}
    program = [args.training_script, *given.pop("training_script_args", ())]
    raise _StartedError({"flags": given, "program": program}, environ())


if __name__ == "__main__":
    main(sys.argv[1:])
