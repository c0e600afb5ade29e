"""What only one test on this machine may do at a time, whichever process it is in."""

import fcntl
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hung_driver():
    """Hold what a driver that hangs needs: a check finds the hung children of others, by design."""
    with (Path(tempfile.gettempdir()) / "gpuops-tests-hung-driver.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
