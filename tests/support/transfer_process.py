"""One side of a transfer in a process of its own, to be killed.

Reads one JSON object of arguments from the command line; prints one JSON object per event. Images
and targets are files, mapped, so that they outlive the process as a keeper's memory outlives it.
"""

import json
import mmap
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import fetch, push
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.server import TransferServer
from gpuops.checkpoint.types import ShardCopy, Tier
from gpuops.host.clock import SystemClock
from support.transfers import LAYOUT, SHARD, STATE, Shelf, job_pass, limits, peer, push_of, terms


class FileMemory:
    """A file, mapped."""

    def __init__(self, path, nbytes=None):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if nbytes is not None:
            os.ftruncate(self.fd, nbytes)
        self.view = memoryview(mmap.mmap(self.fd, 0))

    def close(self):
        os.close(self.fd)


def copy_in(memory, chunk_bytes):
    """Return the noun of what lies in *memory*."""
    digest = compute_digest(memory.view, chunk_bytes=chunk_bytes)
    return ShardCopy(STATE, SHARD, LAYOUT, digest, Tier.MEMORY, "owner")


def say(**what):
    """Print one event."""
    print(json.dumps(what), flush=True)


def main():
    """Be what the arguments say."""
    args = json.loads(sys.argv[1])
    bounds = limits(chunk_bytes=args["chunk_bytes"])
    pace = SendPace(args.get("bytes_per_s"), SystemClock())
    until = terms(deadline_s=60, patience_s=20, limits=bounds)
    image = FileMemory(args["image"])
    copy = copy_in(image, args["chunk_bytes"])
    if args["role"] == "serve":
        place = ("127.0.0.1", args.get("port", 0))
        server = TransferServer(place, job_pass(), Shelf((image, copy)), None, pace, bounds)
        say(port=server.port)
        sys.stdin.read()
        say(sent=server.counters()["sent_bytes"])
        server.close()
    elif args["role"] == "hold":
        store = ReplicaStore(
            "holder",
            lambda _name, nbytes: FileMemory(args["target"], nbytes),
            bytes_max=2**30,
            chunk_bytes=args["chunk_bytes"],
        )
        store.keep_only([SHARD])
        place = ("127.0.0.1", args.get("port", 0))
        server = TransferServer(place, job_pass(), store, store, pace, bounds)
        say(port=server.port)
        sys.stdin.read()
        say(received=server.counters()["received_bytes"], copies=len(store.copies()))
        server.close()
    elif args["role"] == "fetch":
        target = FileMemory(args["target"], copy.digest.nbytes)
        holder = peer(args["port"])
        found = fetch([holder], job_pass(), copy, target.view, until, resume=True)
        say(received=found.received_bytes, found=found.found_bytes)
    else:
        pinned = PinnedCopy(image.fd, copy.digest)
        done = push(peer(args["port"]), job_pass(), push_of(copy), pinned, until, pace)
        say(sent=done.sent_bytes)


if __name__ == "__main__":
    main()
