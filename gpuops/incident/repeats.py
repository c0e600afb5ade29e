"""Detect a repeated failure: of the software, of one node, or of one checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.incident.decision import PastFailure, RestartDecision
from gpuops.incident.signature import is_weak

SAME_STEP_COUNT = 2  # the same failure at the same step, or before the first: deterministic
STEP_UNKNOWN_COUNT = 3
# A bad checkpoint shows within a few steps of loading. A guess; if wrong, it costs one restart.
AFTER_LOAD_STEPS = 5
# Possible failures of a bad checkpoint. Memory, lost peers and hardware are never blamed on it.
_LOAD_FAILURE_CATEGORIES = frozenset(
    {"user_code", "crash", "unresolved", "storage", "checkpoint", "gpu_fault"}
)


@dataclass(frozen=True, slots=True)
class RepeatedFault:
    """A repeated software fault. *earlier* are the matching failures, oldest first."""

    rule: str
    when: str
    earlier: tuple[PastFailure, ...]

    def only_node(self, failure: PastFailure) -> str | None:
        """Return the only node that it occurred on, None if there were several."""
        nodes = {node for past in (*self.earlier, failure) for node in past.nodes}
        somewhere = all(past.nodes for past in (*self.earlier, failure))
        return nodes.pop() if len(nodes) == 1 and somewhere else None


def find_software_fault(
    history: Sequence[PastFailure], failure: PastFailure
) -> RepeatedFault | None:
    """Return the repeated fault if *failure* repeats earlier ones often enough, else None.

    Only failures with the same signature count, and only if no generation got past that step in
    between, nor has saved a newer checkpoint of that step or a later one: steps may be counted anew
    in each generation. Where the step is unknown, any newer checkpoint is progress.
    """
    if failure.signature is None:
        return None
    signature_is_weak = is_weak(failure.signature)
    if not failure.has_stepped:
        rule, when, needed = "software.before_first_step", "before the first step", SAME_STEP_COUNT
    elif failure.step is not None:
        rule, when, needed = "software.same_step", f"at step {failure.step}", SAME_STEP_COUNT
    else:
        rule, when, needed = "software.step_unknown", "at an unknown step", STEP_UNKNOWN_COUNT
    matching = tuple(
        past
        for index, past in enumerate(history)
        if _is_same(past, failure) and not _was_surpassed(history[index + 1 :], failure)
    )
    needed = STEP_UNKNOWN_COUNT if signature_is_weak else needed
    return RepeatedFault(rule, when, matching) if len(matching) + 1 >= needed else None


def _is_same(past: PastFailure, failure: PastFailure) -> bool:
    return (
        past.signature == failure.signature
        and past.has_stepped == failure.has_stepped
        and past.step == failure.step
        and not _has_progressed(failure, past)
    )


def _was_surpassed(since: Sequence[PastFailure], failure: PastFailure) -> bool:
    """Return whether a generation of *since* got past the step of *failure*."""
    if not failure.has_stepped:
        return any(past.has_stepped for past in since)
    step = failure.step
    return step is not None and any(
        past.highest_step is not None and past.highest_step > step for past in since
    )


def _has_progressed(failure: PastFailure, past: PastFailure) -> bool:
    """Return whether a checkpoint that was saved between them lies beyond the failure."""
    now, then = failure.checkpoint_step, past.checkpoint_step
    if now is None or (then is not None and now <= then):
        return False
    return failure.step is None or now >= failure.step


def find_bad_checkpoint(history: Sequence[PastFailure], failure: PastFailure) -> int | None:
    """Return the checkpoint that the run failed twice after loading; each is returned once."""
    step = failure.checkpoint_step
    if step is None or not _may_be_load_failure(failure):
        return None
    if any(past.excluded_checkpoint == step for past in history):
        return None
    for index in range(len(history) - 1, -1, -1):
        past = history[index]
        if past.highest_step is not None and past.highest_step > step + AFTER_LOAD_STEPS:
            return None
        if past.checkpoint_step == step and _may_be_load_failure(past):
            return step
    return None


def checkpoint_to_exclude(step: int | None, decision: RestartDecision) -> int | None:
    """Return the checkpoint to exclude after *decision*; *step* is excluded so far.

    A run that got well past it, and has saved since, has a good one of that step or a later one.
    """
    if decision.exclude_checkpoint is not None or step is None:
        return decision.exclude_checkpoint
    saved, highest = decision.failure.checkpoint_step, decision.failure.highest_step
    was_passed = highest is not None and highest > step + AFTER_LOAD_STEPS
    return None if was_passed and saved is not None and saved >= step else step


def _may_be_load_failure(failure: PastFailure) -> bool:
    if (
        failure.failure_class.category not in _LOAD_FAILURE_CATEGORIES
        or failure.checkpoint_step is None
    ):
        return False
    if not failure.has_stepped:
        return True
    at = failure.step
    return at is not None and 0 <= at - failure.checkpoint_step <= AFTER_LOAD_STEPS
