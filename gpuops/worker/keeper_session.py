"""The keeper that one rank saves to: connected, searched for again, or given up."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.rank_client import RankKeeperClient
from gpuops.checkpoint.types import CheckpointError, KeeperError
from gpuops.worker.keeper_finder import KeeperSearch, NoKeeperError

_log = logging.getLogger(__name__)

RETRY_S_MIN = 30.0
RETRY_S_MAX = 600.0
# The agent soon replaces a keeper that is gone; searching for it costs only a thread.
SEARCH_S_MIN = 0.5
SEARCH_S_MAX = 30.0
POLL_S = 0.1


class KeeperSession:
    """The keeper, and the ``error`` for which nothing is saved, None where there is none.

    A keeper that is gone is searched for in the background, one that refused is asked again later
    on the same connection, since a rank that reconnects would count as a restarted job; another
    error is permanent. *connect* returns the keeper or raises KeeperError; it is called with
    ``is_reconnect=True`` while the rank trains.
    """

    def __init__(
        self,
        connect: Callable[..., RankKeeperClient],
        *,
        is_rank_zero: bool,
        clock_s: Callable[[], float],
    ) -> None:
        self.keeper: RankKeeperClient | None = None
        self.error: Exception | None = None
        self.retry_at_s: float | None = None
        self._connect = connect
        self._is_rank_zero = is_rank_zero
        self._clock_s = clock_s
        self._search: KeeperSearch | None = None
        self._retry_s = RETRY_S_MIN
        self._search_s = SEARCH_S_MIN
        self._warned: set[str] = set()

    def connect(self) -> None:
        """Find the keeper; without one nothing is saved, which is logged once."""
        try:
            self.keeper = self._connect()
        except CheckpointError as exc:
            self.turn_off(exc)
        else:
            self._turn_on()

    def reconnect(self, within_s: float) -> RankKeeperClient:
        """Return the replacement of a keeper that is gone; waits for it.

        Raises:
            KeeperGoneError: There is none within *within_s* seconds.
            KeeperError: It refuses this rank.
        """
        end_s = self._clock_s() + within_s
        self._disconnect()
        while True:
            try:
                self.keeper = keeper = self._connect()
            except KeeperGoneError:
                if self._clock_s() >= end_s:
                    raise
            else:
                self._turn_on()
                return keeper
            time.sleep(POLL_S)

    def is_on(self) -> bool:
        """Return whether something can be saved now; look for the keeper where it is gone."""
        if self.error is None:
            return True
        if self._search is not None:
            return self._take_search_result(self._search)
        if self.retry_at_s is None or self._clock_s() < self.retry_at_s:
            return False
        if self.keeper is None:
            self._search = KeeperSearch(partial(self._connect, is_reconnect=True))
            return False
        self._turn_on()
        return True

    def turn_off(self, exc: Exception) -> None:
        """Save nothing for now, and log why once."""
        self.error = exc
        is_transient = isinstance(exc, KeeperError) and not isinstance(exc, NoKeeperError)
        if not is_transient or isinstance(exc, KeeperGoneError):
            self._disconnect()
        self.retry_at_s = self._clock_s() + self._next_wait_s(exc) if is_transient else None
        kind = type(exc).__name__
        if kind in self._warned or (isinstance(exc, NoKeeperError) and not self._is_rank_zero):
            return  # logged already, or equal on all ranks and logged by the first
        self._warned.add(kind)
        what = (
            "no checkpoints are saved for now, and saving is tried again"
            if is_transient
            else "no checkpoints are saved from now on, and training continues"
        )
        _log.warning("%s: %s", what, error_text(exc))

    def on_saved(self) -> None:
        """Record that the keeper works: the next search begins soon."""
        self._retry_s = RETRY_S_MIN
        self._search_s = SEARCH_S_MIN

    def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
        self._disconnect()

    def _turn_on(self) -> None:
        self.error = None
        self.retry_at_s = None

    def _next_wait_s(self, exc: Exception) -> float:
        """Return how long to wait after the error *exc*: each time longer."""
        if isinstance(exc, KeeperGoneError):
            wait_s, self._search_s = self._search_s, min(2 * self._search_s, SEARCH_S_MAX)
        else:
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_S_MAX)
        return wait_s

    def _take_search_result(self, search: KeeperSearch) -> bool:
        """Use the result of a search, if it is done; never wait."""
        if not search.is_done():
            return False
        self._search = None
        try:
            self.keeper = search.result()
        except Exception as exc:  # noqa: BLE001 boundary: an error here must not stop the training
            self.turn_off(exc)
            return False
        self._turn_on()
        if self._is_rank_zero:
            _log.warning("there is a keeper again: checkpoints are saved from now on")
        self._warned.discard(KeeperGoneError.__name__)
        return True

    def _disconnect(self) -> None:
        keeper, self.keeper = self.keeper, None
        if keeper is not None:
            with suppress(Exception):  # boundary: it is not used any more
                keeper.close()


def error_text(exc: Exception) -> str:
    """Return the message of an error, with its type where it is not ours."""
    return str(exc) if isinstance(exc, CheckpointError) else f"{type(exc).__name__}: {exc}"
