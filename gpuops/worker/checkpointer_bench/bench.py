"""The whole benchmark: which rows there are, in which order, and what becomes of the samples."""

import gc
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpuops.checkpoint.digest import digest_of
from gpuops.checkpoint.memory_room import available_bytes
from gpuops.checkpoint.placement import place
from gpuops.checkpoint.recovery_odds import mixed_odds, simulated
from gpuops.config import environ, export
from gpuops.host.companion import Companion
from gpuops.units import format_bytes
from gpuops.worker.checkpointer_bench.flips import flip_rows
from gpuops.worker.checkpointer_bench.goals import goals
from gpuops.worker.checkpointer_bench.plan import ROWS, Plan
from gpuops.worker.checkpointer_bench.recovery import Kills, kill_rows, nursery, recovery_rows
from gpuops.worker.checkpointer_bench.rounds import Sample, Turns, figures, summary
from gpuops.worker.checkpointer_bench.savers import (
    DCP_SAVE,
    DCP_THREAD,
    MEMCPY,
    OURS,
    RAW,
    RAW_DIRECT,
    BenchError,
    Gpuops,
    Memcpy,
    RawWrite,
    Saver,
    TorchSave,
    Way,
    bytes_of,
    dcp_kept_ways,
    dcp_savers,
    end_dcp_process,
)
from gpuops.worker.checkpointer_bench.subject import HEAD_BYTES, Subject

Tell = Callable[[str], None]
_PEER = "it is measured by tests/benchmarks/bench_checkpoint.py of the source tree"
Others = Callable[[Subject, Path], tuple[list[Way], dict[str, str]]]
Keep = Callable[[dict[str, Any]], None]
_NEEDED = frozenset({MEMCPY, RAW, OURS})
GUESTS_UNTIL_S = 330.0  # from the first round on, if brief
ROOM_STATES = 4  # what a guest stages and its writer holds, and what the others take in a save
SHORT_ROUNDS = 4  # the cold one included


def run_bench(
    plan: Plan,
    parent: Path,
    tell: Tell,
    *,
    peer: Callable[[], Any] | None = None,
    others: Others | None = None,
    keep: Keep = lambda _found: None,
) -> dict[str, Any]:
    """Measure what *plan* says, in a new directory below *parent*; return all figures.

    *peer* measures a fetch from another keeper; without it that row says where it is to be had.
    *others* returns more ways to save, and which there are that cannot be made here, and why.
    *keep* is given the figures after each row, in case that a later one fails.

    Raises:
        CheckpointError: Something was not saved or restored, where it ought to have been.
    """
    torch.set_num_threads(1)
    # Of torch, once with each call: that there is one process is known.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    rng = random.Random(plan.seed)  # noqa: S311 no secret
    missing: dict[str, str] = {}
    found: dict[str, Any] = {"plan": asdict(plan), "torch": str(torch.__version__)}
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="gpuops-bench-", dir=parent, ignore_cleanup_errors=True
                )
            )
        )
        _join_alone(folder, stack)
        rows = _Rows(plan, folder, rng, tell, cache(lambda: stack.enter_context(nursery())))
        measures: dict[str, Callable[[], tuple[Any, dict[str, str]]]] = {
            "save": lambda: rows.save(others),
            "small": rows.small,
            "recovery": rows.recovery,
            "kills": rows.kills,
            "flips": rows.flips,
            "odds": lambda: (odds_rows(rng), {}),
            "peer": lambda: (peer(), {}) if peer else (None, {"peer recovery": _PEER}),
        }
        for name in [name for name in ROWS if name in plan.only]:
            found[name], why = measures[name]()
            missing |= why
            keep(_judged(found, missing))
    return _judged(found, missing)


def _judged(found: dict[str, Any], missing: dict[str, str]) -> dict[str, Any]:
    return {**found, "goals": goals(found), "did_not_run": missing}


@dataclass(frozen=True, slots=True)
class _Rows:
    """What measures a row; it returns figures, and what did not run and why."""

    plan: Plan
    folder: Path
    rng: random.Random
    tell: Tell
    home: Callable[[], Companion]

    def save(self, others: Others | None) -> tuple[Any, dict[str, str]]:
        return _save_rows(self.plan, _new(self.folder, "save"), self.tell, others)

    def small(self) -> tuple[Any, dict[str, str]]:
        path = _new(self.folder, "small")
        return _save_rows(_small(self.plan), path, self.tell, None, is_small=True)

    def recovery(self) -> tuple[Any, dict[str, str]]:
        path = _new(self.folder, "recovery")
        rows, kills = recovery_rows(self.home(), self.plan, path, self.rng, self.tell)
        return {"ways": rows, "kills": _kills(kills)}, {}

    def kills(self) -> tuple[Any, dict[str, str]]:
        path = _new(self.folder, "kills")
        return _kills(kill_rows(self.home(), self.plan, path, self.rng, self.tell)), {}

    def flips(self) -> tuple[Any, dict[str, str]]:
        path, plan = _new(self.folder, "flips"), self.plan
        return flip_rows(plan.flips, plan.flip_nbytes, path, self.rng, self.tell), {}


def _new(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    return path


def _join_alone(folder: Path, stack: ExitStack) -> None:
    """Make the process group of one rank, without which DCP starts no process."""
    if dist.is_initialized():
        return
    if "MASTER_ADDR" not in environ():
        export({"MASTER_ADDR": "127.0.0.1"})
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)


def _small(plan: Plan) -> Plan:
    """Return *plan* with many small tensors, beside the weights that are trained."""
    nbytes = HEAD_BYTES + plan.small_tensors * plan.small_tensor_bytes
    return replace(plan, nbytes=nbytes, n_tensors=plan.small_tensors)


