"""Calls to an object store that fail now and then: made again until they succeed or time is up."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gpuops.checkpoint.states import CheckpointError
from gpuops.host.clock import Clock
from gpuops.scrub import scrub

T = TypeVar("T")

FIRST_WAIT_S = 0.2
WAIT_MAX_S = 10.0
# Asking again does not make these go away; of the other answers of the kind 4xx neither.
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
    MemoryError,
)
_FINAL_NAMES = ("Credential", "Authentication", "Forbidden")
_TRY_AGAIN_STATUS = {408, 409, 425, 429}
_TEXT_MAX = 300


class ShortAnswerError(OSError):
    """The store gave fewer bytes than it said, or than there are."""


@dataclass(frozen=True, slots=True)
class Retrying:
    """Makes calls again, with growing pauses, for *deadline_s* from the first attempt of each.

    The deadline says when the last attempt may begin; how long one may take is a setting of the
    library that speaks the store's protocol.
    """

    deadline_s: float
    clock: Clock
    wait: Callable[[float], object] = time.sleep
    random: Callable[[], float] = random.random

    def call(self, doing: str, function: Callable[[], T]) -> T:
        """Return what *function* returns; *doing* names it in errors.

        Raises:
            FileNotFoundError: There is no such object.
            CheckpointError: It failed for good, or until the time was up. One that *function*
                raises is passed on.
        """
        end_ns = self.clock.mono_ns() + round(self.deadline_s * 1e9)
        for n_attempts, pause_s in enumerate(_pauses(), start=1):
            try:
                return function()
            except (CheckpointError, FileNotFoundError):
                raise
            except Exception as exc:  # boundary: each protocol's library has errors of its own
                varied_s = pause_s * (0.5 + self.random())
                left_s = (end_ns - self.clock.mono_ns()) / 1e9
                if is_final(exc) or varied_s >= left_s:
                    said = scrub(f"{type(exc).__name__}: {exc}"[:_TEXT_MAX])
                    times = f" ({n_attempts} attempts)" if n_attempts > 1 else ""
                    raise CheckpointError(f"cannot {doing}: {said}{times}") from exc
            self.wait(varied_s)
        raise AssertionError("pauses do not end")


def is_final(error: BaseException) -> bool:
    """Return whether a call that raised *error* would fail again."""
    if isinstance(error, _FINAL) and not isinstance(error, UnicodeError):
        return True
    if any(word in type(error).__name__ for word in _FINAL_NAMES):
        return True
    status = _status_of(error)
    return status is not None and 400 <= status < 500 and status not in _TRY_AGAIN_STATUS


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that *error*, of whatever library, was made of."""
    seen: BaseException | None = error
    for _ in range(4):
        if seen is None:
            break
        response = getattr(seen, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "status_code", "code"):
            status = getattr(seen, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
        seen = seen.__cause__
    return None


def _pauses() -> Iterator[float]:
    pause_s = FIRST_WAIT_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, WAIT_MAX_S)
