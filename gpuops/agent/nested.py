"""An agent inside an agent: two launchers would restart the same workers."""

import os
from collections.abc import Mapping
from pathlib import Path

from gpuops.errors import UsageError

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
