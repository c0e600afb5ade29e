"""A server that speaks S3, in a process of its own, on loopback."""

import contextlib
import importlib.util
import itertools
import subprocess
import sys

from support.services import unavailable

# It ends with the pipe it reads from, however the tests end.
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""
_numbers = itertools.count(1)


class S3Server:
    """A server on *port*; each `bucket` is a new one."""

    def __init__(self, port):
        self.port = port

    def options(self, port=None, **timing):
        """Return what fsspec needs to reach it, through another *port* if given."""
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {
                "endpoint_url": f"http://127.0.0.1:{port or self.port}",
                "region_name": "us-east-1",
            },
            "config_kwargs": {
                "connect_timeout": 2,
                "read_timeout": 5,
                "retries": {"max_attempts": 1},
                "s3": {"addressing_style": "path"},
                **timing,
            },
        }

    def bucket(self):
        """Make a bucket; return its name."""
        import s3fs

        name = f"bucket-{next(_numbers)}"
        # The server imports what serves S3 with the first request.
        options = self.options(connect_timeout=60, read_timeout=60)
        filesystem = s3fs.S3FileSystem(skip_instance_cache=True, **options)
        # Its mkdir names the region, which the one that is the default refuses.
        filesystem.call_s3("create_bucket", Bucket=name)
        return name


@contextlib.contextmanager
def s3_server():
    """Yield a running `S3Server`."""
    for module in ("moto.server", "s3fs"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            unavailable(f"{module} is not installed")
    words = [sys.executable, "-c", _SERVE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **pipes) as process:
        try:
            yield S3Server(int(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(20)