def _save_rows(
    plan: Plan, folder: Path, tell: Tell, others: Others | None, *, is_small: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    subject = Subject(plan.nbytes, plan.n_tensors, step_s=plan.step_s)
    memcpy = Memcpy(subject)
    hash_s: list[float] = []
    is_short = plan.is_brief and is_small
    with ExitStack() as stack:
        savers: list[Saver] = [
            memcpy,
            RawWrite(memcpy.whole, folder),
            RawWrite(memcpy.whole, folder, is_direct=True),
            Gpuops(subject, folder),
            *dcp_savers(subject, folder),
            TorchSave(subject, folder),
        ]
        for saver in savers:
            stack.callback(saver.close)
        if is_short:
            savers = [each for each in savers if each.name in {*_NEEDED, DCP_SAVE, DCP_THREAD}]
        more, missing = others(subject, folder) if others else ([], {})
        groups = [] if is_short else [dcp_kept_ways(subject, folder), *([more] if more else [])]
        room_bytes = ROOM_STATES * subject.nbytes
        guests = _Guests(groups, plan.rounds + 1, room_bytes, is_brief=plan.is_brief)
        stack.callback(guests.close)
        turns = Turns(subject, plan.n_beside, tell, needed=_NEEDED)
        for number in range(plan.rounds + 1):
            if is_short and number == SHORT_ROUNDS:
                savers = [each for each in savers if each.name != DCP_THREAD]
            turns.round([*savers, *guests.at(number, turns)])
            hash_s.append(_hash_s(memcpy))
    return {
        "nbytes": subject.nbytes,
        "n_tensors": len(subject.tensors()),
        "hash": figures(hash_s),
        "ways": [{"way": name, **summary(each.values())} for name, each in turns.samples.items()],
        "ratios": _ratios(turns.samples, hash_s),
    }, missing | turns.missing


class _Guests:
    """Ways that are there for all rounds; if brief, one group of them after the other."""

    def __init__(
        self, groups: Sequence[Sequence[Way]], n_rounds: int, room_bytes: int, *, is_brief: bool
    ) -> None:
        """Take *room_bytes*, without which none is begun: all here would be ended with it."""
        self._groups = groups
        self._n_rounds = n_rounds
        self._room_bytes = room_bytes
        self._is_brief = is_brief
        self._here: dict[int, list[Saver]] = {}
        self._until_s = time.monotonic() + GUESTS_UNTIL_S

    def at(self, number: int, turns: Turns) -> list[Saver]:
        """Return those whose turn it is in that round; one that cannot be made is dropped."""
        if self._is_brief and time.monotonic() > self._until_s:
            self.close()
            return []
        n_groups = len(self._groups)
        for index, group in enumerate(self._groups):
            begin = index * self._n_rounds // n_groups if self._is_brief else 0
            if number == begin:
                if self._is_brief:
                    self.close()
                self._here[index] = list(_made(group, turns, self._room_bytes))
        return [saver for savers in self._here.values() for saver in savers]

    def close(self) -> None:
        """End those that are there."""
        for savers in self._here.values():
            for saver in savers:
                with suppress(Exception):  # boundary: a peer may fail as it likes
                    saver.close()
        self._here.clear()
        end_dcp_process()
        gc.collect()


def _begun(way: Way, room_bytes: int) -> Saver:
    if available_bytes() < room_bytes:
        raise BenchError(f"fewer than {format_bytes(room_bytes)} of memory are available")
    return way.make()


def _made(group: Sequence[Way], turns: Turns, room_bytes: int) -> Iterator[Saver]:
    for way in group:
        try:
            yield _begun(way, room_bytes)
        except Exception as exc:  # noqa: BLE001 boundary: a peer may fail as it likes
            turns.drop(way.name, exc)


def _hash_s(memcpy: Memcpy) -> float:
    view = bytes_of(memcpy.whole)
    begun_s = time.perf_counter()
    digest_of(view)
    return time.perf_counter() - begun_s


def _ratios(samples: dict[str, dict[int, Sample]], hash_s: Sequence[float]) -> dict[str, Any]:
    """Return ours over each other way, round by round: what slows one round slows both."""
    ours, memcpy = samples[OURS], samples[MEMCPY]
    found: dict[str, Any] = {
        "stall over " + name: figures(ours[at].stall_s / each[at].stall_s for at in each)
        for name, each in samples.items()
        if name not in {OURS, RAW, RAW_DIRECT}
    }
    found["recoverable over memcpy + hash"] = figures(
        (mine.recoverable_s or 0.0) / (memcpy[at].stall_s + hash_s[at]) for at, mine in ours.items()
    )
    for limit in (RAW, RAW_DIRECT):
        if limit in samples:
            found["durable over " + limit] = figures(
                mine.durable_s / samples[limit][at].durable_s for at, mine in ours.items()
            )
    return found


def _kills(kills: Kills) -> dict[str, Any]:
    return {
        "n": kills.n,
        "unrecoverable": kills.unrecoverable,
        "wrong": kills.wrong,
        "lost_max": kills.lost_max,
        "restore": figures(kills.restore_s),
    }


def odds_rows(rng: random.Random, trials: int = 20_000) -> list[dict[str, Any]]:
    """Return the probabilities that GEMINI's paper prints for 16 nodes and 2 copies, counted."""
    placement = place(tuple(f"n{number}" for number in range(16)), 2)
    return [
        {
            "nodes": 16,
            "copies": 2,
            "lost": lost,
            "published": published,
            "exact": mixed_odds(16, 2, lost).probability,
            "simulated": simulated(placement, lost, trials, rng),
            "trials": trials,
        }
        for lost, published in ((2, 0.933), (3, 0.800))
    ]
