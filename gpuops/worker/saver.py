"""Saves states: captures, asks the keeper, copies; and turns itself off rather than disturb."""

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, TypeVar

from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.messages import Lease, Skipped
from gpuops.checkpoint.keeper.rank_client import NO_ANSWER, RankKeeperClient
from gpuops.checkpoint.types import CheckpointError, KeeperError, Shard
from gpuops.worker.keeper_finder import KeeperSearch, NoKeeperError
from gpuops.worker.pending_copy import PendingCopy
from gpuops.worker.ranks import RankContext
from gpuops.worker.staging import CapturedState, CopyPlan, SlotCopier, StateCapturer
from gpuops.worker.state.adapter import StateAdapter

_log = logging.getLogger(__name__)

RETRY_S_MIN, RETRY_S_MAX = 30.0, 600.0
# The agent soon replaces a keeper that is gone; searching for it costs only a thread.
SEARCH_S_MIN, SEARCH_S_MAX = 0.5, 30.0
POLL_S = 0.1
FINAL_SAVE_S = 60.0  # a keeper that hangs has been replaced by then
N_TORN_MAX = 2  # copies beside the training that were torn; a third is not tried
N_RESERVED_WARN = 3  # consecutive saves without memory of their layout; a few are harmless
_N_STALLS = 64
_N_SHOWN = 3
_STATE = re.compile(r"step \d+ \(epoch \d+\)")  # a `StateId` as text, removed from reasons
T = TypeVar("T")


