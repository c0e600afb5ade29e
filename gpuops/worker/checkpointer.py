"""The checkpointing interface of a training script: three lines.

``ck = gpuops.Checkpointer(model=model, optimizer=optimizer)``, ``start = ck.restore()``, and
``ck.step(n)`` after the optimizer step, n being the steps completed.
"""

import os
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.keeper.rank_client import RankKeeperClient
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.inspection import AUTO
from gpuops.checkpoint.types import STEP_MAX, CheckpointError, KeeperError
from gpuops.config.resolve import environ
from gpuops.log import logger_in_job
from gpuops.plan.failure_rate import FailureRate
from gpuops.worker.api import named, phase, restored
from gpuops.worker.assemble import StateAssembler, refused
from gpuops.worker.final_save import LastStepTracker, save_at_exit, save_at_stop, save_final
from gpuops.worker.keeper_finder import (
    KEEPER_ENV,
    DirectoryInUseError,
    KeeperFinder,
    NoKeeperError,
    process_group_store,
    resolve_directory,
)
from gpuops.worker.map_ahead import take_mapped
from gpuops.worker.optimizer_hook import only_makes_state
from gpuops.worker.ranks import RankContext, detect_ranks, has_process_group
from gpuops.worker.restore import RestoreSummary, restore_adapters
from gpuops.worker.restore_sources import DirectoryStateSource, KeeperStateSource, StateSource
from gpuops.worker.saver import CheckpointSaver
from gpuops.worker.schedule import (
    SaveCost,
    SaveSchedule,
    make_schedule,
    parse_duration,
    parse_interval,
)
from gpuops.worker.state.parallel_copy import copy_threads

_log = logger_in_job(__name__)

RESTORE_POINT_TIMEOUT_S = 600.0
KEEPER_RETRY_S = 30.0  # how long to wait for the replacement of a keeper that died early
DEFAULT_INTERVAL_S = 30.0  # between two saves where ranks cannot measure their cost together
# Checkpointers in use, by the keeper or directory that they save into, and by process.
_active: "weakref.WeakValueDictionary[tuple[str, int], Checkpointer]" = (
    weakref.WeakValueDictionary()
)


