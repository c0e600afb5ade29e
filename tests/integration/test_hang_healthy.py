"""Real processes that load for long, in simulated time: at work they are no hang, else they are."""

import socket
import threading
from contextlib import contextmanager

import pytest
from support.monitors import report_of
from support.movers import CHILD, READS, RECEIVES, told
from support.runs import wait_until

from gpuops.agent.elastic.exits import RankFiles
from gpuops.agent.elastic.workers import RingReader, Worker
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.evidence import SystemEvidenceReader
from gpuops.agent.monitors.hang.monitor import HangMonitor
from gpuops.host.clock import FakeClock
from gpuops.host.process.traffic import tcp_bytes
from gpuops.wire.ring import Beat, StepSource, WorkerPhase


class Start:
    """A restarted rank before its first step; between two samples of it *work* is called."""

    def __init__(self, folder, pid, work):
        self.clock = FakeClock()
        reader = SystemEvidenceReader("", next_to=folder)
        self.monitor = HangMonitor(
            self.clock, None, {}, reader=reader, pause=lambda _s: work(), state=lambda _pid: "S"
        )
        ring, files = RingReader(folder / "none"), RankFiles()
        worker = Worker(rank=0, local_rank=0, pid=pid, ring=ring, files=files)
        watched = MonitoredAttempt(generation=0, node="n1", workers=[worker], folder=folder)
        self.monitor.begin(watched)
        step = Beat(1, 1, self.clock.mono_ns(), WorkerPhase.STEPPING, StepSource.REPORTED, 1)
        self.monitor.feed({0: [step]})
        self.monitor.begin(watched)

    def hang(self, limit_s):
        """Return after how many seconds there is a hang, None where there is none."""
        for passed_s in range(limit_s):
            self.clock.advance(1)
            report = report_of(self.monitor)
            wait_until(lambda: not _collects(), what="the evidence")
            if report is not None:
                return passed_s
        return None


def _collects():
    return any(thread.name == "gpuops-evidence" for thread in threading.enumerate())


@contextmanager
def server():
    """Listen; yield the port, and what feeds 2 kB to the connection there is by then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = []

        def feed():
            near[:] = near or [listening.accept()[0]]
            near[0].sendall(bytes(2000))
            return 2000

        yield listening.getsockname()[1], feed
        for each in near:
            each.close()


@pytest.mark.parametrize("text", [READS, CHILD, RECEIVES], ids=["files", "a child", "slow socket"])
@pytest.mark.parametrize("works", [True, False], ids=["works", "hangs"])
def test_a_quarter_of_an_hour_of_loading_is_no_hang_and_standing_still_is(tmp_path, text, works):
    if text is RECEIVES and not tcp_bytes():
        pytest.skip("no sock_diag in this kernel or sandbox")
    with server() as (port, feed), told(text, port) as (pid, tell):

        def work():
            if works:
                tell(feed() if text is RECEIVES else 2**24)

        after_s = Start(tmp_path, pid, work).hang(900)

    assert (after_s is None) if works else (600 <= after_s <= 610)
