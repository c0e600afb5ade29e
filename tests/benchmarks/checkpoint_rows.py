"""The whole benchmark: which rows there are, in which order, and what becomes of the samples."""

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_flips import flip_rows
from checkpoint_goals import goals
from checkpoint_plan import ROWS, PeerBenchPlan
from checkpoint_recovery import KillResults, kill_rows, recovery_rows, victim_sidecar
from checkpoint_rounds import BenchRounds
from checkpoint_torch import (
    DCP_SAVE,
    DCP_THREAD,
    SaverFactory,
    TorchSaver,
    dcp_kept_factories,
    dcp_savers,
    end_dcp_process,
)
from support.placements import simulate_survival

from gpuops.checkpoint.memory.available import available_bytes
from gpuops.checkpoint.placement.replica_placement import place
from gpuops.checkpoint.placement.survival import mixed_odds
from gpuops.config.resolve import environ, update_environ
from gpuops.host.process.sidecar import Sidecar
from gpuops.units import format_bytes
from gpuops.worker.bench.figures import save_figures, summarize
from gpuops.worker.bench.run import SaveLimits, new_folder, small_plan
from gpuops.worker.bench.savers import (
    GPUOPS,
    RAW,
    BenchError,
    BenchJob,
    BenchSaver,
    GpuopsSaver,
)

OnMessage = Callable[[str], None]
ExtraSavers = Callable[[BenchJob, Path], tuple[list[SaverFactory], dict[str, str]]]
OnFigures = Callable[[dict[str, Any]], None]
_NEEDED = frozenset({RAW, GPUOPS})
PEERS_TIMEOUT_S = 330.0  # from the first round on, if brief
MEMORY_STATES = 4  # what a guest stages and its writer holds, and what the others take in a save
SHORT_ROUNDS = 4  # the cold one included


def run_bench(
    plan: PeerBenchPlan,
    parent: Path,
    on_message: OnMessage,
    *,
    peer: Callable[[], Any],
    extra_savers: ExtraSavers | None = None,
    on_figures: OnFigures = lambda _found: None,
) -> dict[str, Any]:
    """Measure what *plan* says, in a new directory below *parent*; return all figures.

    *peer* measures a fetch from another keeper.
    *extra_savers* returns more ways to save, and which there are that cannot be made here, and why.
    *on_figures* is given the figures after each row, in case that a later one fails.

    Raises:
        CheckpointError: Something was not saved or restored, where it ought to have been.
    """
    torch.set_num_threads(1)
    # Of torch, once with each call: that there is one process is known.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    rng = random.Random(plan.seed)
    missing: dict[str, str] = {}
    found: dict[str, Any] = {"plan": asdict(plan), "torch": str(torch.__version__)}
    with ExitStack() as stack:
        folder = stack.enter_context(new_folder(parent))
        _join_alone(folder, stack)
        rows = _RowRunner(
            plan, folder, rng, on_message, cache(lambda: stack.enter_context(victim_sidecar()))
        )
        measures: dict[str, Callable[[], tuple[Any, dict[str, str]]]] = {
            "save": lambda: rows.save(extra_savers),
            "small": rows.small,
            "recovery": rows.recovery,
            "kills": rows.kills,
            "flips": rows.flips,
            "odds": lambda: (odds_rows(rng), {}),
            "peer": lambda: (peer(), {}),
        }
        for name in [name for name in ROWS if name in plan.only]:
            found[name], why = measures[name]()
            missing |= why
            on_figures(_with_goals(found, missing))
    return _with_goals(found, missing)


def _with_goals(found: dict[str, Any], missing: dict[str, str]) -> dict[str, Any]:
    return {**found, "goals": goals(found), "did_not_run": missing}


@dataclass(frozen=True, slots=True)
class _RowRunner:
    """What measures a row; it returns figures, and what did not run and why."""

    plan: PeerBenchPlan
    folder: Path
    rng: random.Random
    on_message: OnMessage
    sidecar: Callable[[], Sidecar]

    def save(self, extra_savers: ExtraSavers | None) -> tuple[Any, dict[str, str]]:
        return _save_rows(self.plan, _new(self.folder, "save"), self.on_message, extra_savers)

    def small(self) -> tuple[Any, dict[str, str]]:
        path = _new(self.folder, "small")
        return _save_rows(small_plan(self.plan), path, self.on_message, None, is_small=True)

    def recovery(self) -> tuple[Any, dict[str, str]]:
        path = _new(self.folder, "recovery")
        rows, kills = recovery_rows(self.sidecar(), self.plan, path, self.rng, self.on_message)
        return {**rows, "kills": _kills(kills)}, {}

    def kills(self) -> tuple[Any, dict[str, str]]:
        path = _new(self.folder, "kills")
        return _kills(kill_rows(self.sidecar(), self.plan, path, self.rng, self.on_message)), {}

    def flips(self) -> tuple[Any, dict[str, str]]:
        path, plan = _new(self.folder, "flips"), self.plan
        return flip_rows(plan.flips, plan.flip_nbytes, path, self.rng, self.on_message), {}


