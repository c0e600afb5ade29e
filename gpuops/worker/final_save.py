"""The last state of a script: at its end, with or without `close`, or where a drain stops it."""

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

AT_EXIT_S = 60.0  # at exit, a hanging keeper must not block for ever


_N_WATCHED = 8  # parameters of an optimizer, at each step


@dataclass(slots=True)
class LastStepTracker:
    """The last recorded step, and whether the state is still as it was then.

    ``is_observed``: a step of each of the ``optimizers`` was observed just before it.
    ``is_persistent``: a state outlives the job.

    An optimizer that is compiled, or replayed as a CUDA graph, calls no hook, so that its changes
    during a copy are not observed. It is distinguished from an optimizer that is skipped for a
    while (it alternates with others, or a scaler found inf): a capture calls the hook, and a
    compiled step increments the versions of the parameters with gradients, except for a fused or
    capturable one, which never counts as skipped. A graph that is older than the hooks is not
    detected, so that an optimizer must have been observed in any case.
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
        """Record that *optimizer* is about to make a step."""
        self._stepping.add(id(optimizer))
        if id(optimizer) not in self._watched:
            self._watched[id(optimizer)] = _watched_parameters(optimizer)

    def on_state_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that *optimizer* is about to make a step that only creates its state.

        It changes no parameter, but increments the versions.
        """
        self._versions.pop(id(optimizer), None)

    def on_graph_capture(self) -> None:
        """Record that a step of an optimizer becomes a CUDA graph."""
        self._may_be_unobserved = True

    def record(self, step: int) -> None:
        """Record that *step* steps are completed, and that the state is now their result."""
        self.step = step
        self.is_observed = len(self._stepping) == len(self.optimizers) > 0
        self._may_be_unobserved |= self._has_changed()
        self._versions = {key: _version_sum(found) for key, found in self._watched.items()}
        self._observed |= self._stepping
        self._stepping.clear()

    def unsafe_reason(self) -> str:
        """Return why the state may have changed since the last `step`, "" where it has not."""
        if self._stepping:
            return "an optimizer has stepped since"
        if self.is_observed:
            return ""
        if self._may_be_unobserved or self._has_changed():
            return "an optimizer may have stepped since, compiled or in a CUDA graph, unobserved"
        if not self.optimizers or len(self._observed) < len(self.optimizers):
            return "no optimizer step was observed, so that there may have been one since"
        return ""

    def _has_changed(self) -> bool:
        """Return whether an unobserved optimizer may have made a step since `record`."""
        unobserved = self._versions.keys() - self._stepping
        return any(
            not self._watched[key] or _version_sum(self._watched[key]) != self._versions[key]
            for key in unobserved
        )


def _watched_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return parameters whose versions grow whenever *optimizer* steps; none where that is unsure.

    With torch 2.13 fused steps increment no version, and replayed ones cannot.
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
    """Save the state of the last step where that is possible, and disconnect from the keepers.

    Not *is_normal*: an exception ends the training, and nothing more is saved.

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


def save_at_stop(last: LastStepTracker, saver: CheckpointSaver) -> bool:
    """Save the state of the last step if a drain ends the run with it; return whether it does.

    The step has just been recorded, so that the state is its result, whatever optimizers report.
    """
    if not last.is_persistent or not api.must_save_at_stop():
        return False
    try:
        _warn_if(saver.save_final(last.step), last, saver)
    finally:
        api.saved_at_stop()
    return True


def save_at_exit(last: LastStepTracker, saver: CheckpointSaver, finder: KeeperFinder) -> None:
    """Do at exit what `Checkpointer.close` does, if the program ends normally; never raises.

    A forked child does nothing. The job's own keeper is not ended: other ranks may still use it. It
    ends by itself, and persists the newest state before.
    """
    if os.getpid() != last.pid:
        return
    try:
        is_normal = exits_normally()
        save_final(last, saver, is_normal=is_normal)
        if is_normal and finder.standalone is not None:
            finder.standalone.persist(saver.last_step, AT_EXIT_S)
    except Exception as exc:  # noqa: BLE001 boundary: the script has succeeded already
        _log.warning("the last checkpoint may be missing: %s", exc)


def exits_normally() -> bool:
    """Return whether no exception ends this program, as far as that is visible at exit.

    The interpreter records an uncaught exception that it prints; an exit with a code other than 0
    is known only with `gpuops run`.
    """
    has_no_exception = sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None
    return has_no_exception and not api.has_failed()
