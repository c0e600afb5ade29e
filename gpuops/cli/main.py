"""The ``gpuops`` command: finds the subcommand, and maps its result to an exit code.

A subcommand's module is imported only when it is called, so that ``gpuops check`` in a prolog
imports neither torch nor SQLAlchemy.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import click

from gpuops import __version__
from gpuops.cli.interrupt import Terminated
from gpuops.cli.lazy_group import LazyGroup
from gpuops.errors import EXIT_INTERNAL, EXIT_USAGE, GpuopsError
from gpuops.log import printable, setup

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_CLOSED_PIPE = 141
# What ends the output without being a bug: write(2).
_FULL = {
    errno.ENOSPC: "no space left on the output",
    errno.EDQUOT: "the quota of the output's file system is used up",
    errno.EFBIG: "the output's file may not grow (ulimit -f)",
}

COMMANDS = {
    "baseline": (
        "gpuops.cli.baseline:baseline",
        "Learn from burn-ins what healthy nodes measure.",
    ),
    "burnin": ("gpuops.cli.burnin:burnin", "Test this node under load, and compare its parts."),
    "check": ("gpuops.cli.check.command:check", "Check this node; exit 0 if it may run a job."),
    "ckpt": ("gpuops.cli.ckpt.command:ckpt", "List, verify, keep, remove and convert checkpoints."),
    "config": ("gpuops.cli.config:config", "Show or validate the settings in force."),
    "db": ("gpuops.cli.db:db", "Create, inspect and feed the incident store."),
    "demo": ("gpuops.cli.demo:demo", "Train, kill a rank, recover, report: here, in two minutes."),
    "detect": ("gpuops.cli.detect:detect", "Find what slows or stops a job, in what it recorded."),
    "drill": ("gpuops.cli.drill:drill", "Break something on purpose, to see a run recover."),
    "facts": (
        "gpuops.cli.check.facts:facts",
        "Record the facts that checks read, to judge them elsewhere.",
    ),
    "incident": ("gpuops.cli.history:incident", "List and show incidents."),
    "node": ("gpuops.cli.node:node", "List nodes; show one's findings, drains and repairs."),
    "profile": (
        "gpuops.cli.profile:profile",
        "Capture a hardware profile from a node that is known to be good.",
    ),
    "repair": ("gpuops.cli.node:repair", "Record that a node was repaired."),
    "report": ("gpuops.cli.history:report", "Say where a run's time went, and who was to blame."),
    "run": ("gpuops.cli.run:run", "Run a training job: torchrun's flags, and it recovers."),
    "runbook": ("gpuops.cli.runbook:runbook", "Show what to do about a failure class."),
    "slurm": ("gpuops.cli.slurm:slurm", "Prolog, epilog and health check of Slurm, and set-up."),
    "sweep": ("gpuops.cli.sweep:sweep", "Test nodes in pairs; name the bad node or link."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpuops")
@click.option("--config", "config_file", type=click.Path(), help="Configuration file (TOML).")
@click.option("--verbose", is_flag=True, help="Log more on standard error.")
@click.pass_context
def gpuops(ctx: click.Context, config_file: str | None, *, verbose: bool) -> None:
    """Keep GPU clusters training: check nodes, run jobs, recover, and remember what broke."""
    setup(verbose=verbose)
    ctx.obj = {"config_file": config_file}


def run_command(args: Sequence[str]) -> int:
    """Run one command line and return its exit code (`gpuops.errors`); never raises."""
    _open_closed_streams()
    try:
        result: Any = gpuops.main(args=list(args), prog_name="gpuops", standalone_mode=False)
        sys.stdout.flush()
    except (SystemExit, BrokenPipeError):
        # click turns a closed pipe into SystemExit(1), which would mean a failed node.
        _silence(sys.stdout)
        return EXIT_CLOSED_PIPE
    except KeyboardInterrupt:
        return _report(click.Abort())  # a second one, while click handled the first
    except Exception as exc:  # noqa: BLE001 boundary: our own bug must not look like a node's failure
        return _report(exc)
    return result if isinstance(result, int) else 0


def _silence(stream: TextIO) -> None:
    """Send *stream* to the null device: Python flushes at exit, and exits with 120 if it fails."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report(exc: Exception) -> int:
    """Report *exc* as `_report_error` does; where standard error cannot be written, silently.

    Python itself would exit with 1, which means a failed node.
    """
    try:
        exit_code = _report_error(exc)
        sys.stderr.flush()
    except OSError:
        _silence(sys.stdout)
        _silence(sys.stderr)
        return exc.exit_code if isinstance(exc, GpuopsError) else EXIT_INTERNAL
    return exit_code


def _open_closed_streams() -> None:
    """Open streams closed with ``>&-`` on the null device, so that printing does not fail."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 open as long as the process
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 open as long as the process


def _report_error(exc: Exception) -> int:
    """Print the error on standard error, in one line if possible; return the exit code."""
    match exc:
        case click.exceptions.Exit():
            return exc.exit_code
        case click.ClickException():
            exc.show()
            return EXIT_USAGE
        case click.Abort():
            is_sigterm = isinstance(exc.__cause__, Terminated)
            click.echo(f"gpuops: interrupted{' by SIGTERM' * is_sigterm}", err=True)
            return EXIT_TERMINATED if is_sigterm else EXIT_INTERRUPTED
        case GpuopsError():
            click.echo(f"gpuops: {printable(str(exc))}", err=True)
            return exc.exit_code
        case OSError(filename=None) if exc.errno in _FULL:
            _silence(sys.stdout)
            click.echo(f"gpuops: cannot write the result: {_FULL[exc.errno]}", err=True)
            return EXIT_INTERNAL
        case _:
            click.echo(printable("".join(traceback.format_exception(exc))), err=True)
            click.echo("gpuops: a bug in gpuops, not a fault of the node or the job", err=True)
            return EXIT_INTERNAL


def main() -> None:
    """Run ``gpuops`` with this process' arguments and exit."""
    sys.exit(run_command(sys.argv[1:]))
