"""Saves states: captures, asks the keeper, copies, seals; and stops rather than disturb."""

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, Protocol, TypeVar

from gpuops.checkpoint.keeper import NO_ANSWER, Grant, Keeper, Skipped
from gpuops.checkpoint.keeper_line import KeeperGoneError
from gpuops.checkpoint.states import CheckpointError, KeeperError, Shard
from gpuops.worker.checkpointer.capture import Capture, Capturer, CopyPlan
from gpuops.worker.checkpointer.copying import Flight, SlotCopier
from gpuops.worker.checkpointer.keeping import NoKeeperError
from gpuops.worker.checkpointer.part import Part
from gpuops.worker.checkpointer.place import Place
from gpuops.worker.checkpointer.searching import Search

_log = logging.getLogger(__name__)

RETRY_S_MIN, RETRY_S_MAX = 30.0, 600.0
# A keeper that is gone is soon replaced by the agent; to look for it costs a thread and no more.
SEARCH_S_MIN, SEARCH_S_MAX = 0.5, 30.0
AGAIN_S = 0.1
LAST_SAVE_S = 60.0  # a keeper that hangs is replaced by then
N_ANEW = 3  # saves in a row that had no memory of their layout; a change or two is no trouble
_N_STALLS = 64
_N_SHOWN = 3
_STATE = re.compile(r"step \d+ \(epoch \d+\)")  # as a `StateId` is written: no reason of its own
T = TypeVar("T")


class Connect(Protocol):
    """Finds the keeper; *is_back*: for a rank that was connected before, and trains."""

    def __call__(self, *, is_back: bool = False) -> Keeper: ...