class CheckpointSaver:
    """One rank's saving.

    A keeper that is gone is searched for in the background, and used from the next step on; an
    error of the state itself ends saving permanently. Either is logged once. *connect* returns the
    keeper or raises KeeperError; it is called with ``is_reconnect=True`` while the rank trains.
    """

    def __init__(
        self,
        adapters: Sequence[StateAdapter],
        ranks: RankContext,
        connect: Callable[..., RankKeeperClient],
        *,
        slots: int,
        allow_pickle: bool,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_only_local_rank = ranks.local_world == 1
        self.is_rank_zero = ranks.rank == 0
        self._is_first_local_rank = ranks.local_rank == 0
        self._reserved_at_step: int | None = None
        self._n_reserved_in_row, self._changed_names = 0, ""
        self._capturer = StateCapturer(
            adapters,
            Shard(ranks.rank, ranks.world),
            allow_pickle=allow_pickle,
            node_ranks=ranks.node_ranks,
        )
        self.keeper: RankKeeperClient | None = None
        self.error: Exception | None = None
        self._slots = slots
        self._connect = connect
        self._search: KeeperSearch | None = None
        self._clock_s = clock_s
        self._copier: SlotCopier | None = None
        self._pending: PendingCopy | None = None
        self._lease: Lease | None = None
        self._n_torn = 0
        self._retry_at_s: float | None = None
        self._retry_s, self._search_s = RETRY_S_MIN, SEARCH_S_MIN
        self._warned: set[str] = set()
        self._skipped: Counter[str] = Counter()
        self._stalls_s: deque[float] = deque(maxlen=_N_STALLS)
        self._n_saved = 0
        self.last_step: int | None = None
        self._step_before: int | None = None

    def set_annotations(self, values: Callable[[], Mapping[str, object]]) -> None:
        """Have plain *values* saved with each state; they are not restored."""
        self._capturer.annotations = values

    def connect(self) -> None:
        """Find the keeper; without one nothing is saved, which is logged once."""
        try:
            self.keeper = self._connect()
        except CheckpointError as exc:
            self.turn_off(exc)
        else:
            self.error = self._retry_at_s = None

    def reconnect(self, within_s: float) -> RankKeeperClient:
        """Return the replacement of a keeper that is gone; waits for it.

        Raises:
            KeeperGoneError: There is none within *within_s* seconds.
            KeeperError: It refuses this rank.
        """
        end_s = self._clock_s() + within_s
        self._disconnect()
        while True:
            try:
                self.keeper = keeper = self._connect()
            except KeeperGoneError:
                if self._clock_s() >= end_s:
                    raise
            else:
                self.error = self._retry_at_s = None
                return keeper
            time.sleep(POLL_S)

    def prepare(self, step: int) -> None:
        """Reserve memory if there is none: any grant needs that of all ranks of the node."""
        if self._copier is None and self._is_on():
            self._run_guarded(
                lambda keeper: self._reserve(keeper, self._capturer.capture(step).plan, step)
            )

    def prepare_ahead(self, step: int, n_threads: int | None) -> None:
        """Reserve memory before training, allocated and pinned; log what fails, and go on."""
        if self._copier is None and self._is_on():
            with suppress(Exception):  # boundary: the user's own state_dict, which `prepare` calls
                plan = self._capturer.plan_ahead(step)
                self._run_guarded(lambda keeper: self._reserve(keeper, plan, step))
        if self._copier is not None:
            try:
                self._copier.populate(n_threads)
            except Exception as exc:  # noqa: BLE001 boundary: a job trains without checkpoints, too
                self._warn_once(f"the first checkpoints take longer, or are refused: {exc}")

    def save(self, step: int, *, asks_keeper: bool, overlap: bool = False) -> bool:
        """Save the state after *step*; return whether it was copied.

        *overlap*: `wait_before_step` is called before the next step of each optimizer.
        """
        overlap = overlap and self._n_torn < N_TORN_MAX
        if not self._is_on():
            return False
        if self._pending is not None:
            self._skip("the copy before is still in progress")
            return False
        started_s, previous_step = self._clock_s(), self.last_step
        self._run_guarded(lambda keeper: self._save(keeper, step, asks_keeper, overlap))
        if self.last_step == previous_step:
            return False
        self._stalls_s.append(self._clock_s() - started_s)
        return True

    def save_final(self, step: int, within_s: float = FINAL_SAVE_S) -> str:
        """Save the state after *step*, the last one; return why it is not saved, "" where it is.

        Waits *within_s* at most for a slot, or for the replacement of a keeper that is gone.
        """
        if self._pending is not None:
            self._pending.wait()
            self._complete()
        end_s = self._clock_s() + within_s
        while True:
            why = None
            if self._is_on():
                why = self._run_guarded(lambda keeper: self._try_save_final(keeper, step))
            if why == "" and self.error is None:
                return ""
            if self.error is not None and not isinstance(self.error, KeeperGoneError):
                return _error_text(self.error)
            if self._clock_s() >= end_s:
                return why or str(self.error)
            time.sleep(POLL_S)

    def _try_save_final(self, keeper: RankKeeperClient, step: int) -> str:
        """Return why it is not saved now, "" where it is."""
        if self._copier is None:
            self._reserve(keeper, self._capturer.capture(step).plan, step)
        reply = keeper.acquire(step, is_last=True)
        if isinstance(reply, Skipped):
            self._stop_sharing(keeper, reply, step)
            return reply.why if reply.is_due else ""  # it is not due where it is already saved
        try:
            capture = self._capturer.capture(step)
        except Exception:  # boundary: after any error the lease is returned
            keeper.abandon(reply)
            raise
        if self._copier is None or self._copier.plan is not capture.plan:
            keeper.abandon(reply)
            self._reserve(keeper, capture.plan, step)
            return "the shapes of the state changed"
        self._copy(keeper, reply, capture, overlap=False)
        return ""

    def poll(self) -> None:
        """Report a pending copy as written, if it is complete by now; never wait."""
        if self._pending is not None and self._pending.is_done():
            self._complete()

    def wait_before_step(self) -> None:
        """Make the next optimizer step wait for the copy in progress."""
        if self._pending is not None:
            self._pending.wait_before_step()
            self.poll()

    def close(self) -> None:
        """Wait for the copy in progress, report it as written, and release the memory."""
        if self._pending is not None:
            self._pending.wait()
            self._complete()
        if self._search is not None:
            self._search.cancel()
        self._disconnect()

    def stats(self) -> dict[str, Any]:
        return {
            "saved": self._n_saved,
            "skipped": dict(self._skipped),
            "last_step": self.last_step,
            "stall_s": self._stalls_s[-1] if self._stalls_s else None,
            "stall_median_s": median(self._stalls_s) if self._stalls_s else None,
            "nbytes": self._copier.plan.layout.nbytes if self._copier else 0,
            "off": _error_text(self.error) if self.error is not None else None,
        }

    def turn_off(self, exc: Exception) -> None:
        """Save nothing for now, and log why once.

        A keeper that is gone is searched for again later; one that refused is asked again on the
        same connection, since a rank that reconnects would count as a restarted job.
        """
        self.error = exc
        is_transient = isinstance(exc, KeeperError) and not isinstance(exc, NoKeeperError)
        is_refused = (
            is_transient and self.keeper is not None and not isinstance(exc, KeeperGoneError)
        )
        self._disconnect(keeps_connection=is_refused)
        self._retry_at_s = self._clock_s() + self._next_wait_s(exc) if is_transient else None
        kind = type(exc).__name__
        if kind in self._warned or (isinstance(exc, NoKeeperError) and not self.is_rank_zero):
            return  # logged already, or equal on all ranks and logged by the first
        self._warned.add(kind)
        later = "it is retried later" if is_transient else "training continues without them"
        _log.warning("no checkpoints are saved from now on, %s: %s", later, _error_text(exc))

    def _next_wait_s(self, exc: Exception) -> float:
        """Return how long to wait after the error *exc*: each time longer."""
        if isinstance(exc, KeeperGoneError):
            wait_s, self._search_s = self._search_s, min(2 * self._search_s, SEARCH_S_MAX)
        else:
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_S_MAX)
        return wait_s

    def _save(self, keeper: RankKeeperClient, step: int, asks_keeper: bool, overlap: bool) -> None:
        reply = keeper.acquire(step) if asks_keeper else None
        if isinstance(reply, Skipped):
            self._on_skipped(keeper, reply, step)
            return
        try:
            capture = self._capturer.capture(step)
            is_known = self._copier is not None and self._copier.plan is capture.plan
            if not is_known and reply is None:
                self._reserve(keeper, capture.plan, step)
        except Exception:  # boundary: after any error the lease is returned
            if reply is not None:
                keeper.abandon(reply)
            raise
        if reply is None:
            if step == self._reserved_at_step and not self.is_only_local_rank:
                # Another rank of this node may not have reserved yet, and all would be refused.
                self._skip_reserved("memory was reserved at this step")
                return
            reply = keeper.acquire(step)
        if isinstance(reply, Skipped):
            self._on_skipped(keeper, reply, step)
        elif not is_known and asks_keeper:
            keeper.abandon(reply)
            self._skip_reserved("the shapes of the state changed")
            self._reserve(keeper, capture.plan, step)
        else:
            if reply.notice:
                self._warn_once(reply.notice)
            self._copy(keeper, reply, capture, overlap=overlap)

    def _copy(
        self, keeper: RankKeeperClient, lease: Lease, capture: CapturedState, *, overlap: bool
    ) -> None:
        assert self._copier is not None
        try:
            self._pending = self._copier.start(lease.slot, capture, overlap=overlap)
        except Exception:  # boundary: after any error the lease is returned
            keeper.abandon(lease)
            raise
        self._lease, self._step_before, self.last_step = lease, self.last_step, lease.state.step
        self._n_reserved_in_row = 0
        if self._pending.is_done():
            self._complete()

    def _complete(self) -> None:
        pending, lease, self._pending, self._lease = self._pending, self._lease, None, None
        assert pending is not None
        assert lease is not None
        if written := pending.written():
            self._void(lease, written)
        else:
            self._run_guarded(lambda keeper: self._mark_written(keeper, lease))

    def _void(self, lease: Lease, written: Sequence[str]) -> None:
        """Give up a copy of tensors that were *written* meanwhile."""
        self._run_guarded(lambda keeper: keeper.abandon(lease))
        self._skip("tensors were written while they were copied")
        self.last_step = self._step_before
        self._n_torn += 1
        later = (
            "the next copies are made while the training waits for them"
            if self._n_torn == N_TORN_MAX
            else "write before step(), or in the optimizer's step"
        )
        _log.warning(
            "the state after step %d is not saved: %s changed while it was copied, before the next "
            "step of an optimizer (max_norm, clamping, train() of an optimizer, merged adapters); "
            "%s",
            lease.state.step,
            _some_names(written),
            later,
        )

    def _mark_written(self, keeper: RankKeeperClient, lease: Lease) -> None:
        keeper.mark_written(lease)
        self._n_saved += 1
        self._retry_s, self._search_s = RETRY_S_MIN, SEARCH_S_MIN

    def _reserve(self, keeper: RankKeeperClient, plan: CopyPlan, step: int) -> None:
        """Reserve memory for images of *plan*; states in the old memory stay with the keeper."""
        if self._copier is not None:
            self._changed_names = _changed_tensors(self._copier.plan, plan)
            self._copier.close()
            self._copier = None
        slots = keeper.reserve(plan.layout, slots=self._slots)
        self._copier = SlotCopier(plan, slots, self._warn_once)
        self._reserved_at_step = step

    def _run_guarded(self, function: Callable[[RankKeeperClient], T]) -> T | None:
        """Return the result of *function*, None where it fails: saving is off then."""
        if self.keeper is None:
            return None
        try:
            return function(self.keeper)
        except Exception as exc:  # noqa: BLE001 boundary: an error here must not stop the training
            self.turn_off(exc)
            return None

    def _is_on(self) -> bool:
        if self.error is None:
            return True
        if self._search is not None:
            return self._take_search_result(self._search)
        if self._retry_at_s is None or self._clock_s() < self._retry_at_s:
            return False
        if self.keeper is None:
            self._search = KeeperSearch(partial(self._connect, is_reconnect=True))
            return False
        self.error = self._retry_at_s = None
        return True

    def _take_search_result(self, search: KeeperSearch) -> bool:
        """Use the result of a search, if it is done; never wait."""
        if not search.is_done():
            return False
        self._search = None
        try:
            self.keeper = search.result()
        except Exception as exc:  # noqa: BLE001 boundary: an error here must not stop the training
            self.turn_off(exc)
            return False
        self.error = self._retry_at_s = None
        if self.is_rank_zero:
            _log.warning("there is a keeper again: checkpoints are saved from now on")
        self._warned.discard(KeeperGoneError.__name__)
        return True

    def _disconnect(self, *, keeps_connection: bool = False) -> None:
        keeper, copier, pending = self.keeper, self._copier, self._pending
        self._copier = self._pending = self._lease = None
        if keeps_connection:
            keeper = None
        else:
            self.keeper = None
        with suppress(Exception):  # boundary: the abandoned copy may be broken
            if pending is not None:
                pending.wait()
            if copier is not None:
                copier.close()
            if keeper is not None:
                keeper.close()

    def _on_skipped(self, keeper: RankKeeperClient, reply: Skipped, step: int) -> None:
        self._skip(reply.why, is_due=reply.is_due)
        self._stop_sharing(keeper, reply, step)

    def _stop_sharing(self, keeper: RankKeeperClient, reply: Skipped, step: int) -> None:
        """Copy all tensors from the next save on, where the keeper says so."""
        if reply.copies_all and self._capturer.stop_sharing():
            if self._is_first_local_rank:  # all of the node have the same reason
                self._warn_once(reply.why)
            self._reserve(keeper, self._capturer.capture(step).plan, step)

    def _skip(self, why: str, *, is_due: bool = True) -> None:
        if is_due:
            self._skipped[_STATE.sub("the state before", why)] += 1
        if why == NO_ANSWER and self.is_rank_zero:
            self._warn_once(f"{NO_ANSWER}: no checkpoints are saved until it does")

    def _skip_reserved(self, why: str) -> None:
        """Skip a save that needed memory of another layout; warn after several in a row."""
        self._skip(why)
        self._n_reserved_in_row += 1
        if self._n_reserved_in_row == N_RESERVED_WARN:
            _log.warning(
                "the shapes of the state changed at each of the last %d saves (%s), and no "
                "checkpoint is saved while that continues: reserve room for what grows",
                N_RESERVED_WARN,
                self._changed_names,
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)


def _changed_tensors(old: CopyPlan, new: CopyPlan) -> str:
    """Return the names of a few tensors that made another layout necessary."""
    known, wanted = ({tensor.spec for tensor in plan.layout.tensors} for plan in (old, new))
    names = sorted({spec.name for spec in known ^ wanted})
    return _some_names(names) if names else "the values that are not tensors grew"


def _some_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
    return ", ".join(names[:_N_SHOWN]) + more


def _error_text(exc: Exception) -> str:
    return str(exc) if isinstance(exc, CheckpointError) else f"{type(exc).__name__}: {exc}"
