"""A heartbeat ring in this process: what an agent would write to it, and read of it."""

import contextlib

from gpuops.wire.ring import (
    RING_BYTES,
    AgentRequest,
    RingHeader,
    read_flags,
    write_header,
    write_request,
)
from gpuops.worker import api
from gpuops.worker.heartbeat import Heartbeat


class Ring:
    """The agent's side of it."""

    def __init__(self):
        self.buffer = bytearray(RING_BYTES)
        write_header(self.buffer, RingHeader(rank=0, generation=0, pid=1, start_mono_ns=0))

    def drain(self, stop_step):
        write_request(self.buffer, AgentRequest.DRAIN, stop_step)

    def end(self):
        write_request(self.buffer, AgentRequest.TERMINATE)

    @property
    def flags(self):
        return read_flags(self.buffer)


@contextlib.contextmanager
def connected():
    """Yield the ring that this process writes its steps into, as under ``gpuops run``."""
    ring = Ring()
    heart = Heartbeat(memoryview(ring.buffer))
    api.connect(heart, lambda: None)
    try:
        yield ring
    finally:
        heart.stop()
