"""One generation on one node: its place in the run, and its workers."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.elastic.rendezvous import Assignment
from gpuops.agent.elastic.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One generation on this node; ``folder`` is where its workers log."""

    assignment: Assignment
    workers: Workers
    folder: Path

    @property
    def generation(self) -> int:
        """Return the number of the generation."""
        return self.assignment.record.generation


class CurrentAttempt:
    """The attempt that has workers here, or had the last ones; None before the first.

    The main thread writes it, any thread may read it. ``loop_ns`` is when the main thread was last
    seen to run; ``fences`` counts how often this node was cut off.
    """

    def __init__(self, now_ns: int) -> None:
        self.attempt: Attempt | None = None
        self.loop_ns = now_ns
        self.fences = 0

    def has_workers(self) -> bool:
        """Say whether a worker may still run."""
        return self.attempt is not None and not self.attempt.workers.all_ended

    def running_generation(self) -> int | None:
        """Return the generation whose workers may still run, None where there are none."""
        attempt = self.attempt
        return None if attempt is None or attempt.workers.all_ended else attempt.generation

    def kill_workers(self) -> None:
        """End the workers at once."""
        if self.attempt is not None:
            self.attempt.workers.kill()