def _new(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    return path


def _join_alone(folder: Path, stack: ExitStack) -> None:
    """Make the process group of one rank, without which DCP starts no process."""
    if dist.is_initialized():
        return
    if "MASTER_ADDR" not in environ():
        update_environ({"MASTER_ADDR": "127.0.0.1"})
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)


def _save_rows(
    plan: PeerBenchPlan,
    folder: Path,
    on_message: OnMessage,
    extra_savers: ExtraSavers | None,
    *,
    is_small: bool = False,
) -> tuple[dict[str, Any], dict[str, str]]:
    subject = BenchJob(plan.nbytes, plan.n_tensors, step_s=plan.step_s)
    limits = SaveLimits(subject, folder, plan.n_beside)
    is_short = plan.is_brief and is_small
    with ExitStack() as stack:
        savers: list[BenchSaver] = [
            limits.buffered,
            GpuopsSaver(subject, folder),
            *dcp_savers(subject, folder),
            TorchSaver(subject, folder),
        ]
        stack.callback(limits.close)
        for saver in savers:
            stack.callback(saver.close)
        if is_short:
            savers = [each for each in savers if each.name in {*_NEEDED, DCP_SAVE, DCP_THREAD}]
        extra, missing = extra_savers(subject, folder) if extra_savers else ([], {})
        groups = (
            [] if is_short else [dcp_kept_factories(subject, folder), *([extra] if extra else [])]
        )
        memory_bytes = MEMORY_STATES * subject.nbytes
        peer_savers = _PeerSavers(groups, plan.rounds + 1, memory_bytes, is_brief=plan.is_brief)
        stack.callback(peer_savers.close)
        bench_rounds = BenchRounds(subject, limits, plan.n_beside, on_message, needed=_NEEDED)
        for number in range(plan.rounds + 1):
            if is_short and number == SHORT_ROUNDS:
                savers = [each for each in savers if each.name != DCP_THREAD]
            bench_rounds.run_round([*savers, *peer_savers.for_round(number, bench_rounds)])
    figures = save_figures(subject, bench_rounds.samples, bench_rounds.around)
    return figures, missing | bench_rounds.missing


class _PeerSavers:
    """Ways that are there for all rounds; if brief, one group of them after the other."""

    def __init__(
        self,
        groups: Sequence[Sequence[SaverFactory]],
        n_rounds: int,
        memory_bytes: int,
        *,
        is_brief: bool,
    ) -> None:
        """Take *memory_bytes*, without which none is begun: all here would be ended with it."""
        self._groups = groups
        self._n_rounds = n_rounds
        self._memory_bytes = memory_bytes
        self._is_brief = is_brief
        self._open: dict[int, list[BenchSaver]] = {}
        self._deadline_s = time.monotonic() + PEERS_TIMEOUT_S

    def for_round(self, number: int, bench_rounds: BenchRounds) -> list[BenchSaver]:
        """Return those whose turn it is in that round; one that cannot be made is dropped."""
        if self._is_brief and time.monotonic() > self._deadline_s:
            self.close()
            return []
        n_groups = len(self._groups)
        for index, group in enumerate(self._groups):
            begin = index * self._n_rounds // n_groups if self._is_brief else 0
            if number == begin:
                if self._is_brief:
                    self.close()
                self._open[index] = list(_make_savers(group, bench_rounds, self._memory_bytes))
        return [saver for savers in self._open.values() for saver in savers]

    def close(self) -> None:
        """End those that are there."""
        for savers in self._open.values():
            for saver in savers:
                with suppress(Exception):  # boundary: a peer may fail as it likes
                    saver.close()
        self._open.clear()
        end_dcp_process()
        gc.collect()


def _make_saver(factory: SaverFactory, memory_bytes: int) -> BenchSaver:
    if available_bytes() < memory_bytes:
        raise BenchError(f"fewer than {format_bytes(memory_bytes)} of memory are available")
    return factory.make()


def _make_savers(
    group: Sequence[SaverFactory], bench_rounds: BenchRounds, memory_bytes: int
) -> Iterator[BenchSaver]:
    for factory in group:
        try:
            yield _make_saver(factory, memory_bytes)
        except Exception as exc:  # noqa: BLE001 boundary: a peer may fail as it likes
            bench_rounds.drop(factory.name, exc)


def _kills(results: KillResults) -> dict[str, Any]:
    return {
        "n": results.n,
        "unrecoverable": results.unrecoverable,
        "wrong": results.wrong,
        "lost_max": results.lost_max,
        "restore": summarize(results.restore_s),
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
            "simulated": simulate_survival(placement, lost, trials, rng),
            "trials": trials,
        }
        for lost, published in ((2, 0.933), (3, 0.800))
    ]
