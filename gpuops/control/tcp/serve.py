"""``python -m gpuops.control.tcp.serve``: the control store of one run as a process of its own.

It prints one line, ``ready PORT``, ``taken`` (the port) or ``failed WHY``, and then nothing. It
outlives the agent that started it and ends by itself: when none who holds the token has sent
anything for the lease, sooner once the run is over. Signals that a terminal or Slurm sends to a
whole job only shorten the lease.
"""

import argparse
import asyncio
import errno
import os
import signal
import sys
from collections.abc import Sequence

from gpuops.config.resolve import environ
from gpuops.control.tcp.server import LEASE_S, ControlStoreServer, raise_files_limit
from gpuops.control.tcp.server_connection import ServerLimits, ServerState
from gpuops.host.process.sidecar import report_and_detach

TOKEN_BYTES_MAX = 4096
EXIT_PORT_TAKEN = 75
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until nobody needs it; return 0, or 75 without the address or the promised token."""
    options = _options(argv)
    token = _token(options)
    if options.token_fd is not None and not token:
        report_and_detach("failed the agent ended: no token came")
        return EXIT_PORT_TAKEN
    limits = ServerLimits(connections_max=min(options.connections, raise_files_limit()))
    state = ServerState(run_key=options.run_key, token=token, limits=limits)
    return asyncio.run(_serve(ControlStoreServer(state, options.lease), options.host, options.port))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpuops.control.tcp.serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--run-key", required=True, help="agents with the same one are one run")
    parser.add_argument("--lease", type=float, default=LEASE_S, help="seconds of silence")
    parser.add_argument("--connections", type=int, default=ServerLimits().connections_max)
    # Never the token itself: everybody on this machine can read a command line.
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--token-fd", type=int, help="read the job's token from this descriptor")
    source.add_argument("--token-env", help="read the job's token from this variable")
    return parser.parse_args(argv)


def _token(options: argparse.Namespace) -> str:
    if options.token_env is not None:
        return environ().get(options.token_env, "")
    if options.token_fd is None:
        return ""
    with os.fdopen(options.token_fd, "rb", closefd=options.token_fd > 2) as file:
        return file.read(TOKEN_BYTES_MAX).decode().rstrip("\n")


async def _serve(server: ControlStoreServer, host: str, port: int) -> int:
    loop = asyncio.get_running_loop()
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    loop.add_signal_handler(signal.SIGTERM, server.begin_shutdown)
    try:
        listener = await server.listen(host, port)
    except OSError as exc:
        is_taken = exc.errno == errno.EADDRINUSE
        report_and_detach(
            "taken" if is_taken else f"failed {os.strerror(exc.errno) if exc.errno else exc}"
        )
        return EXIT_PORT_TAKEN
    report_and_detach(f"ready {listener.sockets[0].getsockname()[1]}")
    async with listener:
        await server.wait_until_idle()
    return 0


if __name__ == "__main__":
    sys.exit(main())
