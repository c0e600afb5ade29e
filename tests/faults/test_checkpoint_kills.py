"""Ranks, keepers and whole nodes killed at random moments of saving, hashing, writing and loading.

After each kill all ranks must be offered one and the same state, with its bytes: what was committed
where the keeper lived, what the directory had where it did not.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from benchmarks.run_all import machine
from support import mortal_ranks
from support.keeper_ranks import until
from support.mortal_ranks import COPIES, PHASES, SEALED, Board, lines_of
from support.soak_result import keep_soak

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.directory_files import LeftoverKind, parse_leftover_name
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.types import KeeperError, StateId

WORLD = 3
N_FLOATS = 1_500_000  # 6 MB a rank
PERSIST_EVERY_S = 0.25
COMMAND = "python -m pytest -m soak tests/faults/test_checkpoint_kills.py"
# Whom a kill takes: the ranks of a job never outlive one of theirs for long, nor their agent. They
# do outlive their keeper: until they die without one, or after a while with another one.
VICTIMS = ("rank", "ranks", "agent", "keeper", "keeper replaced", "node")
# When it comes: so many seconds, at most, after this began.
MOMENTS = {"start": 0.2, "any": 0.8, "copy": 0.01, "hash": 0.03, "persist": 0.15}


@dataclass
class Kill:
    """One kill, and what became of it."""

    victim: str
    moment: str
    at_s: float  # when training ended
    phases: list = field(default_factory=list)  # of the ranks when they died
    is_writing: bool = False  # a state was being written to the directory
    kept: str = "memory"
    lost_writes: int = 0  # of states to the directory, begun and not finished
    offered: list | None = None
    tier: str | None = None
    lost_saves: int = 0  # saves that had begun, and are not what was offered
    lost_steps: int = 0
    lost_s: float = 0.0  # between the save of what was offered and the kill


class Node:
    """A keeper, its agent and the ranks of a job; and what must not be lost of theirs."""

    def __init__(self, folder, seed):
        self.rng = random.Random(seed)
        self.folder, self.notes = folder, folder / "notes"
        self.notes.mkdir()
        self.board = Board(folder / "board", WORLD)
        self.store = DirectoryStore(folder / "states")
        self.generation = -1
        self.keeper = self.agent = None
        self.pids = []
        self.persisted = None  # the newest of which the agent was told
        self.floor = None  # this, or something newer, must be offered
        self.saved_s = {}  # when the last rank had copied its part of a state
        self.begun = set()  # states that some rank was granted since the last offer
        self.cut_off = set()  # those that went with a keeper, or that its successor had to give up
        self.step = 0  # reached since the last offer
        self.kills, self.untold = [], []
        path = Path(mortal_ranks.__file__)
        places = [str(path.parents[1]), os.environ.get("PYTHONPATH", "")]
        self._nursery = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
        )
        assert json.loads(self._nursery.stdout.readline()) == "ready"

    def close(self):
        self._end_ranks()
        self._nursery.stdin.close()
        self._nursery.wait(30)
        self._nursery.stdout.close()
        self._end_keeper()

    def start(self):
        """Start what is not there: a keeper, an agent; and a generation of ranks."""
        if self.agent is None:
            self.keeper = until(self._keeper, what="a keeper without an agent")
            self.agent = KeeperClient.connect(self.keeper.socket_path)
        self.look()
        self.generation += 1
        self.agent.begin_generation(self.generation, 1, None, job="soak")
        self.board.clear()
        told = {
            "world": WORLD,
            "n_floats": N_FLOATS,
            "board": str(self.folder / "board"),
            "folder": str(self.notes),
            "generation": self.generation,
            "socket": str(self.keeper.socket_path),
            "policy": {
                "directory": str(self.folder / "states"),
                "persist_every_s": PERSIST_EVERY_S,
                "keep_last": 2,
            },
        }
        print(json.dumps(told), file=self._nursery.stdin, flush=True)
        self.pids = json.loads(self._nursery.stdout.readline())

    def _keeper(self):
        """Return the keeper that is there or a new one, None while the last agent is there."""
        try:
            return start_or_adopt(self.folder / "keeper", lease_s=120.0)
        except KeeperError as exc:
            if "serves the agent" not in str(exc):
                raise
            return None

    def look(self):
        """Take note of what the keeper has: from now on no less may be offered."""
        for event in self.agent.events():
            assert event["kind"] not in {"corrupt", "persist_failed", "cannot_offer"}, event
            if event["kind"] == "persisted":
                self.persisted = StateId(*event["state"])
        newest = self.agent.stats()["newest"]
        here = [self.floor, self.persisted, newest and StateId(*newest)]
        self.floor = max(filter(None, here), default=None)

    def said(self, word):
        """Return what each rank of this generation has noted under *word*."""
        ranks = lines_of(self.notes, self.generation, WORLD)
        return [[line for line in lines if line["what"] == word] for lines in ranks]

    def writing(self):
        """Return the states of which the directory has an unfinished part."""
        names = [path.name for path in (self.folder / "states").iterdir()]
        left = filter(None, map(parse_leftover_name, names))
        return [one.state for one in left if one.kind is LeftoverKind.TEMPORARY]

    def check(self):
        """Wait for the offers; hold them against what was kept, and against each other."""
        until(self._were_told, deadline_s=60, what="an offer to all ranks")
        state, tier = self._offered()
        if not self.untold:
            return
        assert state is not None, "everything is lost"
        assert state >= self.floor, (state, self.floor)
        assert state in self.saved_s, f"{state} was never whole"
        lost = sorted(one for one in self.begun if one > state)
        if self.untold[-1].kept == "memory":
            # Of two slots one has what is committed: only one save can have been under way.
            assert len(lost) <= 1, lost
        for kill in self.untold:
            kill.offered, kill.tier = [state.epoch, state.step], tier
            kill.lost_saves, kill.lost_steps = len(lost), max(self.step - state.step, 0)
            kill.lost_s = round(max(kill.at_s - self.saved_s[state], 0.0), 3)
        self.untold, self.begun, self.step, self.floor = [], set(), 0, state

    def _were_told(self):
        assert self.keeper is None or self.said("refused") == [[]] * WORLD, self.said("refused")
        return all(self.said("offered"))

    def _offered(self):
        """Return state and tier that the ranks were offered so far, all the same."""
        offers = [line for lines in self.said("offered") for line in lines]
        assert all(line["right"] for line in offers), offers
        found = {(line["state"], line["tier"]) for line in offers}
        assert len(found) <= 1, f"the ranks disagree: {found}"
        return next(iter(found), (None, None))

    def await_moment(self, moment):
        """Return at a random time after *moment* has begun."""
        if moment != "start":
            self.check()
            until(lambda: all(self.said("copied")), what="a save of this generation")
            self.pause(0.4)
            self.look()
        if moment in {"copy", "hash"}:
            until(lambda: COPIES in self.board.phases(), what="a copy")
        if moment == "hash":
            until(lambda: set(self.board.phases()) == {SEALED}, what="a state that is sealed")
        if moment == "persist":
            until(self.writing, what="a state that is being written")
        self.pause(MOMENTS[moment])

    def pause(self, seconds_max):
        threading.Event().wait(self.rng.uniform(0, seconds_max))

    def kill(self, victim, moment):
        """Kill *victim* at such a *moment*, and the ranks in any case; take note of the rest."""
        self.await_moment(moment)
        if victim == "keeper replaced":
            self.replace_keeper()
        kill = Kill(victim, moment, time.monotonic())
        self._strike(victim)
        if self._were_told():
            self.check()
        self._offered()
        kill.phases = [PHASES[phase] for phase in self.board.phases()]
        kill.is_writing = bool(self.writing())
        if self.untold:
            kill.at_s, kill.kept = self.untold[-1].at_s, self.untold[-1].kept
        if self.keeper is None:
            newest, begun = self.store.list_states()[0].state, self.writing()
            assert self.persisted is None or newest >= self.persisted, (newest, self.persisted)
            assert len(begun) <= 1, f"{begun} were being written at the same time"
            self.floor = newest
            for each in (*self.untold, kill):
                each.kept, each.lost_writes = "directory", len(begun)
        self._take_in()
        self.kills.append(kill)
        self.untold.append(kill)

    def _strike(self, victim):
        if victim == "keeper" or (victim == "node" and self.rng.random() < 0.5):
            self._end_keeper()
        if victim == "keeper":
            self.pause(0.1)  # the ranks go on without
        if victim == "agent":
            self._hang_up()
        if victim == "rank":
            os.kill(self.rng.choice(self.pids), signal.SIGKILL)
            self.pause(0.05)
        self._end_ranks()
        if victim == "node":
            self._end_keeper()

    def replace_keeper(self):
        """Kill the keeper, and have the ranks save into another one for a while."""
        epoch = self.agent.stats()["epoch"]
        self._end_keeper()
        self.floor = self.store.list_states()[0].state
        self.keeper = until(self._keeper, what="a keeper without an agent")
        self.agent = KeeperClient.connect(self.keeper.socket_path)
        self.pause(0.5)  # the ranks may find it before it knows of what its agent wants
        until(lambda: self._is_taken_over(epoch), what="a keeper that takes over")
        self.cut_off = self._leases()
        until(lambda: self.agent.stats()["newest"], what="a state in the keeper that came after")
        self.pause(0.4)
        self.look()

    def _is_taken_over(self, epoch):
        self.agent.begin_generation(self.generation, 1, None, job="soak")
        try:
            self.agent.take_over(epoch)
        except KeeperError as exc:
            # The ranks were quicker: they asked it between these two.
            if "already decided" not in str(exc):
                raise
            return False
        return True

    def _take_in(self):
        self.step = max(self.step, *self.board.steps())
        self.begun |= self._leases() - self.cut_off
        copied = [{line["state"]: line["at_s"] for line in lines} for lines in self.said("copied")]
        for state in set.intersection(*map(set, copied)):
            self.saved_s[state] = max(times[state] for times in copied)

    def _leases(self):
        return {line["state"] for lines in self.said("granted") for line in lines}

    def _end_ranks(self):
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(_runs, self.pids)), what="the end of the ranks")
        self.pids = []

    def _end_keeper(self):
        if self.keeper is not None:
            self.keeper.kill()
            with suppress(ChildProcessError):
                os.waitpid(self.keeper.pid, 0)  # it was taken over, and is our child all the same
            self.keeper = None
            self._hang_up()

    def _hang_up(self):
        """End the agent: what the kernel does for one that is killed."""
        if self.agent is not None:
            self.agent.close()
            self.agent = None


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def stormed(folder, seed, acts):
    """Do all *acts*, pairs of a victim and a moment; return what became of each."""
    with closing(Node(folder, seed)) as node:
        node.start()
        until(lambda: node.look() or node.persisted, deadline_s=90, what="a state in the directory")
        for victim, moment in acts:
            node.kill(victim, moment)
            node.start()
        node.check()
    node.store.sweep()
    assert node.store.scan().leftovers == ()
    for stored in node.store.list_states():
        assert verify_state(node.store, stored.state) == []
    return node.kills


def test_whatever_is_killed_all_ranks_go_on_from_what_was_kept(tmp_path):
    acts = [
        ("rank", "copy"),
        ("keeper", "persist"),
        ("ranks", "hash"),
        ("agent", "start"),
        ("keeper replaced", "copy"),
        ("node", "any"),
    ]
    kills = stormed(tmp_path, 20261122, acts)

    assert [kill.tier for kill in kills if kill.victim == "keeper"] == ["persistent"]
    assert [kill.tier for kill in kills if kill.victim == "ranks"] == ["memory"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_two_hundred_random_kills(tmp_path):
    seed = int(os.environ.get("SOAK_SEED", "20261122"))
    n_kills = int(os.environ.get("SOAK_KILLS", "200"))
    # Ranks that have not loaded yet ask another keeper what to load, as they ask any.
    pairs = [p for p in itertools.product(VICTIMS, MOMENTS) if p != ("keeper replaced", "start")]
    acts = [pairs[n % len(pairs)] for n in range(n_kills)]
    random.Random(seed).shuffle(acts)
    begun_s = time.monotonic()
    kills = stormed(tmp_path, seed, acts)
    result = {
        "machine": machine(),
        "what": f"{WORLD} ranks of {4 * N_FLOATS} bytes over a real keeper, killed at random",
        "persist_every_s": PERSIST_EVERY_S,
        **summary(kills),
    }
    command = f"SOAK_SEED={seed} SOAK_KILLS={n_kills} SOAK_OUT=FILE {COMMAND}"
    keep_soak(result, command=command, seed=seed, began_s=begun_s)


def summary(kills):
    """Return what a reader wants to know of so many; each was checked when it came."""
    of_memory = [kill for kill in kills if kill.kept == "memory"]
    of_directory = [kill for kill in kills if kill.kept == "directory"]
    lost_s = sorted(kill.lost_s for kill in of_directory)
    return {
        "kills": len(kills),
        "unrecoverable": sum(kill.offered is None for kill in kills),
        "disagreements": 0,
        "wrong_bytes": 0,
        "while_a_rank_copied": sum("copies" in kill.phases for kill in kills),
        "while_a_rank_loaded": sum("loads" in kill.phases for kill in kills),
        "while_a_state_was_written": sum(kill.is_writing for kill in kills),
        "memory_kept": {
            "kills": len(of_memory),
            "lost_saves_max": max(kill.lost_saves for kill in of_memory),
            "lost_steps_max": max(kill.lost_steps for kill in of_memory),
            "tiers": Counter(kill.tier for kill in of_memory),
        },
        "memory_lost": {
            "kills": len(of_directory),
            "lost_writes_max": max(kill.lost_writes for kill in of_directory),
            "lost_s_median": lost_s[len(lost_s) // 2],
            "lost_s_max": lost_s[-1],
            "tiers": Counter(kill.tier for kill in of_directory),
        },
        "by_victim": Counter(kill.victim for kill in kills),
        "by_moment": Counter(kill.moment for kill in kills),
        "each": [" ".join(_words(kill)) for kill in kills],
    }


def _words(kill):
    yield f"{kill.victim} at {kill.moment}:"
    yield ",".join(kill.phases)
    if kill.is_writing:
        yield "writing"
    yield f"-> step {kill.offered[1]} epoch {kill.offered[0]} from {kill.tier};"
    yield f"lost {kill.lost_saves} saves, {kill.lost_steps} steps, {kill.lost_s} s"
