"""The end of a script: the state after its last step is saved, closed or not."""

import logging
import os
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field

from gpuops.worker import api
from gpuops.worker.checkpointer.keeping import Finder, NoKeeperError, OwnKeeper
from gpuops.worker.checkpointer.saver import Saver

_log = logging.getLogger(__name__)

AT_EXIT_S = 60.0  # nobody asked for it to be waited for


@dataclass(slots=True)
class LastStep:
    """The last step that was told of, and whether what was given is as it was then.

    ``is_watched``: each of ``n_optimizers`` tells of its steps; ``stepping`` are those that have
    made one since. ``persists``: a state outlives the job.
    """

    n_optimizers: int
    persists: bool
    n: int = 0
    is_watched: bool = False
    stepping: set[Hashable] = field(default_factory=set)
    pid: int = field(default_factory=os.getpid)

    def told(self, n: int) -> None:
        """Hear that *n* steps are completed, and that the state after them is what is there now."""
        self.n = n
        # An optimizer that is compiled, or replayed as a CUDA graph, calls no hook: nothing tells
        # whether it changes what is being copied.
        self.is_watched = len(self.stepping) == self.n_optimizers > 0
        self.stepping.clear()

    @property
    def may_be_saved(self) -> bool:
        """Say whether what was given is as it was at the last `step`, and of use later on."""
        return self.is_watched and not self.stepping and self.persists


def save_and_leave(
    last: LastStep, saver: Saver | None, own: OwnKeeper | None = None, *, is_normal: bool
) -> None:
    """Save what the last step was told of, where that may be, and take leave of the keepers.

    Not *is_normal*: an exception ends the training, and nothing is saved that was not.

    Raises:
        KeeperError: The last state could not be persisted by the keeper *own* of this job.
    """
    if saver is not None:
        if is_normal and last.may_be_saved:
            _say_if(saver.save_last(last.n), last, saver)
        saver.close()
    if own is not None:
        own.finish(saver.last_step if saver is not None else None)


def _say_if(why: str, last: LastStep, saver: Saver) -> None:
    if why and saver.is_first and not isinstance(saver.trouble, NoKeeperError):
        newest = "none" if saver.last_step is None else f"that after step {saver.last_step}"
        text = "the state after step %d, the last one, is not saved: %s; the newest is %s"
        _log.warning(text, last.n, why, newest)


def at_exit(last: LastStep, saver: Saver, finder: Finder) -> None:
    """Do at the end of a program what `Checkpointer.close` does, if it ends well; never raises.

    A forked child that ends does nothing. A keeper of the job's own is not ended: other ranks may
    be at work. It ends by itself, and persists before what is newest then.
    """
    if os.getpid() != last.pid:
        return
    try:
        is_normal = ends_well()
        save_and_leave(last, saver, is_normal=is_normal)
        if is_normal and finder.own is not None:
            finder.own.persist(saver.last_step, AT_EXIT_S)
    except Exception as exc:  # noqa: BLE001 boundary: the script is done, whatever this says
        _log.warning("the last checkpoint may be missing: %s", exc)


def ends_well() -> bool:
    """Say whether no exception ends this program, as far as can be seen when it is over.

    The interpreter notes what it shows of an exception that nobody caught; of an exit with a code
    other than 0 only `gpuops run` hears.
    """
    is_calm = sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None
    return is_calm and not api.has_failed()
