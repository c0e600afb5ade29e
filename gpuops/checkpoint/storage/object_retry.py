"""Calls to an object store that fail now and then: made again until they succeed or time is up."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from gpuops.checkpoint.types import CheckpointError
from gpuops.errors import EXIT_TRY_LATER
from gpuops.host.clock import Clock
from gpuops.scrub import scrub

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
PAUSE_MAX_S = 10.0
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
_RETRYABLE_STATUS = {408, 409, 425, 429}
_TEXT_MAX = 300


class ShortReadError(OSError):
    """The store gave fewer bytes than it said, or than there are."""


class UploadLostError(OSError):
    """The store no longer knows an upload in parts, and has no object of it either."""


class ObjectStoreUnreachableError(CheckpointError):
    """Nothing has ever answered at the address of the store."""

    exit_code = EXIT_TRY_LATER


@dataclass(slots=True)
class ServerContact:
    """Whether a store has answered, if only that it will not."""

    has_responded: bool = False


@dataclass(frozen=True, slots=True)
class Retrying:
    """Makes calls again, with growing pauses, for *deadline_s* from the first attempt of each.

    The deadline says when the last attempt may begin; how long one may take is a setting of the
    library that speaks the store's protocol. Until the store has answered once, a call takes
    *first_response_timeout_s* at most, whatever that library does meanwhile: an address at which
    there is nothing is not waited for as long as a store that is busy.
    """

    deadline_s: float
    clock: Clock
    sleep: Callable[[float], object] = time.sleep
    random: Callable[[], float] = random.random
    first_response_timeout_s: float | None = None
    contact: ServerContact = field(default_factory=ServerContact)

    def call(self, action: str, function: Callable[[], T]) -> T:
        """Return what *function* returns; *action* names it in errors.

        Raises:
            FileNotFoundError: There is no such object.
            ObjectStoreUnreachableError: Nothing has answered there yet, and did not within
                *first_answer_s*.
            CheckpointError: It failed for good, or until the time was up. One that *function*
                raises is passed on.
        """
        begin_ns = self.clock.mono_ns()
        last: Exception | None = None
        for n_attempts, pause_s in enumerate(_pauses(), start=1):
            try:
                result = self._attempt(function, self._left_s(begin_ns))
            except FileNotFoundError:
                self.contact.has_responded = True
                raise
            except _NoResponseError as exc:
                raise self._unreachable(action, last) from exc
            except CheckpointError:
                raise
            except Exception as exc:  # boundary: each protocol's library has errors of its own
                last = exc
                self.contact.has_responded = (
                    self.contact.has_responded or _status_of(exc) is not None
                )
                varied_s = pause_s * (0.5 + self.random())
                if is_final(exc) or varied_s >= self._left_s(begin_ns):
                    raise self._failure(action, exc, n_attempts) from exc
            else:
                self.contact.has_responded = True
                return result
            self.sleep(varied_s)
        raise AssertionError("pauses do not end")

    @property
    def _limit_s(self) -> float:
        if self.contact.has_responded or self.first_response_timeout_s is None:
            return self.deadline_s
        return min(self.first_response_timeout_s, self.deadline_s)

    def _left_s(self, begin_ns: int) -> float:
        return self._limit_s - (self.clock.mono_ns() - begin_ns) / 1e9

    def _attempt(self, function: Callable[[], T], left_s: float) -> T:
        """Return what *function* returns; one that nobody has answered yet is given up in time."""
        if self.contact.has_responded or self.first_response_timeout_s is None:
            return function()
        result: Future[T] = Future()
        # Not one of a pool: the process may end while it hangs.
        threading.Thread(target=_run_into_future, args=(function, result), daemon=True).start()
        try:
            return result.result(max(left_s, 0.0))
        except TimeoutError as exc:
            if result.done():
                raise
            raise _NoResponseError from exc

    def _failure(self, action: str, exc: Exception, n_attempts: int) -> CheckpointError:
        is_known = self.contact.has_responded or self.first_response_timeout_s is None
        if not is_known and not is_final(exc):
            return self._unreachable(action, exc)
        times = f" ({n_attempts} attempts)" if n_attempts > 1 else ""
        return CheckpointError(f"cannot {action}: {_error_text(exc)}{times}")

    def _unreachable(self, action: str, last: Exception | None) -> ObjectStoreUnreachableError:
        why = "" if last is None else f" ({_error_text(last)})"
        return ObjectStoreUnreachableError(
            f"cannot {action}: no answer, timed out after {self._limit_s:g} s{why}; see that the "
            "server is up and that this is its address"
        )


class _NoResponseError(Exception):
    """An attempt was given up."""


def _error_text(exc: Exception) -> str:
    return scrub(f"{type(exc).__name__}: {exc}"[:_TEXT_MAX])


def _run_into_future(function: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(function())
    except BaseException as exc:  # noqa: BLE001 boundary: it is raised where the answer is waited for
        result.set_exception(exc)


def is_final(error: BaseException) -> bool:
    """Return whether a call that raised *error* would fail again."""
    if isinstance(error, _FINAL) and not isinstance(error, UnicodeError):
        return True
    if any(name in type(error).__name__ for name in _FINAL_NAMES):
        return True
    status = _status_of(error)
    return status is not None and 400 <= status < 500 and status not in _RETRYABLE_STATUS


def is_upload_gone(error: BaseException) -> bool:
    """Return whether S3 has said of an upload in parts that there is none."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "NoSuchUpload"


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that *error*, of whatever library, was made of."""
    current: BaseException | None = error
    for _ in range(4):
        if current is None:
            break
        response = getattr(current, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "status_code", "code"):
            status = getattr(current, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
        current = current.__cause__
    return None


def _pauses() -> Iterator[float]:
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
