"""What to do about a failure class: its runbook says it, the mode limits it.

In ``observe`` (the default) nothing is drained, reset or excluded: such actions are recommended
and not taken. Restarting workers inside the user's own allocation and budget is always allowed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpuops.incident.runbook import Runbook
from gpuops.model import ActionKind, FailureClass

Mode = Literal["observe", "enforce"]
_TOUCHES_NO_NODE = frozenset({ActionKind.NONE, ActionKind.RESTART, ActionKind.STOP})


@dataclass(frozen=True, slots=True)
class Decision:
    """What the runbook asks for, what may be done by itself now, and why they differ."""

    recommended: ActionKind
    taken: ActionKind
    why: str


def action_for(
    failure_class: FailureClass,
    runbooks: Mapping[FailureClass, Runbook],
    mode: Mode = "observe",
) -> Decision:
    """Return the action for *failure_class* under *mode*; a class without a page gets none."""
    runbook = runbooks.get(failure_class)
    if runbook is None:
        return Decision(ActionKind.NONE, ActionKind.NONE, f"no runbook for {failure_class.value}")
    wanted = runbook.action
    if mode == "enforce" or wanted in _TOUCHES_NO_NODE:
        return Decision(wanted, wanted, f"runbook {failure_class.value}")
    return Decision(wanted, ActionKind.NONE, f"observe mode: {wanted.value} is left to a person")
