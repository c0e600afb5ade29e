"""Calls to an object store that fail now and then: made again until they succeed or time is up."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from gpuops.checkpoint.states import CheckpointError
from gpuops.errors import EXIT_TRY_LATER
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


class UnreachableError(CheckpointError):
    """Nothing has ever answered at the address of the store."""

    exit_code = EXIT_TRY_LATER


@dataclass(slots=True)
class Contact:
    """Whether a store has answered, if only that it will not."""

    is_made: bool = False


@dataclass(frozen=True, slots=True)
class Retrying:
    """Makes calls again, with growing pauses, for *deadline_s* from the first attempt of each.

    The deadline says when the last attempt may begin; how long one may take is a setting of the
    library that speaks the store's protocol. Until the store has answered once, a call takes
    *first_answer_s* at most, whatever that library does meanwhile: an address at which there is
    nothing is not waited for as long as a store that is busy.
    """

    deadline_s: float
    clock: Clock
    wait: Callable[[float], object] = time.sleep
    random: Callable[[], float] = random.random
    first_answer_s: float | None = None
    contact: Contact = field(default_factory=Contact)

    def call(self, doing: str, function: Callable[[], T]) -> T:
        """Return what *function* returns; *doing* names it in errors.

        Raises:
            FileNotFoundError: There is no such object.
            UnreachableError: Nothing has answered there yet, and did not within *first_answer_s*.
            CheckpointError: It failed for good, or until the time was up. One that *function*
                raises is passed on.
        """
        begin_ns = self.clock.mono_ns()
        last: Exception | None = None
        for n_attempts, pause_s in enumerate(_pauses(), start=1):
            try:
                result = self._attempt(function, self._left_s(begin_ns))
            except FileNotFoundError:
                self.contact.is_made = True
                raise
            except _NoAnswerError as exc:
                raise self._unreachable(doing, last) from exc
            except CheckpointError:
                raise
            except Exception as exc:  # boundary: each protocol's library has errors of its own
                last = exc
                self.contact.is_made = self.contact.is_made or _status_of(exc) is not None
                varied_s = pause_s * (0.5 + self.random())
                if is_final(exc) or varied_s >= self._left_s(begin_ns):
                    raise self._told(doing, exc, n_attempts) from exc
            else:
                self.contact.is_made = True
                return result
            self.wait(varied_s)
        raise AssertionError("pauses do not end")

    @property
    def _limit_s(self) -> float:
        if self.contact.is_made or self.first_answer_s is None:
            return self.deadline_s
        return min(self.first_answer_s, self.deadline_s)

    def _left_s(self, begin_ns: int) -> float:
        return self._limit_s - (self.clock.mono_ns() - begin_ns) / 1e9

    def _attempt(self, function: Callable[[], T], left_s: float) -> T:
        """Return what *function* returns; one that nobody has answered yet is given up in time."""
        if self.contact.is_made or self.first_answer_s is None:
            return function()
        answer: Future[T] = Future()
        # Not one of a pool: the process may end while it hangs.
        threading.Thread(target=_answer, args=(function, answer), daemon=True).start()
        try:
            return answer.result(max(left_s, 0.0))
        except TimeoutError as exc:
            if answer.done():
                raise
            raise _NoAnswerError from exc

    def _told(self, doing: str, exc: Exception, n_attempts: int) -> CheckpointError:
        is_known = self.contact.is_made or self.first_answer_s is None
        if not is_known and not is_final(exc):
            return self._unreachable(doing, exc)
        times = f" ({n_attempts} attempts)" if n_attempts > 1 else ""
        return CheckpointError(f"cannot {doing}: {_said(exc)}{times}")

    def _unreachable(self, doing: str, last: Exception | None) -> UnreachableError:
        why = "" if last is None else f" ({_said(last)})"
        return UnreachableError(
            f"cannot {doing}: no answer, timed out after {self._limit_s:g} s{why}; see that the "
            "server is up and that this is its address"
        )


class _NoAnswerError(Exception):
    """An attempt was given up."""


def _said(exc: Exception) -> str:
    return scrub(f"{type(exc).__name__}: {exc}"[:_TEXT_MAX])


def _answer(function: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(function())
    except BaseException as exc:  # noqa: BLE001 boundary: it is raised where the answer is waited for
        answer.set_exception(exc)


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
