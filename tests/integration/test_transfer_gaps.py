"""Replicas that are pushed over loopback keep out of the way of a training that is played."""

import socket
import threading
import time

import pytest
from support.transfers import (
    copy_of,
    filled,
    hand_over,
    limits,
    peer,
    replica_store,
    serving,
    terms,
    until,
)

from gpuops.checkpoint.transfer.pacing import GapPace
from gpuops.host.clock import SystemClock
from gpuops.host.net.traffic import Traffic, interface_of

MIB = 2**20
STATE_BYTES = 32 * MIB
CHUNK_BYTES = 4 * MIB


class Others:
    """A counter as of a training that sends all the time, until it is told to stop."""

    def __init__(self, pace):
        self.pace = pace
        self.begun_s = time.monotonic()
        self.is_sending = True
        self.sent_bytes = 0

    def __call__(self):
        now_s = time.monotonic()
        if self.is_sending:
            self.sent_bytes = round(10**9 * (now_s - self.begun_s))
        return self.sent_bytes + round(self.pace.turned_bytes)


class Counted(GapPace):
    """Counts what it lets through."""

    turned_bytes = 0

    def enqueue(self, nbytes):
        self.turned_bytes += nbytes
        return super().enqueue(nbytes)


@pytest.fixture
def pushed():
    """Return a function that pushes a state over sockets, and how many seconds that took."""
    memory, bounds = filled(STATE_BYTES), limits(chunk_bytes=CHUNK_BYTES, stall_s=20.0)
    copy = copy_of(memory, chunk_bytes=CHUNK_BYTES)
    store = replica_store(STATE_BYTES, chunk_bytes=CHUNK_BYTES)

    def push(pace, within_s):
        with serving(store, store, bounds=bounds) as server:
            begin_s = time.monotonic()
            pace.set_deadline(STATE_BYTES, within_s)
            term = terms(60.0, 30.0, limits=bounds, n_connections=2)
            hand_over(memory, copy, peer(server.port), term, pace)
            return time.monotonic() - begin_s

    yield push
    store.close()
    memory.close()


def test_beside_a_training_a_state_takes_the_time_it_has(pushed):
    pace = Counted(SystemClock())
    pace.watch(Others(pace))
    pace.take(0)

    # The last bytes, a quarter of it, have all that goes.
    assert pushed(pace, 1.0) > 0.6
    assert pace.yielded_s > 0.5


def test_a_state_that_waits_goes_out_once_there_is_a_gap(pushed):
    pace = Counted(SystemClock())
    others = Others(pace)
    pace.watch(others)
    pace.take(0)

    def stop():
        until(lambda: pace.yielded_s > 0.3)
        others.is_sending = False
        yielded_s.append(pace.yielded_s)

    yielded_s = []
    stopper = threading.Thread(target=stop)
    stopper.start()
    pushed(pace, 60.0)
    stopper.join()
    # It held back no more; at the least there is it would have done so for six seconds.
    assert pace.yielded_s - yielded_s[0] < 3


def test_the_counter_of_an_interface_has_what_was_sent():
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("no address") is None
    assert interface_of("192.0.2.77") is None
    counter = Traffic("lo")
    before = counter.sent_bytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(100):
            sock.sendto(bytes(10_000), ("127.0.0.9", 9))  # nobody need take it

    assert counter.sent_bytes() - before >= 100 * 10_000


def test_an_interface_that_is_not_there_counts_nothing(tmp_path):
    assert Traffic("eth77").sent_bytes() is None
    assert Traffic("lo", root=tmp_path).sent_bytes() is None


def test_an_adapter_is_counted_with_what_goes_past_the_kernel(tmp_path):
    (tmp_path / "proc/self/net").mkdir(parents=True)
    head = "Inter-|   Receive\n face |bytes packets\n"
    rows = "  lo: 1 1 0 0 0 0 0 0 2 2\neth0:10 1 0 0 0 0 0 0 500 3\n ib0: 9 1 0 0 0 0 0 0 70 3\n"
    (tmp_path / "proc/self/net/dev").write_text(head + rows)
    for name, kind in (("eth0", 1), ("ib0", 32)):
        here = tmp_path / "sys/class/net" / name
        counters = here / "device/infiniband/mlx5_0/ports/1/counters"
        counters.mkdir(parents=True)
        (counters / "port_xmit_data").write_text("1000\n")
        (here / "type").write_text(f"{kind}\n")

    assert Traffic("lo", tmp_path).sent_bytes() == 2
    # RoCE goes past the interface's counter; what an IPoIB interface sends is in the port's.
    assert Traffic("eth0", tmp_path).sent_bytes() == 500 + 4000
    assert Traffic("ib0", tmp_path).sent_bytes() == 4000
