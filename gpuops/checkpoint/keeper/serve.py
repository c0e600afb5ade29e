"""``python -m gpuops.checkpoint.keeper.serve``: the main function of a node's keeper.

It prints one line, ``ready``, ``taken`` (another keeper has the folder) or ``failed WHY``, and then
nothing; it logs into its folder. It outlives the agent and the ranks, so that their saved states
survive, and ends when none of them has been connected for the duration of the lease.
"""

import argparse
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

from gpuops.checkpoint.keeper.connection import LOCK_NAME
from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.jobs import EventQueue, Jobs, Waker
from gpuops.checkpoint.keeper.server import KeeperServer
from gpuops.checkpoint.memory.node_memory import NodeMemory
from gpuops.checkpoint.storage.directory_lock import DirectoryLocks, this_process
from gpuops.host.process.sidecar import report_and_detach
from gpuops.host.trust import why_not_ours
from gpuops.log import printable

LEASE_S = 120.0
LOG = "keeper.log"
EXIT_TAKEN = 75
_LOG_BYTES_MAX = 2**20
_FILES_LIMIT = 16_384
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A thread that holds Python's lock delays the thread that serves ranks by this much.
_SWITCH_S = 0.0005

_logger = logging.getLogger("gpuops.checkpoint.keeper.api")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until idle; return 0, 75 where another keeper has the folder, 70 on failure."""
    options = _options(argv)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    _raise_files_limit()
    options.folder = options.folder.absolute()
    os.chdir("/")  # not to block the unmounting of a directory
    why = why_not_ours(options.folder, private=True)
    if why is not None:
        return _fail(f"{options.folder}: {why}")
    try:
        lock = os.open(options.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report_and_detach("taken")
        return EXIT_TAKEN
    except OSError as exc:
        return _fail(f"{options.folder / LOCK_NAME}: {exc.strerror}")
    try:
        return _serve(options)
    except OSError as exc:
        return _fail(str(exc))


def _serve(options: argparse.Namespace) -> int:
    _set_up_log(options.folder / LOG)
    waker = Waker()
    jobs = Jobs(waker.wake)
    claims = DirectoryLocks(
        lambda: core.persister.origin.job, lambda: core.is_in_use, this_process()
    )
    core = KeeperCore(
        NodeMemory(options.node),
        jobs,
        open_store=claims.open_store,
        events=EventQueue(on_event=_log_event),
    )
    server = KeeperServer(
        core, options.folder, lease_s=options.lease, waker=waker, run_callbacks=jobs.run_callbacks
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: server.begin_shutdown())
    _logger.info("the keeper of %s starts, pid %d", options.node, os.getpid())
    report_and_detach("ready")
    try:
        server.serve()
    finally:
        core.is_ending = True
        claims.close()
        server.close()
        jobs.close()
        logging.shutdown()
    # A thread may be blocked in a file system for ever; its work is no longer needed.
    os._exit(0)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpuops.checkpoint.keeper.serve", description=__doc__
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the socket and the log"
    )
    parser.add_argument("--lease", type=float, default=LEASE_S, help="seconds without a job")
    parser.add_argument("--node", default=socket.gethostname(), help="the name of this node")
    return parser.parse_args(argv)


def _raise_files_limit() -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _FILES_LIMIT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _set_up_log(path: Path) -> None:
    handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    # A full disk must not cause a traceback with each line.
    logging.raiseExceptions = False
    _logger.handlers[:] = [handler]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def _log_event(event: Mapping[str, object]) -> None:
    _logger.info("%s", " ".join(f"{name}={value}" for name, value in event.items() if value))


def _fail(why: str) -> int:
    report_and_detach(f"failed {why}")
    return os.EX_SOFTWARE


if __name__ == "__main__":
    sys.exit(main())
