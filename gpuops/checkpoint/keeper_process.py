"""Starting the keeper of a node, or taking over the one that outlived the agent before."""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuops.checkpoint.keeper_hang import HungError, answer_or_end
from gpuops.checkpoint.keeper_line import KeeperGoneError, KeeperLine
from gpuops.checkpoint.serve import LEASE_S
from gpuops.checkpoint.socket_place import socket_of
from gpuops.checkpoint.states import KeeperError
from gpuops.config import environ
from gpuops.host.companion import start_companion
from gpuops.host.directories import why_not_ours

READY_S = 30.0
_PROBE_S = 10.0
_AGAIN_S = 0.05


@dataclass(slots=True)
class KeeperProcess:
    """A keeper. ``adopted``: it ran before, and is not our child.

    ``ended`` says how one before it hung that was ended, "" where there was none.
    """

    socket_path: Path
    pid: int
    adopted: bool
    ended: str = ""

    def is_running(self) -> bool:
        """Say whether it runs; our child is reaped where it does not."""
        if self.adopted:
            try:
                os.kill(self.pid, 0)
            except OSError:
                return False
            return True
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            return False

    def kill(self) -> None:
        """End it at once, with all that it holds."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if not self.adopted:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def start_or_adopt(
    folder: Path, *, lease_s: float = LEASE_S, node: str = "", ready_s: float = READY_S
) -> KeeperProcess:
    """Return the keeper in *folder*, which is made where it is not there, for this user only.

    One that runs there without an agent is taken over with all that it holds; one that hangs is
    ended, with all that it holds, which takes some 20 seconds at most. Else a new one is started,
    which lives for *lease_s* seconds after the last agent and rank.

    Raises:
        KeeperError: It has an agent that runs; the folder is not ours alone; Python cannot be
            started; or it did not begin within *ready_s*.
    """
    why = why_not_ours(folder, private=True)
    if why is not None:
        raise KeeperError(f"the keeper cannot use {folder}: {why}")
    path = socket_of(folder.absolute())
    end_s, ended = time.monotonic() + ready_s, ""
    while True:
        try:
            found = _adopted(path)
        except HungError as exc:
            end_s, ended = time.monotonic() + ready_s, str(exc)
            continue
        if found is not None:
            found.ended = ended
            return found
        said, pid = _start(path.parent, lease_s, node, end_s)
        if said == "ready":
            return KeeperProcess(path, pid, adopted=False, ended=ended)
        KeeperProcess(path, pid, adopted=False).kill()
        if said.startswith("failed "):
            raise KeeperError(f"the keeper cannot begin: {said.removeprefix('failed ')}")
        if said != "taken" or time.monotonic() > end_s:
            raise KeeperError(
                f"the keeper in {folder} did not begin within {ready_s:g} s; its log is there"
            )
        # Another one has just begun, or is just ending.
        time.sleep(_AGAIN_S)


def _adopted(path: Path) -> KeeperProcess | None:
    """Return the keeper that listens at *path*, None where none does; raises HungError."""
    try:
        line = KeeperLine(path, deadline_s=_PROBE_S)
    except KeeperGoneError:
        return None
    try:
        fields = answer_or_end(line)
        agent = fields.integer("agent", 0, 2**31) if "agent" in fields else None
        pid = line.pid
    except KeeperGoneError:
        return None
    finally:
        line.close()
    if agent is not None:
        raise KeeperError(
            f"the keeper at {path} (pid {pid}) serves the agent with pid {agent}, which runs: end "
            "that agent first, or use another folder"
        )
    return KeeperProcess(path, pid, adopted=True)


def _start(folder: Path, lease_s: float, node: str, end_s: float) -> tuple[str, int]:
    """Start a keeper; return its first line, "" where there was none in time, and its pid."""
    # -P: never import from the directory in which the job happens to be.
    argv = [sys.executable, "-P", "-m", "gpuops.checkpoint.serve", "--folder", str(folder)]
    argv += ["--lease", f"{lease_s:g}"]
    argv += ["--node", node] if node else []
    try:
        process = start_companion(argv, environ())
    except OSError as exc:
        raise KeeperError(f"the keeper cannot be started: {exc.strerror}") from exc
    return process.first_line(end_s), process.pid
