"""A TCP port that is free now."""

import socket


def free_port() -> int:
    """Return a port that is free on every address: the workers' rank 0 will listen on all."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
