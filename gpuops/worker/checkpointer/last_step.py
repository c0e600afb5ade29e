"""The end of a script: the state after its last step is saved, closed or not."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from gpuops.worker import api
from gpuops.worker.checkpointer.keeping import Finder, NoKeeperError, OwnKeeper
from gpuops.worker.checkpointer.saver import Saver

_log = logging.getLogger(__name__)

AT_EXIT_S = 60.0  # nobody asked for it to be waited for


_N_LOOKED_AT = 8  # parameters of an optimizer, at each step


@dataclass(slots=True)
class LastStep:
    """The last step that was told of, and whether what was given is as it was then.

    ``is_watched``: each of the ``optimizers`` has told of a step of its own just before it.
    ``persists``: a state outlives the job.

    An optimizer that is compiled, or replayed as a CUDA graph, calls no hook, and nothing tells
    whether it changes what is being copied. One that is only left out for a while (it takes turns,
    a scaler found inf) is told from those: a capture calls the hook, and a compiled step counts up
    the versions of the parameters that have gradients, but for a fused or capturable one, which is
    never taken for one that is left out. Of a graph that is older than the hooks nothing is known,
    so that an optimizer must have told of a step in any case.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    persists: bool
    n: int = 0
    is_watched: bool = False
    pid: int = field(default_factory=os.getpid)
    _stepping: set[int] = field(default_factory=set)
    _heard: set[int] = field(default_factory=set)
    _is_silent: bool = False
    _looked_at: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear that *optimizer* is about to make a step."""
        self._stepping.add(id(optimizer))
        if id(optimizer) not in self._looked_at:
            self._looked_at[id(optimizer)] = _looked_at(optimizer)

    def is_captured(self) -> None:
        """Hear that a step of an optimizer becomes a CUDA graph."""
        self._is_silent = True

    def told(self, n: int) -> None:
        """Hear that *n* steps are completed, and that the state after them is what is there now."""
        self.n = n
        self.is_watched = len(self._stepping) == len(self.optimizers) > 0
        self._is_silent |= self._has_changed()
        self._versions = {key: _version(found) for key, found in self._looked_at.items()}
        self._heard |= self._stepping
        self._stepping.clear()

    def doubt(self) -> str:
        """Return why what was given may not be as it was at the last `step`, "" where it is."""
        if self._stepping:
            return "an optimizer has stepped since"
        if self.is_watched:
            return ""
        if self._is_silent or self._has_changed():
            return "an optimizer may have stepped since, compiled or in a CUDA graph, unnoticed"
        if not self.optimizers or len(self._heard) < len(self.optimizers):
            return "no optimizer step was seen of all that is trained, and there may be one since"
        return ""

    def _has_changed(self) -> bool:
        """Say whether an optimizer that tells of no step may have made one since `told`."""
        silent = self._versions.keys() - self._stepping
        return any(
            not self._looked_at[key] or _version(self._looked_at[key]) != self._versions[key]
            for key in silent
        )


def _looked_at(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return parameters that count up whenever *optimizer* steps; none where none surely do.

    Seen with torch 2.13: fused steps count nothing up, and replayed ones cannot.
    """
    groups = optimizer.param_groups
    if any(group.get("fused") or group.get("capturable") for group in groups):
        return []
    trained = (one for group in groups for one in group["params"] if one.grad is not None)
    return list(islice(trained, _N_LOOKED_AT))


def _version(parameters: Sequence[torch.Tensor]) -> int:
    return sum(one._version for one in parameters)  # noqa: SLF001 documented


def save_and_leave(
    last: LastStep, saver: Saver | None, own: OwnKeeper | None = None, *, is_normal: bool
) -> None:
    """Save what the last step was told of, where that may be, and take leave of the keepers.

    Not *is_normal*: an exception ends the training, and nothing is saved that was not.

    Raises:
        KeeperError: The last state could not be persisted by the keeper *own* of this job.
    """
    if saver is not None:
        if is_normal and last.persists:
            doubt = last.doubt()
            if not doubt:
                _say_if(saver.save_last(last.n), last, saver)
            elif last.n > (saver.last_step or 0):
                _say_if(doubt, last, saver)
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
