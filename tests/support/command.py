"""Run the ``gpuops`` command: as a user does, in another process, or quickly in this one."""

import os
import subprocess
import sys

from gpuops.cli.main import run_command


def gpuops(*args, env=None, timeout=100, cwd=None, text=True):
    """Return the finished ``gpuops *args*``; *env* is added to this process' environment."""
    return subprocess.run(
        [sys.executable, "-m", "gpuops", *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=text,
        timeout=timeout,
        cwd=cwd,
        check=False,
    )


def command_here(folder, monkeypatch, capsys):
    """Return a function that runs one command line: (exit code, standard output, error).

    Its store and its spool are in *folder*.
    """
    monkeypatch.setenv("GPUOPS_STORE", f"sqlite:///{folder / 'store.db'}")
    monkeypatch.setenv("GPUOPS_SPOOL", str(folder / "spool"))

    def command(*args):
        code = run_command(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command
