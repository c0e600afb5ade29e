"""Which states the persistent directory of a job has, listed in a thread."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuops.agent.checkpoint.messages import STORED_MAX, StoredStates
from gpuops.checkpoint.types import CheckpointError

log = logging.getLogger(__name__)


def survey(directory: str) -> StoredStates:
    """Return the complete states in *directory*, the newest first.

    Raises:
        CheckpointError: It cannot be read, or has only damaged states.
    """
    from gpuops.checkpoint.storage.address import open_store  # only where a run checkpoints

    found = open_store(directory).scan()
    if found.damaged and not found.states:
        first = found.damaged[0]
        raise CheckpointError(f"{first.name} {first.condition}: {first.why}")
    newest = sorted(((one.state, one.manifest.world) for one in found.states), reverse=True)
    epochs = [state.epoch for state, _world in newest]
    return StoredStates(tuple(newest[:STORED_MAX]), max(epochs, default=-1))


@dataclass(slots=True)
class StoredStatesLookup:
    """Lists a directory in a thread with *survey*, and retries; *warn* gets each error once."""

    survey: Callable[[str], StoredStates]
    warn: Callable[[str], None]
    _last_error: str = ""
    _directory: str | None = None
    _found: StoredStates | None = None
    _thread: threading.Thread | None = field(default=None)

    def of(self, directory: str | None) -> StoredStates | None:
        """Return the states in *directory*, None while that is not known."""
        if directory is None:
            return StoredStates()
        if directory != self._directory:
            self._directory, self._found = directory, None
        if self._found is None and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._run, args=(directory,), name="gpuops-ckpt-survey", daemon=True
            )
            self._thread.start()
            self._thread.join(0.05)
        return self._found

    def refresh(self, directory: str | None, within_s: float) -> StoredStates | None:
        """List *directory* again; return None where that takes longer than *within_s*."""
        self._found = None
        found = self.of(directory)
        if found is None and self._thread is not None:
            self._thread.join(within_s)
            found = self._found
        return found

    def _run(self, directory: str) -> None:
        try:
            found = self.survey(directory)
        except CheckpointError as exc:
            if str(exc) != self._last_error:
                self._last_error = str(exc)
                self.warn(f"{exc}; the ranks wait until it is known which state to load")
            return
        except Exception:  # boundary: whatever a file system raises, the listing is retried
            log.exception("the checkpoints in %s cannot be listed", directory)
            return
        if directory == self._directory:
            self._found = found
