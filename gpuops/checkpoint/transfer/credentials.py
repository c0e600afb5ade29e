"""What a keeper shows of its job to another keeper; for the proofs see `host.job_proof`."""

import threading

from gpuops.host.net.job_proof import derived

JOB_BYTES = 16


class JobCredentials:
    """What a keeper shows and asks for: of which job it is, and which epoch it has reached.

    One object for the server and every client of a keeper: `advance` fences them all at once.
    """

    def __init__(self, job: str, token: str, *, epoch: int = 0) -> None:
        self.job = derived("gpuops transfer job", job)[:JOB_BYTES]
        self.key = derived("gpuops transfer token", token)
        self._epoch = epoch
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """Return the newest epoch that this keeper knows of."""
        return self._epoch

    def advance(self, epoch: int) -> None:
        """Refuse, from now on, whatever is of an epoch older than *epoch*; never goes back."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)
