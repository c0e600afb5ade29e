"""The program of a pair test: what says nothing of the link is no result."""

import socket
import subprocess
import sys

import pytest


def run_alone(size_bytes):
    """Return the finished program of the one rank of a group, which asks for *size_bytes*."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        words = ["--rank", "0", "--world", "1", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--listen-fd", str(fd), "--seconds", "0.1", "--timeout", "60"]
        words += ["--size-bytes", str(size_bytes)]
        return subprocess.run(
            [sys.executable, "-m", "gpuops.worker.burnin.pair", *words],
            pass_fds=(fd,),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )


@pytest.mark.torch
def test_a_buffer_that_does_not_fit_blames_no_pair():
    done = run_alone(2**50)

    assert (done.returncode, done.stdout) == (1, "")
    assert "DefaultCPUAllocator" in done.stderr
