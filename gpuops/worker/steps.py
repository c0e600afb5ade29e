"""The step number out of an optimizer's own state, which survives a restart from a checkpoint.

Nothing here may touch a device: a ``step`` that is a CUDA tensor (fused or capturable optimizers)
is left alone and the step is unknown.
"""

from collections.abc import Mapping
from typing import Any
from weakref import ref

from gpuops.wire import STEP_UNKNOWN


class StepReader:
    """Reads one optimizer's step; decides once which parameter's state to look at.

    Of the parameters that have a step the first with the highest is chosen, because a parameter
    without gradients stays behind.
    """

    __slots__ = ("_accepted", "_chosen", "_optimizer", "_parameter")

    def __init__(self, optimizer: Any) -> None:  # noqa: ANN401 torch is not imported here
        self._optimizer = ref(optimizer)
        self._parameter: Any = None
        self._accepted: Any = None
        self._chosen = False

    def is_of(self, optimizer: object) -> bool:
        """Say whether this reader was made for *optimizer* (ids are used again after a free)."""
        return self._optimizer() is optimizer

    def read(self, optimizer: Any) -> int:  # noqa: ANN401 torch is not imported here
        """Return the optimizer's step, `STEP_UNKNOWN` where it keeps none on the host."""
        if not self._chosen:
            self._choose(optimizer)
        if self._parameter is None:
            return STEP_UNKNOWN
        state = optimizer.state.get(self._parameter)
        step = None if state is None else state.get("step")
        if step is self._accepted and step is not None:
            return int(step)
        number = _as_int(step)
        self._accepted = step if number != STEP_UNKNOWN else None
        return number

    def _choose(self, optimizer: Any) -> None:  # noqa: ANN401
        highest = STEP_UNKNOWN
        for parameter, state in optimizer.state.items():
            self._chosen = True
            step = _as_int(state.get("step")) if isinstance(state, Mapping) else STEP_UNKNOWN
            if step > highest:
                highest, self._parameter = step, parameter


def _as_int(step: object) -> int:
    if isinstance(step, int | float):
        return int(step)
    device = getattr(step, "device", None)
    if step is None or device is None or device.type != "cpu":
        return STEP_UNKNOWN
    return int(step.item())  # type: ignore[attr-defined]  # a zero-dimensional CPU tensor
