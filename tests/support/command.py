"""Run the ``gpuops`` command as a user does: another process, its exit code, its output."""

import os
import subprocess
import sys


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
