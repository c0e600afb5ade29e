"""How a run ended, for the command to print and the store to keep."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import EXIT_OK, EXIT_REQUEUE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended here, for the command to print."""

    exit_code: int
    outcome: str
    reason: str
    run_id: str | None = None
    run_dir: Path | None = None
    note: str | None = None
    goes_on: bool = False  # without this node, for which it is over


def ended_as(exit_code: int) -> str:
    """Return the word of the store for a run that ended with *exit_code* by agreement."""
    if exit_code == EXIT_OK:
        return "completed"
    return "preempted" if exit_code == EXIT_REQUEUE else "failed"
