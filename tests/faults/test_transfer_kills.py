"""One side killed or stopped in the middle: the rest goes over, and only the rest."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import transfer_process
from support.transfers import (
    Memory,
    Shelf,
    hand_over,
    job_pass,
    limits,
    peer,
    replica_store,
    serving,
    terms,
    until,
)

from gpuops.checkpoint.transfer.client import fetch
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.wire import TransferError
from gpuops.host.clock import SystemClock

CHUNK = 2**18
NBYTES = 64 * CHUNK + 11
RATE = 12 * 2**20  # so that there is a middle
BOUNDS = limits(chunk_bytes=CHUNK)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image"
    path.write_bytes(random.Random(5).randbytes(NBYTES))
    memory = transfer_process.FileMemory(path)
    yield path, memory, transfer_process.copy_in(memory, CHUNK)
    memory.close()


class Side:
    """One side in a process of its own."""

    def __init__(self, role, image, **more):
        args = {"role": role, "image": str(image), "chunk_bytes": CHUNK, **more}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(transfer_process.__file__)), json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def heard(self):
        """Return its next word."""
        line = self._process.stdout.readline()
        assert line, "it ended without a word"
        return json.loads(line)

    def send(self, number):
        os.kill(self._process.pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        self._process.wait(10)

    def finish(self):
        """Ask for its last word."""
        self._process.stdin.close()
        return self.heard()

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
        self._process.kill()
        self._process.wait(10)
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def sides():
    with contextlib.ExitStack() as stack:

        def start(*args, **more):
            side = Side(*args, **more)
            stack.callback(side.end)
            return side

        yield start


def n_arrived(path, memory):
    """Return how many chunks of the target are those of the image."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    return sum(
        data[at : at + CHUNK] == memory.view[at : at + CHUNK] for at in range(0, NBYTES, CHUNK)
    )


