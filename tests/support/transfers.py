"""Keepers that hand images over, without the rest of a keeper."""

import contextlib
import mmap
import os
import random
import threading
import time

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import push
from gpuops.checkpoint.transfer.connection import TransferLimits
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.parallel import TransferOptions
from gpuops.checkpoint.transfer.server import TransferServer
from gpuops.checkpoint.transfer.wire import JobCredentials, PushOffer
from gpuops.checkpoint.types import (
    KeeperAddress,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.host.clock import SystemClock

JOB, TOKEN = "job-17", "a token of the job"
CHUNK = 4096
NBYTES = 40 * CHUNK + 123  # of most images
STATE, SHARD = StateId(3, 120), Shard(1, 4)
LAYOUT = "ab" * 32


class Memory:
    """A memfd with a writable view."""

    def __init__(self, nbytes, name="test"):
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)
        self.view = memoryview(self._map)
        self.is_closed = self.is_populated = False

    def populate(self, stop):
        self.is_populated = True
        return not stop()

    def close(self):
        self.view.release()
        self._map.close()
        os.close(self.fd)
        self.is_closed = True


def filled(nbytes, seed=0):
    """Return a memory with bytes that depend on *seed*."""
    memory = Memory(nbytes)
    memory.view[:] = random.Random(seed).randbytes(nbytes)
    return memory


def copy_of(memory, state=STATE, shard=SHARD, chunk_bytes=CHUNK, holder="owner"):
    """Return the noun of what lies in *memory*."""
    digest = compute_digest(memory.view, chunk_bytes=chunk_bytes)
    return ShardCopy(state, shard, LAYOUT, digest, Tier.MEMORY, holder)


class Shelf:
    """A source of copies that counts its pins."""

    def __init__(self, *held, is_mapped=True):
        self._is_mapped = is_mapped
        self.held = {(copy.state, copy.shard): (memory, copy) for memory, copy in held}
        self.damaged = []
        self.pins = 0
        self._lock = threading.Lock()

    def open(self, state, shard):
        found = self.held.get((state, shard))
        if found is None:
            return None
        memory, copy = found
        with self._lock:
            self.pins += 1
        return PinnedCopy(
            memory.fd, copy.digest, self._release, self.damaged.append, self._view(memory)
        )

    def _view(self, memory):
        return memory.view if self._is_mapped else None

    def _release(self):
        with self._lock:
            self.pins -= 1


def job_pass(epoch=3, token=TOKEN, job=JOB):
    return JobCredentials(job, token, epoch=epoch)


def limits(**more):
    """Return limits that suit tests: small chunks, short waits."""
    handshake_s = more.get("handshake_s", 5.0)  # of everybody: the machine may be busy
    usual = {"chunk_bytes": CHUNK, "stall_s": 2.0, "handshake_s": handshake_s}
    return TransferLimits(**{**usual, "unknown_handshake_s": handshake_s, **more})


def terms(deadline_s=20.0, patience_s=5.0, **more):
    bounds = more.pop("limits", None) or limits()
    return TransferOptions(deadline_s=deadline_s, no_progress_s=patience_s, limits=bounds, **more)


def no_pace():
    return SendPace(None, SystemClock())


@contextlib.contextmanager
def serving(source, sink=None, job=None, pace=None, bounds=None):
    """Yield a server on a port of its own."""
    place = ("127.0.0.1", 0)
    server = TransferServer(
        place, job or job_pass(), source, sink, pace or no_pace(), bounds or limits()
    )
    try:
        yield server
    finally:
        server.close()


def peer(port, name="holder"):
    return KeeperAddress(name, "127.0.0.1", port)


def replica_store(bytes_max=2**30, chunk_bytes=CHUNK):
    """Return the store of a holder that keeps the one shard."""
    store = ReplicaStore(
        "holder", lambda _name, nbytes: Memory(nbytes), bytes_max=bytes_max, chunk_bytes=chunk_bytes
    )
    store.keep_only([SHARD])
    return store


def hand_over(memory, copy, to, term=None, pace=None):
    """Push *copy*, which lies in *memory*, to the peer *to*; return what it took."""
    pinned = PinnedCopy(memory.fd, copy.digest)
    return push(to, job_pass(), push_of(copy), pinned, term or terms(), pace or no_pace())


def push_of(copy, committed=None):
    """Return what an owner offers of *copy*."""
    digest = copy.digest
    return PushOffer(copy.state, copy.shard, copy.layout, digest.nbytes, digest.root, committed)


def until(condition, deadline_s=30.0):
    """Wait for *condition*; fail where it does not come."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to be"
        threading.Event().wait(0.005)
