"""The end of a script: the state after its last step is saved, closed or not."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from gpuops.worker import api
from gpuops.worker.keeper_finder import KeeperFinder, NoKeeperError, StandaloneKeeper
from gpuops.worker.saver import CheckpointSaver

_log = logging.getLogger(__name__)

AT_EXIT_S = 60.0  # nobody asked for it to be waited for


_N_WATCHED = 8  # parameters of an optimizer, at each step


@dataclass(slots=True)
class LastStepTracker:
    """The last step that was told of, and whether what was given is as it was then.

    ``is_observed``: each of the ``optimizers`` has told of a step of its own just before it.
    ``is_persistent``: a state outlives the job.

    An optimizer that is compiled, or replayed as a CUDA graph, calls no hook, and nothing tells
    whether it changes what is being copied. One that is only left out for a while (it takes turns,
    a scaler found inf) is told from those: a capture calls the hook, and a compiled step counts up
    the versions of the parameters that have gradients, but for a fused or capturable one, which is
    never taken for one that is left out. Of a graph that is older than the hooks nothing is known,
    so that an optimizer must have told of a step in any case.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    is_persistent: bool
    step: int = 0
    is_observed: bool = False
    pid: int = field(default_factory=os.getpid)
    _stepping: set[int] = field(default_factory=set)
    _observed: set[int] = field(default_factory=set)
    _may_be_unobserved: bool = False
    _watched: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear that *optimizer* is about to make a step."""
        self._stepping.add(id(optimizer))
        if id(optimizer) not in self._watched:
            self._watched[id(optimizer)] = _watched_parameters(optimizer)

    def on_graph_capture(self) -> None:
        """Hear that a step of an optimizer becomes a CUDA graph."""
        self._may_be_unobserved = True

    def record(self, step: int) -> None:
        """Hear that *step* steps are completed, and that the state is now what they made."""
        self.step = step
        self.is_observed = len(self._stepping) == len(self.optimizers) > 0
        self._may_be_unobserved |= self._has_changed()
        self._versions = {key: _version_sum(found) for key, found in self._watched.items()}
        self._observed |= self._stepping
        self._stepping.clear()

    def unsafe_reason(self) -> str:
        """Return why what was given may not be as it was at the last `step`, "" where it is."""
        if self._stepping:
            return "an optimizer has stepped since"
        if self.is_observed:
            return ""
        if self._may_be_unobserved or self._has_changed():
            return "an optimizer may have stepped since, compiled or in a CUDA graph, unnoticed"
        if not self.optimizers or len(self._observed) < len(self.optimizers):
            return "no optimizer step was seen of all that is trained, and there may be one since"
        return ""

    def _has_changed(self) -> bool:
        """Say whether an optimizer that tells of no step may have made one since `record`."""
        unobserved = self._versions.keys() - self._stepping
        return any(
            not self._watched[key] or _version_sum(self._watched[key]) != self._versions[key]
            for key in unobserved
        )


def _watched_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return parameters that count up whenever *optimizer* steps; none where none surely do.

    Seen with torch 2.13: fused steps count nothing up, and replayed ones cannot.
    """
    groups = optimizer.param_groups
    if any(group.get("fused") or group.get("capturable") for group in groups):
        return []
    trained = (
        parameter for group in groups for parameter in group["params"] if parameter.grad is not None
    )
    return list(islice(trained, _N_WATCHED))


def _version_sum(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter._version for parameter in parameters)  # noqa: SLF001 documented


def save_final(
    last: LastStepTracker,
    saver: CheckpointSaver | None,
    standalone: StandaloneKeeper | None = None,
    *,
    is_normal: bool,
) -> None:
    """Save what the last step was told of, where that may be, and take leave of the keepers.

    Not *is_normal*: an exception ends the training, and nothing is saved that was not.

    Raises:
        KeeperError: The last state could not be persisted by the keeper *standalone* of this job.
    """
    if saver is not None:
        if is_normal and last.is_persistent:
            unsafe_reason = last.unsafe_reason()
            if not unsafe_reason:
                _warn_if(saver.save_final(last.step), last, saver)
            elif last.step > (saver.last_step or 0):
                _warn_if(unsafe_reason, last, saver)
        saver.close()
    if standalone is not None:
        standalone.finish(saver.last_step if saver is not None else None)


def _warn_if(reason: str, last: LastStepTracker, saver: CheckpointSaver) -> None:
    if reason and saver.is_rank_zero and not isinstance(saver.error, NoKeeperError):
        newest = "none" if saver.last_step is None else f"that after step {saver.last_step}"
        text = "the state after step %d, the last one, is not saved: %s; the newest is %s"
        _log.warning(text, last.step, reason, newest)


def save_at_exit(last: LastStepTracker, saver: CheckpointSaver, finder: KeeperFinder) -> None:
    """Do at the end of a program what `Checkpointer.close` does, if it ends well; never raises.

    A forked child that ends does nothing. A keeper of the job's own is not ended: other ranks may
    be at work. It ends by itself, and persists before what is newest then.
    """
    if os.getpid() != last.pid:
        return
    try:
        is_normal = exits_normally()
        save_final(last, saver, is_normal=is_normal)
        if is_normal and finder.standalone is not None:
            finder.standalone.persist(saver.last_step, AT_EXIT_S)
    except Exception as exc:  # noqa: BLE001 boundary: the script is done, whatever this says
        _log.warning("the last checkpoint may be missing: %s", exc)


def exits_normally() -> bool:
    """Say whether no exception ends this program, as far as can be seen when it is over.

    The interpreter notes what it shows of an exception that nobody caught; of an exit with a code
    other than 0 only `gpuops run` hears.
    """
    has_no_exception = sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None
    return has_no_exception and not api.has_failed()
