"""What torch gets: its launch configuration, the workers' command, its environment."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from gpuops.agent.elastic.logs import GenerationLogs
from gpuops.agent.elastic.signals import UNUSED_SIGNAL
from gpuops.agent.launch.option_values import check_log_dir, check_values
from gpuops.agent.launch.options import RunRequest
from gpuops.config.resolve import update_environ
from gpuops.errors import UsageError

SHIM = Path(__file__).parents[2] / "worker" / "shim.py"
SIGNALS_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def prepare_environment(env: Mapping[str, str]) -> None:
    """Set what torch reads from the environment of the agent.

    A store shared between agent and workers keeps keys of dead workers: with it, restarted workers
    often wait for peers that are gone (pytorch issue 135712).
    """
    wanted = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": UNUSED_SIGNAL,
    }
    update_environ(wanted)


def command(
    args: argparse.Namespace, env: Mapping[str, str], *, disabled: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the program of a worker and its arguments; without the shim where it is disabled."""
    python = env.get("PYTHON_EXEC") or sys.executable
    program = [args.training_script, *args.training_script_args]
    if args.no_python:
        if disabled:
            return program[0], tuple(program[1:])
        return python, (str(SHIM), "--exec", *program)
    # As under torchrun; the shim writes whole lines, so what a killed rank had ended is on disk.
    shim = [] if disabled else [str(SHIM)]
    module = ["-m"] if args.module else []
    return python, ("-u", *shim, *module, *program)


def configure(request: RunRequest) -> tuple[LaunchConfig, GenerationLogs]:
    """Return torch's configuration, in which the logs are ours.

    Raises:
        UsageError: torch's own checks refuse a value.
    """
    args = request.torch
    check_values(args, getattr(rendezvous_handler_registry, "_registry", None))
    if args.logs_specs is None:
        check_log_dir(args.log_dir)
    log_dir, args.log_dir = args.log_dir, os.devnull  # else torch makes a directory of its own
    try:
        config, _entrypoint, _arguments = config_from_args(args)
    except (AssertionError, ValueError, RuntimeError, KeyError, ImportError) as exc:
        text = str(exc) or "a flag has a value that torch refuses"
        raise UsageError(text) from exc
    if config.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node={args.nproc_per_node}: this node has none")
    theirs = config.logs_specs
    assert theirs is not None
    inner = theirs if args.logs_specs is not None else None
    logs = GenerationLogs(
        theirs._redirects,  # noqa: SLF001 torch parses these flags and keeps the result there only
        theirs._tee,  # noqa: SLF001
        theirs._local_ranks_filter,  # noqa: SLF001
        inner,
        Path(log_dir) if log_dir else None,
    )
    config.logs_specs = logs
    return config, logs
