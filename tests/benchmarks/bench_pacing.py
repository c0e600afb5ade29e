"""What does a training lose to replicas that are pushed meanwhile, paced and not?

The training is played: each step computes (sleeps), then reduces (sends a burst over loopback to
another process and waits for its answer). Meanwhile a third process pushes a state to a fourth,
again and again: not at all, as fast as it goes, or in the gaps. In turn, medians of all steps.
`during_percent` is which part of the replicas' bytes were sent during a reduction: that is as it is
however busy the machine, and however many cores it has. Run as a script:

    python tests/benchmarks/bench_pacing.py --rounds 5 --out pacing.json
"""

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.transfers import SHARD, Memory, job_pass, peer

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.keeper.jobs import NICE_PUSH, lower_priority
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import push
from gpuops.checkpoint.transfer.pacing import GapPace, SendPace
from gpuops.checkpoint.transfer.parallel import TransferOptions
from gpuops.checkpoint.transfer.server import TransferServer
from gpuops.checkpoint.transfer.wire import PushOffer
from gpuops.checkpoint.types import StateId
from gpuops.host.clock import SystemClock
from gpuops.host.net.traffic import Traffic

MIB = 2**20


def hold(told):
    """Be the holder."""
    lower_priority(NICE_PUSH)
    store = ReplicaStore("holder", lambda _name, nbytes: Memory(nbytes), bytes_max=2**34)
    store.keep_only([SHARD])
    pace = SendPace(None, SystemClock())
    with_peers = TransferServer(("127.0.0.1", 0), job_pass(), store, store, pace)
    told.send(with_peers.port)
    told.recv()
    with_peers.close()


class Watched(GapPace):
    """Notes what is sent when."""

    def __init__(self):
        super().__init__(SystemClock())
        self.sent = []

    def enqueue(self, nbytes):
        self.nbytes = nbytes
        return super().enqueue(nbytes)

    def wait_s(self, turn):
        found = super().wait_s(turn)
        if found == 0:
            self.sent.append((time.monotonic(), self.nbytes))
        return found


def own(told, port, nbytes, every_s):
    """Push a state every so many seconds in the way that is told: alone, unpaced, gaps."""
    lower_priority(NICE_PUSH)
    memory = Memory(nbytes)
    memory.view[:] = random.Random(0).randbytes(MIB) * (nbytes // MIB)
    digest = compute_digest(memory.view)
    counter, step, way, through_s = Traffic("lo").sent_bytes, 0, "alone", []
    pace = Watched()
    while True:
        begun_s = time.monotonic()
        if way != "alone":
            step += 1
            for at in range(0, nbytes, MIB):
                memory.view[at : at + 8] = step.to_bytes(8, "little")  # another state
            digest = compute_digest(memory.view)
            before = StateId(1, step - 1) if step > 1 else None
            offer = PushOffer(StateId(1, step), SHARD, "a" * 64, nbytes, digest.root, before)
            begun_s = time.monotonic()
            pace.set_deadline(nbytes, 0.8 * every_s)
            copy = PinnedCopy(memory.fd, digest, view=memory.view)
            push(peer(port), job_pass(), offer, copy, TransferOptions(60.0, n_connections=2), pace)
            through_s.append(time.monotonic() - begun_s)
        if told.poll(max(0.0, begun_s + every_s - time.monotonic())):
            way = told.recv()
            told.send((through_s, pace.sent))
            through_s, pace.sent = [], []
            if way == "end":
                return
            pace.watch(counter if way == "gaps" else None)


def sink(listener):
    """Take bursts and answer each."""
    sock, _ = listener.accept()
    room = bytearray(MIB)
    while True:
        head = sock.recv(8, socket.MSG_WAITALL)
        left = int.from_bytes(head, "little")
        if not left:
            return
        while left:
            left -= sock.recv_into(room, min(left, MIB))
        sock.sendall(b"x")


def train(sock, steps, compute_s, burst):
    """Return when each reduction began and ended."""
    data, found = bytes(MIB), []
    for _ in range(steps):
        time.sleep(compute_s)
        begun_s = time.monotonic()
        sock.sendall((burst * MIB).to_bytes(8, "little"))
        for _ in range(burst):
            sock.sendall(data)
        sock.recv(1)
        found.append((begun_s, time.monotonic()))
    return found


def during(sent_at, spans):
    """Return which part of what was sent, was sent during *spans*, in a list; of nothing none."""
    # What was sent after the last step met no training.
    seen = [(at_s, n) for at_s, n in sent_at if spans[0][0] <= at_s <= spans[-1][1]]
    total = sum(n for _, n in seen)
    within = sum(n for at_s, n in seen if any(begin <= at_s <= end for begin, end in spans))
    return [within / total] if total else []


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compute", type=float, default=0.3)
    parser.add_argument("--burst", type=int, default=128, help="MiB of a reduction")
    parser.add_argument("--state", type=int, default=256, help="MiB of a state")
    parser.add_argument("--every", type=float, default=1.5, help="seconds between states")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0))
    taker = fork.Process(target=sink, args=(listener,), daemon=True)
    taker.start()
    sock = socket.create_connection(listener.getsockname())
    to_holder, at_holder = fork.Pipe()
    fork.Process(target=hold, args=(at_holder,), daemon=True).start()
    to_owner, at_owner = fork.Pipe()
    arguments = (at_owner, to_holder.recv(), args.state * MIB, args.every)
    fork.Process(target=own, args=arguments, daemon=True).start()
    found = {"alone": [], "unpaced": [], "gaps": []}
    through = {way: [] for way in found}
    sent = {way: [] for way in found}
    ways = [way for _ in range(args.rounds + 1) for way in found]
    last, spans = None, []
    for n, way in enumerate([*ways, "end"]):
        to_owner.send(way)
        done_s, sent_at = to_owner.recv()
        if last is not None and n > len(found):
            through[last] += done_s
            sent[last] += during(sent_at, spans)
        last = way
        if way == "end":
            break
        spans = train(sock, args.steps, args.compute, args.burst)
        if n >= len(found):  # the first of each is cold
            found[way] += [end_s - begin_s for begin_s, end_s in spans]
    sock.sendall(bytes(8))
    to_holder.send(None)
    alone = statistics.median(found["alone"])
    result = {
        way: {
            "reduction_ms": round(1e3 * statistics.median(times), 1),
            "mean_ms": round(1e3 * statistics.mean(times), 1),
            "step_loss_percent": round(
                100
                * (statistics.mean(times) - statistics.mean(found["alone"]))
                / (args.compute + alone),
                1,
            ),
            "during_percent": round(100 * statistics.mean(sent[way]), 1) if sent[way] else None,
            "through_s": round(statistics.median(through[way]), 2) if through[way] else None,
            "n": len(times),
        }
        for way, times in found.items()
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
