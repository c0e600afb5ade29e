"""Looks for the keeper in a thread: one that is stopped, or not there yet, holds no step up."""

import threading
from collections.abc import Callable

from gpuops.checkpoint.keeper import Keeper


class Search:
    """One try to connect, with *find*, which returns a keeper or raises."""

    def __init__(self, find: Callable[[], Keeper]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._found: Keeper | None = None
        self._error: Exception | None = None
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="gpuops-find-keeper", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Say whether there is a result; never waits."""
        return not self._thread.is_alive()

    def result(self) -> Keeper:
        """Return what was found, or raise what kept it; only once it is done."""
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found

    def cancel(self) -> None:
        """Want no result any more; never waits. A line that is found later is closed."""
        with self._lock:
            self._is_wanted = False
            found, self._found = self._found, None
        if found is not None:
            found.close()

    def _run(self) -> None:
        try:
            found = self._find()
        except Exception as exc:  # noqa: BLE001 boundary: whoever asks for the result gets it
            self._error = exc
            return
        with self._lock:
            if self._is_wanted:
                self._found = found
                return
        found.close()
