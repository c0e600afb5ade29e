"""Ranks that train in step and save through a keeper, each a process that may be killed any moment.

They are forked from a process that has imported everything (`main`, told of by lines of JSON): so a
start costs milliseconds. Where each is stands in memory that outlives it (`Board`); what it was
granted, sealed and offered, in a file. A state's bytes follow from its epoch, step and rank.
"""

import hashlib
import json
import mmap
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from gpuops.checkpoint.keeper.messages import CheckpointPolicy, Lease
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.memory.copy_stamp import COPIED, INTACT, write_stamp
from gpuops.checkpoint.types import KeeperError, Shard, StateId
from support.keeper_ranks import layout_of

STARTS, LOADS, TRAINS, COPIES, SEALED = range(5)
PHASES = ("starts", "loads", "trains", "copies", "sealed")
STEP_S = 0.002
_LOOK_S = 0.0005
_AGAIN_S = 0.02
_PIECES = 64
_PERIOD_BYTES = 2**16
_ROW = struct.Struct("=qq")  # phase, steps done


class Board:
    """Where each rank is."""

    def __init__(self, path, world):
        self.world = world
        if not path.exists():
            path.write_bytes(bytes(_ROW.size * world))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _ROW.size * world)

    def clear(self):
        self._map[:] = bytes(len(self._map))

    def notify(self, rank, phase=None, done=None):
        """Say in which *phase* a *rank* is, and how many steps are *done*; None: as before."""
        was = self.rows()[rank]
        row = (was[0] if phase is None else phase, was[1] if done is None else done)
        _ROW.pack_into(self._map, rank * _ROW.size, *row)

    def rows(self):
        return list(_ROW.iter_unpack(self._map[:]))

    def phases(self):
        return [phase for phase, _done in self.rows()]

    def steps(self):
        return [done for _phase, done in self.rows()]


def content(layout, state):
    """Return the whole image of *state*: no other state, rank or epoch has its bytes."""
    seed = f"{state.epoch} {state.step} {layout.shard.rank}".encode()
    piece = hashlib.shake_128(seed).digest(_PERIOD_BYTES)
    n_data = layout.nbytes - len(layout.header)
    return layout.header + (piece * (n_data // _PERIOD_BYTES + 1))[:n_data]


def is_right(source, layout, state):
    """Say whether *source*, memory or a file, is the image of *state*, byte for byte."""
    found = source.read_bytes() if isinstance(source, Path) else source.view
    return found == content(layout, state)


class Rank:
    """One rank, in its process."""

    def __init__(self, told, rank):
        self.rank, self.world = rank, told["world"]
        self.shard = Shard(rank, self.world)
        self.layout = layout_of(rank, self.world, n_floats=told["n_floats"])
        self.board = Board(Path(told["board"]), self.world)
        path = Path(told["folder"]) / f"{told['generation']:05}-{rank}"
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._socket, self._generation = Path(told["socket"]), told["generation"]
        self._policy = CheckpointPolicy(**told["policy"])
        self._again_s = 0.0
        self.slots, self.stamp = [], None
        self.keeper = self._connect()

    def _connect(self, **more):
        keeper = connect_rank(
            self._socket,
            rank=self.rank,
            world=self.world,
            local_rank=self.rank,
            local_world=self.world,
            generation=self._generation,
            **more,
        )
        keeper.set_policy(self._policy)
        return keeper

    def note(self, word, state, **more):
        """Write a line that stays when this process is killed."""
        pair = None if state is None else [state.epoch, state.step]
        line = {"what": word, "state": pair, "at_s": time.monotonic(), **more}
        os.write(self._log, json.dumps(line).encode() + b"\n")

    def load(self):
        """Load the state that is offered; return its step."""
        self.board.notify(self.rank, LOADS)
        begun_s = time.monotonic()
        offer = self.keeper.restore_point(60.0)
        if offer is None:
            self.note("offered", None, tier=None, right=True)
            return 0
        source = self.keeper.open_shard(offer, self.shard)
        right = is_right(source, self.layout, offer.state)
        self.note("offered", offer.state, tier=offer.tier.value, right=right)
        if not isinstance(source, Path):
            source.close()
        self.keeper.report_restored(offer, time.monotonic() - begun_s, self.layout.nbytes)
        return offer.state.step

    def train(self):
        """Train without end, all ranks in step, as collectives keep them."""
        step = self.load()
        self.slots, self.stamp = self.keeper.reserve(self.layout, slots=2)
        self.board.notify(self.rank, TRAINS, step)
        while True:
            while min(self.board.steps()) < step:
                time.sleep(_LOOK_S)
            step += 1
            time.sleep(STEP_S)
            self._save(step)
            self.board.notify(self.rank, done=step)

    def _save(self, step):
        try:
            if self.keeper is None and not self._is_back():
                return
            answer = self.keeper.acquire(step)
            if isinstance(answer, Lease):
                self.note("granted", answer.state)
                self.board.notify(self.rank, COPIES)
                self._copy(self.slots[answer.slot].view, answer.state)
                for word in (COPIED, INTACT):
                    write_stamp(self.stamp, word, answer.number)
                self.note("copied", answer.state)
                self.keeper.mark_written(answer)
                self.board.notify(self.rank, SEALED)
        except KeeperError as exc:
            # As for any rank: the keeper is gone, and training goes on; there may be another soon.
            self.note("alone", None, why=str(exc))
            if self.keeper is not None:
                self.keeper.close()
            self.keeper = None

    def _is_back(self):
        """Look, now and then, for a keeper in place of the one that is gone; say whether one is."""
        if time.monotonic() < self._again_s:
            return False
        self._again_s = time.monotonic() + _AGAIN_S
        try:
            self.keeper = self._connect(is_reconnect=True)
        except KeeperError:
            return False
        self.slots, self.stamp = self.keeper.reserve(self.layout, slots=2)
        return True

    def _copy(self, view, state):
        image = content(self.layout, state)
        nbytes = len(image) // _PIECES + 1
        for begin in range(0, len(image), nbytes):
            view[begin : begin + nbytes] = image[begin : begin + nbytes]


def _run(told, rank):
    # Nothing of the others' may stay open here.
    os.closerange(0, 1024)
    for _fd in range(3):
        os.open(os.devnull, os.O_RDWR)
    try:
        Rank(told, rank).train()
    except KeeperError as exc:
        path = Path(told["folder"]) / f"{told['generation']:05}-{rank}"
        with suppress(OSError), path.open("a") as log:
            log.write(json.dumps({"what": "refused", "state": None, "why": str(exc)}) + "\n")
    finally:
        os._exit(1)


def main():
    """Fork the ranks of each line; answer with their process ids; end with the input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are reaped by the kernel
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        pids = []
        for rank in range(told["world"]):
            pid = os.fork()
            if pid == 0:
                _run(told, rank)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


def lines_of(folder, generation, world):
    """Return what each rank of a generation has noted; each line's state is a `StateId` or None."""
    found = []
    for rank in range(world):
        path = folder / f"{generation:05}-{rank}"
        # The last line of one that was killed may be cut off.
        texts = path.read_text().split("\n")[:-1] if path.exists() else []
        lines = [json.loads(text) for text in texts]
        for line in lines:
            line["state"] = line["state"] and StateId(*line["state"])
        found.append(lines)
    return found


if __name__ == "__main__":
    main()