class Saver:
    """One rank's saving.

    A keeper that is gone is looked for again, beside the training, and used from the next step on;
    what is wrong with the state itself ends saving for good. Either is said once.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        place: Place,
        connect: Connect,
        *,
        slots: int,
        allow_pickle: bool,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take *connect*, which finds the keeper or raises KeeperError; see `connect`."""
        self._is_single = place.local_world == 1
        self.is_first = place.rank == 0
        self._reserved_at: int | None = None
        self._n_anew = 0
        self._changed = ""
        self._capturer = Capturer(parts, Shard(place.rank, place.world), allow_pickle=allow_pickle)
        self.keeper: Keeper | None = None
        self.trouble: Exception | None = None
        self._slots = slots
        self._connect = connect
        self._search: Search | None = None
        self._search_s = SEARCH_S_MIN
        self._clock_s = clock_s
        self._copier: SlotCopier | None = None
        self._flight: Flight | None = None
        self._grant: Grant | None = None
        self._retry_at_s: float | None = None
        self._retry_s = RETRY_S_MIN
        self._warned: set[str] = set()
        self._skipped: Counter[str] = Counter()
        self._stalls_s: deque[float] = deque(maxlen=_N_STALLS)
        self._saved = 0
        self.last_step: int | None = None

    def save_beside(self, values: Callable[[], Mapping[str, object]]) -> None:
        """Have plain *values* saved with each state, which nothing is restored from."""
        self._capturer.beside = values

    def connect(self) -> None:
        """Find the keeper; without one nothing is saved, which is said once."""
        try:
            self.keeper = self._connect()
        except CheckpointError as exc:
            self.turn_off(exc)
        else:
            self.trouble = self._retry_at_s = None

    def connect_again(self, within_s: float) -> Keeper:
        """Return a keeper in place of one that is gone; waits for it.

        Raises:
            KeeperGoneError: There is none within *within_s* seconds.
            KeeperError: It refuses this rank.
        """
        end_s = self._clock_s() + within_s
        self._drop()
        while True:
            try:
                self.keeper = keeper = self._connect()
            except KeeperGoneError:
                if self._clock_s() >= end_s:
                    raise
            else:
                self.trouble = self._retry_at_s = None
                return keeper
            time.sleep(AGAIN_S)

    def prepare(self, step: int) -> None:
        """Reserve memory where none is: no rank is granted before all of a node have some."""
        if self._copier is None and self._is_on():
            self._guarded(
                lambda keeper: self._adopt(keeper, self._capturer.capture(step).plan, step)
            )

    def save(self, step: int, *, ask_first: bool, overlap: bool = False) -> bool:
        """Save the state after *step*; return whether it was copied.

        *overlap*: `fence` is called before the next step of each optimizer.
        """
        if not self._is_on():
            return False
        if self._flight is not None:
            self._skip("the copy before is still being made")
            return False
        begun_s, before = self._clock_s(), self.last_step
        self._guarded(lambda keeper: self._save(keeper, step, ask_first, overlap))
        if self.last_step == before:
            return False
        self._stalls_s.append(self._clock_s() - begun_s)
        return True

    def save_last(self, step: int, within_s: float = LAST_SAVE_S) -> str:
        """Save the state after *step*, which none follows; return why it is not, "" where it is.

        Waits *within_s* at most for a slot, or for a keeper in place of one that is gone.
        """
        if self._flight is not None:
            self._flight.wait()
            self._complete()
        end_s = self._clock_s() + within_s
        while True:
            why = None
            if self._is_on():
                why = self._guarded(lambda keeper: self._save_last(keeper, step))
            if why == "" and self.trouble is None:
                return ""
            if self.trouble is not None and not isinstance(self.trouble, KeeperGoneError):
                return _said(self.trouble)
            if self._clock_s() >= end_s:
                return why or str(self.trouble)
            time.sleep(AGAIN_S)

    def _save_last(self, keeper: Keeper, step: int) -> str:
        """Return why it is not saved now, "" where it is."""
        if self._copier is None:
            self._adopt(keeper, self._capturer.capture(step).plan, step)
        answer = keeper.begin(step, is_last=True)
        if isinstance(answer, Skipped):
            return answer.why if answer.is_due else ""  # it is not due where it is saved
        try:
            capture = self._capturer.capture(step)
        except Exception:  # boundary: whatever it is, the grant does not stay
            keeper.abandon(answer)
            raise
        if self._copier is None or self._copier.plan is not capture.plan:
            keeper.abandon(answer)
            self._adopt(keeper, capture.plan, step)
            return "the state changed its shape"
        self._copy(keeper, answer, capture, overlap=False)
        return ""

    def poll(self) -> None:
        """Seal a copy that was still being made, if it is complete by now; never wait."""
        if self._flight is not None and self._flight.is_done():
            self._complete()

    def fence(self) -> None:
        """Make the step that is about to be made come after the copy that is under way."""
        if self._flight is not None:
            if self._flight.is_done():
                self._complete()
            else:
                self._flight.fence()

    def close(self) -> None:
        """Wait for the copy that is under way, seal it, and let go of the memory."""
        if self._flight is not None:
            self._flight.wait()
            self._complete()
        if self._search is not None:
            self._search.cancel()
        self._drop()

    def counts(self) -> dict[str, Any]:
        """Return what was saved so far."""
        return {
            "saved": self._saved,
            "skipped": dict(self._skipped),
            "last_step": self.last_step,
            "stall_s": self._stalls_s[-1] if self._stalls_s else None,
            "stall_median_s": median(self._stalls_s) if self._stalls_s else None,
            "nbytes": self._copier.plan.layout.nbytes if self._copier else 0,
            "off": _said(self.trouble) if self.trouble is not None else None,
        }

    def turn_off(self, exc: Exception) -> None:
        """Save nothing for now, and say why once.

        A keeper that is gone is looked for again later; one that refused is asked again on the same
        line, since a rank that leaves and comes back would be taken for a restarted job.
        """
        self.trouble = exc
        may_pass = isinstance(exc, KeeperError) and not isinstance(exc, NoKeeperError)
        is_refused = may_pass and self.keeper is not None and not isinstance(exc, KeeperGoneError)
        self._drop(keep_line=is_refused)
        self._retry_at_s = self._clock_s() + self._wait_s(exc) if may_pass else None
        kind = type(exc).__name__
        if kind in self._warned or (isinstance(exc, NoKeeperError) and not self.is_first):
            return  # said already, or true of all ranks alike and said by the first
        self._warned.add(kind)
        later = "it is tried again later" if may_pass else "training goes on without"
        _log.warning("no checkpoints are saved from now on, %s: %s", later, _said(exc))

    def _wait_s(self, exc: Exception) -> float:
        """Return how long to leave alone who failed by *exc*: each time longer."""
        if isinstance(exc, KeeperGoneError):
            wait_s, self._search_s = self._search_s, min(2 * self._search_s, SEARCH_S_MAX)
        else:
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_S_MAX)
        return wait_s

    def _save(self, keeper: Keeper, step: int, ask_first: bool, overlap: bool) -> None:
        answer = keeper.begin(step) if ask_first else None
        if isinstance(answer, Skipped):
            self._skip(answer.why, is_due=answer.is_due)
            return
        try:
            capture = self._capturer.capture(step)
            is_known = self._copier is not None and self._copier.plan is capture.plan
            if not is_known and answer is None:
                self._adopt(keeper, capture.plan, step)
        except Exception:  # boundary: whatever it is, the grant does not stay
            if answer is not None:
                keeper.abandon(answer)
            raise
        if answer is None:
            if step == self._reserved_at and not self._is_single:
                # Another rank of this node may not have come so far, and all would be refused.
                self._skip_anew("memory was reserved at this step")
                return
            answer = keeper.begin(step)
        if isinstance(answer, Skipped):
            self._skip(answer.why, is_due=answer.is_due)
        elif not is_known and ask_first:
            keeper.abandon(answer)
            self._skip_anew("the state changed its shape")
            self._adopt(keeper, capture.plan, step)
        else:
            if answer.notice:
                self._warn_once(answer.notice)
            self._copy(keeper, answer, capture, overlap=overlap)

    def _copy(self, keeper: Keeper, grant: Grant, capture: Capture, *, overlap: bool) -> None:
        assert self._copier is not None
        try:
            self._flight = self._copier.start(grant.slot, capture, overlap=overlap)
        except Exception:  # boundary: whatever it is, the grant does not stay
            keeper.abandon(grant)
            raise
        self._grant, self.last_step = grant, grant.state.step
        self._n_anew = 0
        if self._flight.is_done():
            self._complete()

    def _complete(self) -> None:
        grant, self._flight, self._grant = self._grant, None, None
        assert grant is not None
        self._guarded(lambda keeper: self._seal(keeper, grant))

    def _seal(self, keeper: Keeper, grant: Grant) -> None:
        keeper.seal(grant)
        self._saved += 1
        self._retry_s, self._search_s = RETRY_S_MIN, SEARCH_S_MIN

    def _adopt(self, keeper: Keeper, plan: CopyPlan, step: int) -> None:
        """Reserve memory for images of *plan*; what the old memory holds stays with the keeper."""
        if self._copier is not None:
            self._changed = _changed(self._copier.plan, plan)
            self._copier.close()
            self._copier = None
        slots = keeper.reserve(plan.layout, slots=self._slots)
        self._copier = SlotCopier(plan, slots, self._warn_once)
        self._reserved_at = step

    def _guarded(self, act: Callable[[Keeper], T]) -> T | None:
        """Return what *act* does, None where it fails: saving is off then."""
        if self.keeper is None:
            return None
        try:
            return act(self.keeper)
        except Exception as exc:  # noqa: BLE001 boundary: no checkpoint is worth a training run
            self.turn_off(exc)
            return None

    def _is_on(self) -> bool:
        if self.trouble is None:
            return True
        if self._search is not None:
            return self._has_found(self._search)
        if self._retry_at_s is None or self._clock_s() < self._retry_at_s:
            return False
        if self.keeper is None:
            self._search = Search(partial(self._connect, is_back=True))
            return False
        self.trouble = self._retry_at_s = None
        return True

    def _has_found(self, search: Search) -> bool:
        """Take over what a search has found, if it is done; never wait."""
        if not search.is_done():
            return False
        self._search = None
        try:
            self.keeper = search.result()
        except Exception as exc:  # noqa: BLE001 boundary: no checkpoint is worth a training run
            self.turn_off(exc)
            return False
        self.trouble = self._retry_at_s = None
        if self.is_first:
            _log.warning("a keeper is there again: checkpoints are saved from now on")
        self._warned.discard(KeeperGoneError.__name__)
        return True

    def _drop(self, *, keep_line: bool = False) -> None:
        keeper, copier, flight = self.keeper, self._copier, self._flight
        self._copier = self._flight = self._grant = None
        if keep_line:
            keeper = None
        else:
            self.keeper = None
        with suppress(Exception):  # boundary: what is given up may be broken
            if flight is not None:
                flight.wait()
            if copier is not None:
                copier.close()
            if keeper is not None:
                keeper.close()

    def _skip(self, why: str, *, is_due: bool = True) -> None:
        if is_due:
            self._skipped[_STATE.sub("the state before", why)] += 1
        if why == NO_ANSWER and self.is_first:
            self._warn_once(f"{NO_ANSWER}: no checkpoints are saved until it does")

    def _skip_anew(self, why: str) -> None:
        """Skip a save for which memory of another layout was needed; not one after another."""
        self._skip(why)
        self._n_anew += 1
        if self._n_anew == N_ANEW:
            _log.warning(
                "the state had another shape at each of the last %d saves (%s), and no checkpoint "
                "is saved while that goes on: give what grows room for all of it from the start",
                N_ANEW,
                self._changed,
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)


def _changed(old: CopyPlan, new: CopyPlan) -> str:
    """Return the names of a few tensors that made another layout necessary."""
    known, wanted = ({tensor.spec for tensor in plan.layout.tensors} for plan in (old, new))
    names = sorted({spec.name for spec in known ^ wanted})
    more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
    return ", ".join(names[:_N_SHOWN]) + more if names else "what is not tensors grew"


def _said(exc: Exception) -> str:
    return str(exc) if isinstance(exc, CheckpointError) else f"{type(exc).__name__}: {exc}"
