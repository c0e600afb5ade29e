"""Real ranks over gloo that hang by an injected fault, and what their flight recorders hold."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpuops.agent.monitors.recorder.reader import parse_dumps, read_bodies, recorder_paths
from gpuops.detect.wait_graph import CollectiveHang, diagnose
from gpuops.model import Json
from gpuops.wire.worker_drill import ALONE_KINDS
from support.runs import JOBS, wait_until

STOPPED = "stopped"
# By name: the kind of the fault, and of how many ranks. Another shape or dtype ends gloo's ranks.
MODES = {
    **{kind: (kind, 1) for kind in ALONE_KINDS},
    "skip-collective": ("skip-collective", 1),
    "cross-groups": ("cross-groups", 1),
    "other-operation": ("other-operation", 1),
    "two that sleep": ("sleep", 2),
    "two that skip": ("skip-collective", 2),
    STOPPED: ("sleep", 1),
}


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A fault of ``ranks`` of a job at a step."""

    mode: str
    n_ranks: int
    ranks: frozenset[int]
    step: int

    @property
    def drill(self) -> str:
        ranks = "+".join(map(str, sorted(self.ranks)))
        return f"{MODES[self.mode][0]}:rank={ranks},step={self.step},seconds=900"


def drawn(mode: str, seed: int) -> Hang:
    """Return a hang of *mode*; two ranks are never half of those of the job."""
    draw, n_faulty = random.Random(f"{mode} {seed}"), MODES[mode][1]
    n_ranks = 8 if n_faulty == 2 else draw.choice([4, 6, 8])
    ranks = frozenset(draw.sample(range(n_ranks), n_faulty))
    return Hang(mode=mode, n_ranks=n_ranks, ranks=ranks, step=draw.randint(2, 9))


@dataclass(frozen=True)
class _Target:
    rank: int
    pid: int
    recorder: Path | None
    groups: Path | None


class HangingRanks:
    """A process that has imported torch and forks the ranks of one hang after another."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, str(JOBS / "drilled_ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its ends of the pipes, which ends it
            pass

    def _say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def dumps(self, hang: Hang, folder: Path) -> dict[int, Json]:
        """Return by rank the dumps of all that answer, once those that must wait do."""
        job = {"folder": str(folder), "n_ranks": hang.n_ranks, "drill": hang.drill}
        self._say(json.dumps(job))
        pids = json.loads(self.process.stdout.readline())
        paths = [recorder_paths(folder / "ring", rank) for rank in range(hang.n_ranks)]
        targets = [_Target(rank, pids[rank], *paths[rank]) for rank in range(hang.n_ranks)]
        try:
            wait_until(lambda: _steps(folder) == [hang.step] * hang.n_ranks, what=f"{hang}")
            if hang.mode == STOPPED:
                for rank in hang.ranks:
                    os.kill(pids[rank], signal.SIGSTOP)
            return wait_until(lambda: _waiting(hang, targets), what=f"the ranks of {hang} wait")
        finally:
            self._say("end")


def _steps(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in sorted(folder.glob("step-*"))]


def _waiting(hang: Hang, targets: list[_Target]) -> dict[int, Json] | None:
    """Return the dumps if all wait that do not stand elsewhere, in two reads the same."""
    awake = [t for t in targets if hang.mode != STOPPED or t.rank not in hang.ranks]
    first, second = read_bodies(awake, 30.0), read_bodies(awake, 30.0)
    alone = hang.ranks if MODES[hang.mode][0] in ALONE_KINDS else frozenset()
    must_wait = {target.rank for target in targets} - alone
    waits = {r for r, body in first.items() if not all(x["retired"] for x in body["entries"])}
    return second if waits >= must_wait and first == second else None


def is_exact(hang: Hang, found: CollectiveHang) -> bool:
    """Return whether exactly the faulty ranks are named; one that is stopped leaves no dump."""
    if hang.mode == STOPPED:
        return not found.ranks and set(found.without_dump) == hang.ranks
    return set(found.ranks) == hang.ranks


def diagnosed(hang: Hang, dumps: dict[int, Json]) -> CollectiveHang:
    """Return whom the job of *hang* waits for."""
    return diagnose([*parse_dumps(dumps).values()], hang.n_ranks)