def in_thread(do):
    """Run *do* on the side; return a function that waits for what it returns."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(do)
    pool.shutdown(wait=False)
    return lambda: future.result(60)


def test_a_sender_that_is_killed_and_started_again_sends_only_the_rest(image, sides, tmp_path):
    path, memory, copy = image
    target = transfer_process.FileMemory(tmp_path / "target", NBYTES)
    first = sides("serve", path, bytes_per_s=RATE)
    port = first.heard()["port"]
    wait = in_thread(
        lambda: fetch([peer(port)], job_pass(), copy, target.view, terms(60, 20, limits=BOUNDS))
    )
    until(lambda: n_arrived(tmp_path / "target", memory) >= 12, 30)
    first.kill()
    n_before = n_arrived(tmp_path / "target", memory)
    second = sides("serve", path, port=port)
    assert second.heard()["port"] == port
    found = wait()

    assert bytes(target.view) == bytes(memory.view)
    assert found.received_bytes == NBYTES
    assert second.finish()["sent"] <= NBYTES - (n_before - 1) * CHUNK
    target.close()


def test_a_receiver_that_is_killed_and_started_again_fetches_only_the_rest(image, sides, tmp_path):
    path, memory, copy = image
    target = tmp_path / "target"
    with serving(
        Shelf((memory, copy)), pace=SendPace(RATE, SystemClock()), bounds=BOUNDS
    ) as server:
        first = sides("fetch", path, target=str(target), port=server.port)
        until(lambda: n_arrived(target, memory) >= 12, 30)
        first.kill()
        n_before = n_arrived(target, memory)
        second = sides("fetch", path, target=str(target), port=server.port)
        told = second.heard()

    assert target.read_bytes() == bytes(memory.view)
    assert told["found"] >= n_before * CHUNK - CHUNK
    assert told["received"] == NBYTES - told["found"] < NBYTES


def test_an_owner_that_is_killed_and_started_again_pushes_only_the_rest(image, sides):
    path, memory, _copy = image
    store = replica_store(chunk_bytes=CHUNK)
    with serving(store, store, bounds=BOUNDS) as server:
        first = sides("push", path, port=server.port, bytes_per_s=RATE)
        until(lambda: server.counters()["received_bytes"] >= 12 * CHUNK, 30)
        first.kill()
        until(lambda: server._connections == {})
        assert store.copies() == []
        second = sides("push", path, port=server.port)
        sent = second.heard()["sent"]

    assert sent <= NBYTES - 8 * CHUNK
    (held,) = store.copies()
    pinned = store.open(held.state, held.shard)
    assert os.pread(pinned.fd, NBYTES, 0) == bytes(memory.view)
    pinned.release()
    store.close()


def test_a_holder_that_is_killed_loses_its_memory_and_gets_all_again(image, sides, tmp_path):
    path, memory, copy = image
    first = sides("hold", path, target=str(tmp_path / "one"))
    port = first.heard()["port"]
    pace = SendPace(RATE, SystemClock())
    wait = in_thread(
        lambda: hand_over(memory, copy, peer(port), terms(60, 20, limits=BOUNDS), pace)
    )
    until(lambda: n_arrived(tmp_path / "one", memory) >= 12, 30)
    first.kill()
    pace.set_rate(None)
    second = sides("hold", path, target=str(tmp_path / "two"), port=port)
    assert second.heard()["port"] == port
    wait()

    assert (tmp_path / "two").read_bytes() == bytes(memory.view)
    assert second.finish() == {"received": NBYTES, "copies": 1}


def test_a_sender_that_is_stopped_is_left_for_the_next_holder(image, sides, tmp_path):
    path, memory, copy = image
    target = transfer_process.FileMemory(tmp_path / "target", NBYTES)
    bounds = limits(chunk_bytes=CHUNK, stall_s=2.0, handshake_s=2.0)
    first = sides("serve", path, bytes_per_s=RATE)
    port = first.heard()["port"]
    with serving(Shelf((memory, copy)), bounds=bounds) as server:
        wait = in_thread(
            lambda: fetch(
                [peer(port, "one"), peer(server.port, "two")],
                job_pass(),
                copy,
                target.view,
                terms(60, 3.0, limits=bounds),
            )
        )
        until(lambda: n_arrived(tmp_path / "target", memory) >= 12, 30)
        first.send(signal.SIGSTOP)
        found = wait()

    assert bytes(target.view) == bytes(memory.view)
    served = dict(found.served)
    assert served["one"] >= 12 * CHUNK
    assert served["two"] == NBYTES - served["one"]
    assert "one" in found.failed[0]
    # What it sends when it goes on again reaches nobody: that connection is closed.
    before = bytes(target.view)
    first.send(signal.SIGCONT)
    assert bytes(target.view) == before
    target.close()


def test_a_receiver_that_is_stopped_pins_no_copy_for_long(image, sides, tmp_path):
    path, memory, copy = image
    shelf = Shelf((memory, copy))
    bounds = limits(chunk_bytes=CHUNK, stall_s=0.5, idle_s=0.5)
    pace = SendPace(RATE, SystemClock())
    with serving(shelf, pace=pace, bounds=bounds) as server:
        first = sides("fetch", path, target=str(tmp_path / "target"), port=server.port)
        until(lambda: n_arrived(tmp_path / "target", memory) >= 12, 30)
        first.send(signal.SIGSTOP)
        until(lambda: shelf.pins == 0, 20)
        pace.set_rate(None)
        mine = Memory(NBYTES)
        fetch([peer(server.port)], job_pass(), copy, mine.view, terms(limits=BOUNDS))
        assert bytes(mine.view) == bytes(memory.view)
        first.send(signal.SIGCONT)
        told = first.heard()

    assert told["received"] == NBYTES
    assert (tmp_path / "target").read_bytes() == bytes(memory.view)


def test_an_owner_that_is_stopped_and_goes_on_finishes_its_push(image, sides):
    path, _memory, _copy = image
    store = replica_store(chunk_bytes=CHUNK)
    bounds = limits(chunk_bytes=CHUNK, stall_s=0.5)
    with serving(store, store, bounds=bounds) as server:
        first = sides("push", path, port=server.port, bytes_per_s=RATE)
        until(lambda: server.counters()["received_bytes"] >= 12 * CHUNK, 30)
        first.send(signal.SIGSTOP)
        until(lambda: server._connections == {}, 20)
        first.send(signal.SIGCONT)
        first.heard()

    assert len(store.copies()) == 1
    store.close()


def test_no_push_to_a_holder_that_is_stopped_for_good(image, sides, tmp_path):
    path, memory, copy = image
    holder = sides("hold", path, target=str(tmp_path / "one"))
    port = holder.heard()["port"]
    holder.send(signal.SIGSTOP)
    bounds = limits(chunk_bytes=CHUNK, stall_s=0.5, handshake_s=0.5)
    with pytest.raises(TransferError, match="could not be pushed to holder"):
        hand_over(memory, copy, peer(port), terms(20, 1.0, limits=bounds))
