"""One caller of NVML: its current call, its results, and its errors."""

import threading
import time
from collections.abc import Callable
from typing import Any

from gpuops.host.nvml.facts import GPU_IS_LOST, NOT_SUPPORTED, UNREADABLE, CallError
from gpuops.host.nvml.plausible import BOUNDS, FLAG, Bounds, why_not

_FUNCTION_NOT_FOUND = 13
_ARGUMENT_VERSION_MISMATCH = 25
_DEPRECATED = 26
# The codes of a driver that does not have, or no longer has, a call.
UNSUPPORTED = {NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED}


class GpuLostError(Exception):
    """The GPU is lost: further calls return nothing, and can hang."""


class NvmlRefused(Exception):  # noqa: N818 a result of NVML, not an error of gpuops
    """NVML returned an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class NvmlCaller:
    """Calls NVML in one thread; another may read its state at any time.

    ``found`` holds values by their field of `NvmlGpu`, as ``"temperature.core_c"``. ``call`` is its
    last call, made at ``since_s`` (monotonic) in the thread ``thread_id`` of this process; it is
    still in it unless it has ``finished`` all its calls. *until_s* (monotonic): when the results
    are collected; *pause* waits.
    """

    def __init__(
        self,
        nvml: Any,  # noqa: ANN401 without types
        handle: Any = None,  # noqa: ANN401 as above
        *,
        until_s: float = 0.0,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.nvml = nvml
        self.handle = handle
        self.pause = pause
        self._until_s = until_s
        self.found: dict[str, Any] = {}
        self.errors: list[CallError] = []
        self.unsupported: list[str] = []
        self.call = "no call yet"
        self.since_s = time.monotonic()
        self.thread_id = 0
        self.finished = False

    def left_s(self) -> float:
        """Return the seconds until the results are collected."""
        return self._until_s - time.monotonic()

    def store(
        self,
        field: str,
        call: str,
        *args: object,
        instead: Callable[[], Any] | None = None,
        made: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        """Store the result of *call*, converted by *made*, as *field*.

        *instead* is called if the driver does not have *call*, and returns its result.

        Raises:
            GpuLostError: NVML reports it.
        """
        answer = self.query(call, *args, instead=instead, made=made)
        if answer is not None:
            self.keep(field, call, answer)

    def keep(self, field: str, call: str, value: Any) -> None:  # noqa: ANN401 whatever the call gives
        """Store *value*, a result of *call*, as *field*, unless it is no plausible number."""
        bounds = BOUNDS.get(field)
        known = value if isinstance(value, str | bool) else self.known(call, value, bounds)
        if known is not None:
            self.found[field] = bool(known) if bounds is FLAG else known

    def known(self, call: str, value: Any, bounds: Bounds | None) -> Any:  # noqa: ANN401 as above
        """Return *value*, a member of the result of *call*; None if it is no plausible number.

        Why it is none is noted.
        """
        problem = None if value is None else why_not(value, bounds)
        if problem is None:
            return value
        self.note(call, NvmlRefused(*problem))
        return None

    def query(
        self,
        call: str,
        *args: object,
        instead: Callable[[], Any] | None = None,
        made: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:  # noqa: ANN401 whatever the call gives
        """Return what `store` would store; None after an error, which is noted.

        Raises:
            GpuLostError: NVML reports it.
        """
        try:
            return made(self.call_nvml(call, self.handle, *args))
        except NvmlRefused as refused:
            if instead is not None and refused.code in UNSUPPORTED:
                return instead()
            self.note(call, refused)
        except ValueError as exc:
            # Strings in structures are decoded when they are read.
            self.note(call, NvmlRefused(UNREADABLE, f"{type(exc).__name__}: {exc}"))
        return None

    def call_nvml(self, call: str, *args: object) -> Any:  # noqa: ANN401 whatever the call gives
        """Return what pynvml's function *call* returns for *args*; may never return.

        Raises:
            NvmlRefused: NVML's code and text, or `UNREADABLE` if pynvml cannot decode its answer.
        """
        function = getattr(self.nvml, call, None)
        if function is None:
            raise NvmlRefused(_FUNCTION_NOT_FOUND, "this pynvml does not have it")
        self.thread_id = threading.get_native_id()
        self.since_s = time.monotonic()
        self.call = call
        try:
            answer = function(*args)
        except self.nvml.NVMLError as exc:
            raise NvmlRefused(exc.value, str(exc)) from exc
        except self.nvml.NVMLLibraryMismatchError as exc:
            # pynvml's error if the driver lacks the newest version of a function.
            raise NvmlRefused(_FUNCTION_NOT_FOUND, str(exc)) from exc
        except ValueError as exc:
            # Corrupt strings of a faulty GPU: UnicodeDecodeError.
            raise NvmlRefused(UNREADABLE, f"{type(exc).__name__}: {exc}") from exc
        if isinstance(answer, int) and (problem := why_not(answer, None)) is not None:
            raise NvmlRefused(*problem)
        return answer

    def note(self, call: str, refused: NvmlRefused) -> None:
        """Record the error of *call*.

        Raises:
            GpuLostError: The error is that the GPU is lost.
        """
        if refused.code in UNSUPPORTED:
            if call not in self.unsupported:
                self.unsupported.append(call)
            return
        self.errors.append(CallError(call, refused.code, refused.text))
        if refused.code == GPU_IS_LOST:
            raise GpuLostError(refused.text)
