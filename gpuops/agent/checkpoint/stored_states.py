"""Lists the directory of a job's states, in a thread."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuops.agent.checkpoint.messages import StoredStates
from gpuops.checkpoint.types import CheckpointError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StoredStatesLookup:
    """Looks at a directory in a thread of its own, again where that failed; why is said once."""

    act: Callable[[str], StoredStates]
    say: Callable[[str], None]
    _told: str = ""
    _directory: str | None = None
    _found: StoredStates | None = None
    _thread: threading.Thread | None = field(default=None)

    def of(self, directory: str | None) -> StoredStates | None:
        """Return what *directory* has, None while that is not known."""
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

    def anew(self, directory: str | None, within_s: float) -> StoredStates | None:
        """Return what *directory* has by now, None where that takes longer than *within_s*."""
        self._found = None
        found = self.of(directory)
        if found is None and self._thread is not None:
            self._thread.join(within_s)
            found = self._found
        return found

    def _run(self, directory: str) -> None:
        try:
            found = self.act(directory)
        except CheckpointError as exc:
            if str(exc) != self._told:
                self._told = str(exc)
                self.say(f"{exc}; the ranks wait until it is known which state to load")
            return
        except Exception:  # boundary: whatever a file system raises, the ranks wait for word
            log.exception("the checkpoints in %s cannot be listed", directory)
            return
        if directory == self._directory:
            self._found = found
