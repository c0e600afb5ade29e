"""Saves states: captures, asks the keeper, copies; and turns itself off rather than disturb."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.messages import Lease, Skipped
from gpuops.checkpoint.keeper.rank_client import RankKeeperClient
from gpuops.checkpoint.types import Shard
from gpuops.worker.keeper_session import POLL_S, KeeperSession, error_text
from gpuops.worker.ranks import RankContext, check_same_replicas
from gpuops.worker.save_stats import SaveStats
from gpuops.worker.staging.capture import StateCapturer
from gpuops.worker.staging.copy_plan import (
    CapturedState,
    CopyPlan,
    changed_tensors,
    replica_groups,
)
from gpuops.worker.staging.pending_copy import PendingCopy
from gpuops.worker.staging.slot_copier import SlotCopier
from gpuops.worker.state.adapter import StateAdapter

FINAL_SAVE_S = 60.0  # a keeper that hangs has been replaced by then
T = TypeVar("T")


class CheckpointSaver:
    """One rank's saving.

    A keeper that is gone is searched for in the background, and used from the next step on; an
    error of the state itself ends saving permanently. Either is logged once. *connect*: see
    `KeeperSession`. *every*: see `SaveStats`.
    """

    def __init__(  # noqa: PLR0913 its collaborators, and options of the user
        self,
        adapters: Sequence[StateAdapter],
        ranks: RankContext,
        connect: Callable[..., RankKeeperClient],
        *,
        slots: int,
        allow_pickle: bool,
        every: str = "",
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self.is_only_local_rank = ranks.local_world == 1
        self.is_rank_zero = ranks.rank == 0
        self._is_first_local_rank = ranks.local_rank == 0
        self.session = KeeperSession(connect, is_rank_zero=self.is_rank_zero, clock_s=clock_s)
        self.last_step: int | None = None
        self._named_step = self._n_steps = 0  # that `prepare` was given; how many so far
        self._capturer = StateCapturer(
            adapters,
            Shard(ranks.rank, ranks.world),
            allow_pickle=allow_pickle,
            node_ranks=ranks.node_ranks,
        )
        self._stats = SaveStats(is_rank_zero=self.is_rank_zero, every=every)
        self._slots = slots
        self._clock_s = clock_s
        self._copier: SlotCopier | None = None
        self._pending: PendingCopy | None = None
        self._lease: Lease | None = None
        self._changed_names = ""
        self._reserved_at_step: int | None = None
        self._step_before: int | None = None

    @property
    def keeper(self) -> RankKeeperClient | None:
        """The keeper, None where there is none now."""
        return self.session.keeper

    @property
    def error(self) -> Exception | None:
        """Why nothing is saved now, None where that is possible."""
        return self.session.error

    def set_annotations(self, values: Callable[[], Mapping[str, object]]) -> None:
        """Have plain *values* saved with each state; they are not restored."""
        self._capturer.annotations = values

    def reconnect(self, within_s: float) -> RankKeeperClient:
        """Return the replacement of a keeper that is gone; waits for it.

        Raises:
            KeeperGoneError: There is none within *within_s* seconds.
            KeeperError: It refuses this rank.
        """
        self._release()
        return self.session.reconnect(within_s)

    def prepare(self, step: int) -> None:
        """Count *step*; reserve memory if there is none: a grant needs that of all local ranks."""
        self._n_steps += step != self._named_step
        self._named_step = step
        if self._copier is None and self.session.is_on():
            self._run_guarded(
                lambda keeper: self._reserve(keeper, self._capturer.capture(step).plan, step)
            )

    def prepare_ahead(self, step: int, n_threads: int | None) -> None:
        """Reserve memory before training, allocated and pinned; log what fails, and go on.

        Raises:
            ArgumentError: See `check_same_replicas`.
        """
        if self._copier is None and self.session.is_on():
            with suppress(Exception):  # boundary: the user's own state_dict, which `prepare` calls
                plan = self._capturer.plan_ahead(step)
                self._run_guarded(lambda keeper: self._reserve(keeper, plan, step))
        groups = None if self._copier is None else replica_groups(self._copier.plan.layout)
        check_same_replicas(groups, self._ranks)
        if self._copier is not None:
            try:
                self._copier.populate(n_threads)
            except Exception as exc:  # noqa: BLE001 boundary: a job trains without checkpoints, too
                why = f"the first checkpoints take longer, or are refused: {exc}"
                self._stats.warn_once(why)

    def save(self, step: int, *, asks_keeper: bool, overlap: bool = False) -> bool:
        """Save the state after *step*; return whether it was copied.

        *overlap*: `wait_before_step` is called before the next step of each optimizer.
        """
        overlap = overlap and self._stats.may_overlap
        if not self.session.is_on():
            return False
        if self._pending is not None:
            self._stats.skip("the copy before is still in progress")
            return False
        started_s, previous_step = self._clock_s(), self.last_step
        self._run_guarded(lambda keeper: self._save(keeper, step, asks_keeper, overlap))
        if self.last_step == previous_step:
            return False
        self._stats.stalled(self._clock_s() - started_s)
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
            skipped = None
            if self.session.is_on():
                skipped = self._run_guarded(lambda keeper: self._try_save_final(keeper, step))
                if skipped is None and self.error is None and self.keeper is not None:
                    return ""
            if skipped is not None and skipped.is_over:
                return skipped.why
            if self.error is not None and not isinstance(self.error, KeeperGoneError):
                return error_text(self.error)
            if self._clock_s() >= end_s:
                return skipped.why if skipped is not None else str(self.error)
            time.sleep(POLL_S)

    def poll(self) -> None:
        """Report a pending copy as written, if it is complete by now; never wait."""
        if self._pending is not None and self._pending.is_done():
            self._complete()

    def wait_before_step(self) -> None:
        """Make the next optimizer step wait for the copy in progress."""
        if self._pending is not None:
            self._pending.wait_before_step()
            self.poll()

    def turn_off(self, exc: Exception) -> None:
        """Save nothing for now, and log why once."""
        self._release()
        self.session.turn_off(exc)

    def close(self) -> None:
        """Wait for the copy in progress, report it as written, and release the memory."""
        if self._pending is not None:
            self._pending.wait()
            self._complete()
        self._release()
        self.session.close()

    def stats(self) -> dict[str, Any]:
        return {
            **self._stats.as_dict(),
            "last_step": self.last_step,
            "nbytes": self._copier.plan.layout.nbytes if self._copier else 0,
            "off": error_text(self.error) if self.error is not None else None,
        }

    def _save(self, keeper: RankKeeperClient, step: int, asks_keeper: bool, overlap: bool) -> None:
        reply = keeper.acquire(step, n_steps=self._n_steps) if asks_keeper else None
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
                self._stats.skip_reserved("memory was reserved at this step", self._changed_names)
                return
            reply = keeper.acquire(step, n_steps=self._n_steps)
        if isinstance(reply, Skipped):
            self._on_skipped(keeper, reply, step)
        elif not is_known and asks_keeper:
            keeper.abandon(reply)
            self._stats.skip_reserved("the shapes of the state changed", self._changed_names)
            self._reserve(keeper, capture.plan, step)
        else:
            if reply.notice:
                self._stats.warn_once(reply.notice)
            self._copy(keeper, reply, capture, overlap=overlap)

    def _try_save_final(self, keeper: RankKeeperClient, step: int) -> Skipped | None:
        """Return why it is not saved now, None where it is."""
        if self._copier is None:
            self._reserve(keeper, self._capturer.capture(step).plan, step)
        reply = keeper.acquire(step, is_last=True)
        if isinstance(reply, Skipped):
            self._stop_sharing(keeper, reply, step)
            return reply if reply.is_due else None  # it is not due where it is already saved
        try:
            capture = self._capturer.capture(step)
        except Exception:  # boundary: after any error the lease is returned
            keeper.abandon(reply)
            raise
        if self._copier is None or self._copier.plan is not capture.plan:
            keeper.abandon(reply)
            self._reserve(keeper, capture.plan, step)
            return Skipped("the shapes of the state changed")
        self._copy(keeper, reply, capture, overlap=False)
        return None

    def _copy(
        self, keeper: RankKeeperClient, lease: Lease, capture: CapturedState, *, overlap: bool
    ) -> None:
        assert self._copier is not None
        try:
            self._pending = self._copier.start(lease, capture, overlap=overlap)
        except Exception:  # boundary: after any error the lease is returned
            keeper.abandon(lease)
            raise
        self._lease = lease
        self._step_before = self.last_step
        self.last_step = lease.state.step
        self._stats.copied(lease.state.step, self._clock_s())
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
        self._stats.torn(lease.state.step, written)
        self.last_step = self._step_before

    def _mark_written(self, keeper: RankKeeperClient, lease: Lease) -> None:
        keeper.mark_written(lease)
        self._stats.saved()
        self.session.on_saved()

    def _reserve(self, keeper: RankKeeperClient, plan: CopyPlan, step: int) -> None:
        """Reserve memory for images of *plan*; states in the old memory stay with the keeper."""
        if self._copier is not None:
            self._changed_names = changed_tensors(self._copier.plan, plan)
            self._copier.close()
            self._copier = None
        reserved = keeper.reserve(plan.layout, slots=self._slots)
        self._copier = SlotCopier(plan, reserved, self._stats.warn_once)
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

    def _release(self) -> None:
        """Release the memory once nothing is copied into it any more."""
        copier, pending = self._copier, self._pending
        self._copier = self._pending = self._lease = None
        with suppress(Exception):  # boundary: the abandoned copy may be broken
            if pending is not None:
                pending.wait()
            if copier is not None:
                copier.close()

    def _on_skipped(self, keeper: RankKeeperClient, reply: Skipped, step: int) -> None:
        self._stats.skip(reply.why, is_due=reply.is_due, awaits_nodes=reply.awaits_nodes)
        self._stop_sharing(keeper, reply, step)

    def _stop_sharing(self, keeper: RankKeeperClient, reply: Skipped, step: int) -> None:
        """Copy all tensors from the next save on, where the keeper says so."""
        if reply.copies_all and self._capturer.stop_sharing():
            if self._is_first_local_rank:  # all of the node have the same reason
                self._stats.warn_once(reply.why)
            self._reserve(keeper, self._capturer.capture(step).plan, step)
