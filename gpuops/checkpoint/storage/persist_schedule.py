"""When a state is persisted."""

from dataclasses import dataclass, field

from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.types import StateId

BACKOFF_MIN_S = 5.0
BACKOFF_MAX_S = 1800.0


@dataclass(slots=True)
class PersistSchedule:
    """Decides whether to persist the newest state now. Seconds are of a monotonic clock."""

    last_persisted: StateId | None = None  # the newest that is persisted
    in_progress: StateId | None = None
    failures: int = field(default=0)
    _started_s: float | None = None
    _not_before_s: float = 0.0

    def is_due(self, newest: StateId | None, policy: CheckpointPolicy | None, now_s: float) -> bool:
        """Return whether policy requires persisting *newest*."""
        if policy is None or policy.persist_every_s is None or not self.can_persist(newest, policy):
            return False
        since_s = None if self._started_s is None else now_s - self._started_s
        is_time = since_s is None or since_s >= policy.persist_every_s
        return is_time and now_s >= self._not_before_s

    def can_persist(self, newest: StateId | None, policy: CheckpointPolicy | None) -> bool:
        """Return whether there is a new state and a directory, and no write is in progress."""
        if newest is None or policy is None or policy.directory is None:
            return False
        return self.in_progress is None and not self.has_persisted(newest)

    def has_persisted(self, state: StateId) -> bool:
        """Return whether *state*, or a newer one, is persisted."""
        return self.last_persisted is not None and self.last_persisted >= state

    def on_start(self, state: StateId, now_s: float) -> None:
        self.in_progress = state
        self._started_s = now_s

    def on_success(self, state: StateId) -> None:
        self.in_progress = None
        self.failures = 0
        self._not_before_s = 0.0
        self.last_persisted = (
            state if self.last_persisted is None else max(self.last_persisted, state)
        )

    def on_failure(self, now_s: float) -> float:
        """Record a failure; return the seconds until the next try."""
        self.in_progress = None
        self._started_s = None
        self.failures += 1
        wait_s = min(BACKOFF_MIN_S * 2.0 ** min(self.failures - 1, 20), BACKOFF_MAX_S)
        self._not_before_s = now_s + wait_s
        return wait_s

    def on_damaged(self, state: StateId) -> None:
        """*state* is no longer in the directory: the newest is written when that is due again."""
        if self.last_persisted == state:
            self.last_persisted = None

    def rewind(self, state: StateId | None) -> None:
        """Drop states newer than the one that the job resumes from."""
        if self.last_persisted is not None and (state is None or self.last_persisted > state):
            self.last_persisted = None

    def reset(self) -> None:
        """Start over: no state of this job is known to be in the directory."""
        self.last_persisted = None
        self.failures = 0
        self._started_s = None
        self._not_before_s = 0.0
