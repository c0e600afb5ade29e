"""How much of a raw socket's rate does a fetch between two keepers reach, hashes and all?

Beside it, in turn, with the same number of connections, slices and the same memory on both sides:
`raw` sends from the mapping and receives into the mapping, without a word of protocol and without a
hash; `raw sendfile` is the same from the descriptor. Sender and receiver are two processes. Every
kind is warmed up once; the first of each is reported apart. Run as a script:

    python tests/benchmarks/bench_transfer.py --mib 512 --rounds 9 --out transfer.json
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.transfers import JOB, LAYOUT, SHARD, STATE, TOKEN, Memory, Shelf, no_pace, peer

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import fetch, push
from gpuops.checkpoint.transfer.connection import SLICE_BYTES, TransferLimits
from gpuops.checkpoint.transfer.parallel import TransferOptions
from gpuops.checkpoint.transfer.server import TransferServer
from gpuops.checkpoint.transfer.wire import JobCredentials, PushOffer
from gpuops.checkpoint.types import CHUNK_BYTES, ShardCopy, Tier

_ASK = struct.Struct(">QQ?")


def image(nbytes):
    """Return a memory of *nbytes* that is not all the same."""
    memory = Memory(nbytes)
    block = os.urandom(2**20)
    for at in range(0, nbytes, len(block)):
        memory.view[at : at + len(block)] = block[: nbytes - at]
    return memory


def copy_of(memory):
    """Return the noun of what lies in *memory*."""
    return ShardCopy(STATE, SHARD, LAYOUT, compute_digest(memory.view), Tier.MEMORY, "owner")


def raw_server(memory):
    """Serve ranges of *memory* to whoever asks; return the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve(sock):
        with sock:
            while asked := sock.recv(_ASK.size, socket.MSG_WAITALL):
                at, end, is_file = _ASK.unpack(asked)
                while at < end:
                    if is_file:
                        at += os.sendfile(sock.fileno(), memory.fd, at, min(SLICE_BYTES, end - at))
                    else:
                        at += sock.send(memory.view[at : min(at + SLICE_BYTES, end)])

    def accept():
        while True:
            sock, _address = listener.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def raw_fetch(port, target, n_connections, is_file):
    """Receive all of *target* over so many connections."""
    places = iter(range(0, target.nbytes, CHUNK_BYTES))
    lock = threading.Lock()

    def claim():
        with lock:
            return next(places, None)

    def work():
        with socket.create_connection(("127.0.0.1", port)) as sock:
            asked = []

            def ask():
                at = claim()
                if at is not None:
                    end = min(at + CHUNK_BYTES, target.nbytes)
                    sock.sendall(_ASK.pack(at, end, is_file))
                    asked.append((at, end))

            ask()
            while asked:
                ask()
                at, end = asked.pop(0)
                while at < end:
                    piece = target.view[at : min(at + SLICE_BYTES, end)]
                    at += sock.recv_into(piece, 0, socket.MSG_WAITALL)

    threads = [threading.Thread(target=work) for _ in range(n_connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def owner(pipe, nbytes):
    """Be the sending process: serve raw and as a keeper; push when told to."""
    memory = image(nbytes)
    copy = copy_of(memory)
    pace = no_pace()
    job = JobCredentials(JOB, TOKEN, epoch=3)
    server = TransferServer(
        ("127.0.0.1", 0), job, Shelf((memory, copy)), None, pace, TransferLimits()
    )
    pipe.send((raw_server(memory), server.port, copy))
    while (told := pipe.recv()) is not None:
        port, step, terms = told
        state = type(STATE)(STATE.epoch, step)
        digest = copy.digest
        offer = PushOffer(state, SHARD, LAYOUT, digest.nbytes, digest.root, None)
        push(peer(port), job, offer, PinnedCopy(memory.fd, digest, view=memory.view), terms, pace)
        pipe.send("pushed")
    server.close()


def fresh_holder(nbytes, job):
    """Return a holder, its store and its server; its slots are taken and mapped already."""
    store = ReplicaStore("holder", lambda _name, size: touched(size), bytes_max=4 * nbytes)
    store.keep_only([SHARD])
    server = TransferServer(("127.0.0.1", 0), job, store, store, no_pace(), TransferLimits())
    return store, server


def touched(nbytes):
    """Return a memory of which every page is there."""
    memory = Memory(nbytes)
    for at in range(0, nbytes, 4096):
        memory.view[at] = 1
    return memory


def measure(nbytes, rounds, n_connections):
    """Return {kind: seconds of each round}, interleaved."""
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=owner, args=(theirs, nbytes))
    process.start()
    raw_port, port, copy = pipe.recv()
    job = JobCredentials(JOB, TOKEN, epoch=3)
    target = touched(nbytes)
    terms = TransferOptions(deadline_s=120, n_connections=n_connections)
    step = [0]
    store, server = fresh_holder(nbytes, job)

    def pushed():
        step[0] += 1
        pipe.send((server.port, step[0], terms))
        assert pipe.recv() == "pushed"

    kinds = {
        "raw": lambda: raw_fetch(raw_port, target, n_connections, is_file=False),
        "raw sendfile": lambda: raw_fetch(raw_port, target, n_connections, is_file=True),
        "fetch": lambda: fetch([peer(port)], job, copy, target.view, terms),
        "push": pushed,
        "hash only": lambda: compute_digest(target.view),
    }
    took = {kind: [] for kind in kinds}
    try:
        for number in range(rounds + 1):
            # Another one first each time, so that none always follows the same one.
            names = list(kinds)[number % len(kinds) :] + list(kinds)[: number % len(kinds)]
            for kind in names:
                if kind == "push":
                    # What the slot had is the same image; it must not be found there.
                    forget(store, server, target)
                began_s = time.perf_counter()
                kinds[kind]()
                took[kind].append(time.perf_counter() - began_s)
                if kind == "fetch":
                    assert compute_digest(target.view) == copy.digest
        pipe.send(None)
        process.join(30)
    finally:
        process.kill()
        server.close()
        store.close()
    return took


def forget(store, _server, _target):
    """Let the holder's slots hold something else than what is pushed next."""
    for slots in store._slots.values():
        for slot in slots:
            slot.previous_digest = slot.copy = None


def main():
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the image")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--connections", type=int, nargs="+", default=[4])
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    args = parser.parse_args()
    nbytes = args.mib * 2**20
    rows = []
    print(f"{'connections':>11} {'kind':>13} {'GB/s, median':>13} {'best':>6} {'first':>6}", end="")
    print(f" {'of raw':>7}")
    for n_connections in args.connections:
        took = measure(nbytes, args.rounds, n_connections)
        raw_s = statistics.median(took["raw"][1:])
        for kind, seconds in took.items():
            median_s = statistics.median(seconds[1:])
            row = {
                "connections": n_connections,
                "kind": kind,
                "gb_s_median": round(nbytes / median_s / 1e9, 3),
                "gb_s_best": round(nbytes / min(seconds[1:]) / 1e9, 3),
                "gb_s_first": round(nbytes / seconds[0] / 1e9, 3),
                # Of each round, so that what slows the machine down slows both down.
                "of_raw": round(
                    statistics.median(
                        raw / mine for raw, mine in zip(took["raw"][1:], seconds[1:], strict=True)
                    ),
                    3,
                ),
                "of_raw_median": round(raw_s / median_s, 3),
            }
            rows.append(row)
            print(
                f"{n_connections:>11} {kind:>13} {row['gb_s_median']:>13.2f}"
                f" {row['gb_s_best']:>6.2f} {row['gb_s_first']:>6.2f} {100 * row['of_raw']:>5.0f} %"
            )
    if args.out:
        body = {"benchmark": "transfer", "mib": args.mib, "rounds": args.rounds, "rows": rows}
        args.out.write_text(json.dumps(body, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