class Checkpointer:
    """Saves the state of a training job, and restores it after a restart.

    Args:
        model: A module; a list of the parts of one model that this rank has; a mapping of models.
        optimizer: A torch optimizer, or several; their steps wait for a copy in progress.
        scheduler: An object with ``state_dict``; one, a list or a mapping of them.
        dataloader: The data loader, if it has ``state_dict``.
        scaler: A gradient scaler.
        ema: Averages: a module, an object with ``state_dict``, or a mapping of tensors.
        extra: A mapping of anything else: objects with ``state_dict``, generators, plain values,
            which are read at each save and restored into the mapping.
        every: ``"auto"`` (from the cost of saving and the failure rate of nodes), a number of
            steps, or a time such as ``"5s"``.
        directory: Where states are persisted: a directory or a URL. None: what the agent or
            ``GPUOPS_CKPT_DIR`` sets.
        persist_every: The time between two persisted states.
        slots: How many states the memory of a node has room for, the one being written included.
        keep_last: How many persistent states are kept.
        keep_every: States whose step is a multiple of this are kept as well; 0: none.
        allow_pickle: Store values of any type with ``torch.save``. Loading such a state runs
            whatever code it contains.
        keeper: For tests: the keeper to use instead of this node's.

    Raises:
        ArgumentError: An argument cannot be saved or used; the message names it. `gpuops run` ends
            with exit code 64 then, and does not try again.
    """

    def __init__(  # noqa: PLR0913 each is an object to save, or an option
        self,
        *,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        dataloader: object = None,
        scaler: object = None,
        ema: object = None,
        extra: object = None,
        every: int | str = "auto",
        directory: object = None,
        persist_every: str | float = "10min",
        slots: int = 2,
        keep_last: int = 3,
        keep_every: int = 0,
        allow_pickle: bool = False,
        keeper: RankKeeperClient | None = None,
    ) -> None:
        self._env = environ()
        with refused():
            self._every = parse_interval(every)
            self._policy = CheckpointPolicy(
                directory=resolve_directory(directory, self._env),
                persist_every_s=parse_duration(persist_every, "persist_every"),
                keep_last=keep_last,
                keep_every=keep_every,
                slots=slots,
            )
            assembler = StateAssembler(allow_pickle=allow_pickle, warn=_log.warning)
            assembler.add_model(model)
            assembler.add_optimizer(optimizer)
            assembler.add_stateful("scheduler", scheduler)
            assembler.add_stateful("scaler", scaler)
            assembler.add_values("ema", ema)
            assembler.add_dataloader(dataloader)
            assembler.add_values("extra", extra)
            assembler.check()
        self._assembler = assembler
        self._adapters = assembler.adapters
        self._allow_pickle = allow_pickle
        self._given_keeper = keeper
        self._ranks: RankContext | None = None
        self._schedule: SaveSchedule | None = None
        self._keeper_finder: KeeperFinder | None = None
        self._cost = SaveCost(1)
        self._saver: CheckpointSaver | None = None
        self._restored: RestoreSummary | None = None
        self._is_closed = False
        self._has_stopped = False  # the run drains, and the state of its last step was saved
        self._warned: set[str] = set()
        self._instance_key = ("", 0)
        self._last_step = LastStepTracker(
            assembler.optimizers, is_persistent=self._policy.directory is not None
        )
        self._at_exit: (
            weakref.finalize[[LastStepTracker, CheckpointSaver, KeeperFinder], Checkpointer] | None
        ) = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step)
            for optimizer in assembler.optimizers
        ]

    def restore(self) -> int:
        """Load the newest state of the job into the arguments; call it on all ranks, at the start.

        Memory for the next states is allocated here, too, so that the first saves take no longer
        than later ones.

        Returns:
            The completed steps of the loaded state; 0 where there is none.

        Raises:
            CheckpointError: There is a state, or could be one, and it cannot be loaded. The
                arguments may be partly loaded then: do not continue training. Or it is called too
                late.
            ArgumentError: Ranks describe differently what they should hold alike; all raise it.
        """
        if self._is_closed or self._last_step.step:
            when = "close()" if self._is_closed else f"step({self._last_step.step})"
            raise CheckpointError(
                f"restore() after {when}: a state is loaded before the first step; to load it "
                "again, restart the process"
            )
        with phase("restore"):
            ranks = self._ensure_started()
            started_s = time.monotonic()
            self._restored = restore_adapters(
                self._adapters,
                self._state_source(ranks),
                ranks,
                allow_pickle=self._allow_pickle,
                directory=self._policy.directory,
            )
            step = self._restored.step if self._restored else 0
            if self._saver is not None:
                # A resume does not wait: the keeper mostly has the memory, which is only mapped.
                n_threads = copy_threads(ranks.local_world) if self._restored is None else None
                self._saver.prepare_ahead(step, n_threads)
            if self._restored is not None:
                self._cost.restore_s = max(self._cost.restore_s, time.monotonic() - started_s)
                restored(step)
            return step

    def step(self, n: int) -> None:
        """Save the state if that is due; call it after the optimizer step, on all ranks.

        *n* is the number of completed optimizer steps. Errors are not raised: saving is turned off,
        which is logged once. Where states persist, the state of the step at which a drain stops the
        run is saved, too: `gpuops run` then ends a script that does not ask `gpuops.should_stop`.
        """
        if self._is_closed or self._is_forked():
            return
        now_s = time.monotonic()
        try:
            self._step(int(n), now_s)
        except Exception as exc:  # noqa: BLE001 boundary: an error here must not stop the training
            self._turn_off(exc)

    def close(self, *, save: bool = True) -> None:
        """Save the state of the last `step`, and disconnect from the keeper; on all ranks.

        The last state is saved where states persist, whatever ``every`` is, unless an optimizer has
        stepped since, or may have, an exception is propagating, or *save* is false. Without `gpuops
        run`, it has persisted when this returns on local rank 0, or, where a rank comes 15 s later,
        some 5 s after that one has left. May be called twice. In a forked process it does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_forked():
            return
        if _active.get(self._instance_key) is self:
            del _active[self._instance_key]
        if self._at_exit is not None:
            self._at_exit.detach()
        for hook in self._hooks:
            hook.remove()
        own = self._keeper_finder.standalone if self._keeper_finder is not None else None
        is_normal = save and sys.exc_info()[0] is None
        try:
            save_final(self._last_step, self._saver, own, is_normal=is_normal)
        except Exception as exc:  # noqa: BLE001 boundary: the training has succeeded already
            _log.warning("the last checkpoint may be missing: %s", exc)

    @property
    def stats(self) -> dict[str, Any]:
        """What was saved and restored so far, on this rank.

        ``saved`` and ``skipped`` (by reason) count states; ``stall_s`` is the duration of the last
        `step` that saved, ``stall_median_s`` the usual one; ``step_s`` the time of a training step;
        ``nbytes`` the size of an image; ``off``: why nothing is saved any more, or None;
        ``failures``: the rate that ``every="auto"`` uses, and its source; ``restored``: what
        `restore` loaded, from where, and in how many seconds; ``keeper``: the counts of the keeper.
        """
        found: dict[str, Any] = {
            "saved": 0,
            "skipped": {},
            "last_step": None,
            "stall_s": None,
            "nbytes": 0,
            "off": None,
        }
        if self._saver is not None:
            found |= self._saver.stats()
        found["stall_median_s"] = self._cost.stall_s
        found["step_s"] = self._cost.step_s
        found["failures"] = self._cost.failures.as_dict()
        found["restored"] = asdict(self._restored) if self._restored else None
        keeper = self._saver.keeper if self._saver is not None and not self._is_closed else None
        if keeper is not None:
            with suppress(KeeperError):
                found["keeper"] = dict(keeper.stats())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ensure_started(self) -> RankContext:
        """Determine which rank this is and its keeper: once, as late as possible."""
        if self._ranks is not None:
            return self._ranks
        self._require_only_instance()
        self._ranks = ranks = detect_ranks(self._env)
        self._last_step.pid = os.getpid()
        self._cost = SaveCost(ranks.n_nodes, FailureRate.from_env(self._env))
        self._schedule = make_schedule(
            self._every,
            self._cost,
            world=ranks.world,
            make_store=lambda: process_group_store(ranks),
            rank=ranks.rank,
            now_s=time.monotonic(),
        )
        if self._schedule.asks_keeper:
            self._policy = replace(self._policy, every_s=self._every.seconds or DEFAULT_INTERVAL_S)
        self._keeper_finder = KeeperFinder(self._given_keeper, self._env, ranks, self._policy)
        self._saver = saver = CheckpointSaver(
            self._adapters,
            ranks,
            self._keeper_finder.find,
            slots=self._policy.slots,
            allow_pickle=self._allow_pickle,
            every="" if self._schedule.asks_keeper else str(self._every),
        )
        if self._every.is_auto:
            saver.set_annotations(lambda: {AUTO: self._cost.to_metadata()})
        saver.session.connect()
        # A script need not call close(): the last step is saved, and a copy in progress completed.
        self._at_exit = weakref.finalize(
            self, save_at_exit, self._last_step, saver, self._keeper_finder
        )
        return ranks

    def _state_source(self, ranks: RankContext) -> StateSource | None:
        """Return the source of states; None where there can be none.

        Raises:
            CheckpointError: There is a keeper, which may have a state, and it does not answer; or
                another job has the directory.
        """
        saver = self._saver
        assert saver is not None
        # Without a process group the ranks could not detect that two keepers answered differently.
        may_retry = ranks.world == 1 or has_process_group(ranks)
        reconnect = partial(saver.reconnect, KEEPER_RETRY_S) if may_retry else None
        if isinstance(saver.error, KeeperGoneError) and self._env.get(KEEPER_ENV):
            with suppress(KeeperError):
                saver.reconnect(KEEPER_RETRY_S)
        keeper, error = saver.keeper, saver.error
        mapped = take_mapped(is_wanted=keeper is not None)
        if keeper is not None:
            return KeeperStateSource(keeper, RESTORE_POINT_TIMEOUT_S, reconnect, mapped)
        if isinstance(error, DirectoryInUseError):
            raise error
        if self._policy.directory is not None:
            return DirectoryStateSource(open_store(self._policy.directory), ranks)
        if error is not None and not isinstance(error, NoKeeperError):
            raise error
        return None

    def _step(self, n: int, now_s: float) -> None:
        if not 0 < n <= STEP_MAX:
            raise CheckpointError(f"step({n}): give the number of completed steps, from 1 on")
        self._ensure_started()
        if n < self._last_step.step:
            self._warn_once(
                "lower",
                f"step({n}) after step({self._last_step.step}): the number of completed steps must "
                "grow; a state with a lower number is not saved",
            )
        self._last_step.step = n
        named(n)
        schedule, saver = self._schedule, self._saver
        assert schedule is not None
        assert saver is not None
        self._cost.before_save(n, now_s)
        saver.poll()
        # After the last common step some ranks may be ended before the others.
        is_due = not self._has_stopped and schedule.is_due(n, now_s)
        stall_s = None
        try:
            saver.prepare(n)
            started_s = time.monotonic()
            self._last_step.record(n)
            overlap = self._last_step.is_observed
            if is_due and saver.save(n, asks_keeper=schedule.asks_keeper, overlap=overlap):
                stall_s = time.monotonic() - started_s
                if late_keys := self._assembler.late_keys():
                    self._warn_once(
                        "late",
                        f"{', '.join(late_keys)} came after the Checkpointer was made, and is not "
                        "saved: give all names from the start, with any value",
                    )
            self._has_stopped = self._has_stopped or save_at_stop(self._last_step, saver)
        finally:
            ended_s = time.monotonic()
            self._cost.after_save(n, ended_s, stall_s)
            if is_due:
                schedule.on_handled(n, ended_s)

    def _require_only_instance(self) -> None:
        """Raise CheckpointError where this process already saves into the same keeper or directory.

        The second one could only load what the first saved, which may even fit.
        """
        where = self._env.get(KEEPER_ENV) or self._policy.directory
        if where is None or self._given_keeper is not None:
            return
        self._instance_key = (where, os.getpid())
        if _active.setdefault(self._instance_key, self) is not self:
            raise CheckpointError(
                "this process has a Checkpointer already, and two would load each other's states: "
                "give one of them everything (model={'a': …, 'b': …}), or close() the first"
            )

    def _is_forked(self) -> bool:
        """Return whether this process was forked from the one that created this object."""
        return self._ranks is not None and os.getpid() != self._last_step.pid

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", text)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Make the optimizer's step wait for a copy in progress."""
        if torch.compiler.is_compiling():
            return
        if _is_capturing_graph():
            self._last_step.on_graph_capture()
            return
        if only_makes_state(optimizer):
            self._last_step.on_state_made(optimizer)
        else:
            self._last_step.on_optimizer_step(optimizer)
        if self._saver is None:
            return
        try:
            self._saver.wait_before_step()
        except Exception as exc:  # noqa: BLE001 boundary: an error here must not stop the training
            self._turn_off(exc)

    def _turn_off(self, exc: Exception) -> None:
        if self._saver is not None:
            self._saver.turn_off(exc)
        else:
            _log.warning("no checkpoints are saved: %s", exc)
            self.close()


def _is_capturing_graph() -> bool:
    """Return whether work on the current stream is captured into a CUDA graph, not executed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
