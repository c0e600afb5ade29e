"""A copy in progress, and whether what it copies was written meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch


class PendingCopy:
    """A copy that a device may still be making.

    *sources* are the tensors that are copied beside the training, by name, each with the DTensor
    whose part it is, if it is one. They share their memory with the parameters and keep it, also
    where a parameter is given other memory meanwhile; so do *kept*, copied in turn with the
    training. *mark_intact* is called before the step, where no source was written until then.
    """

    def __init__(
        self,
        event: Any = None,  # noqa: ANN401 torch's
        device: torch.device | None = None,
        sources: Sequence[tuple[str, Sequence[torch.Tensor]]] = (),
        kept: Sequence[torch.Tensor] = (),
        mark_intact: Callable[[], None] = lambda: None,
    ) -> None:
        self.event = event
        self._device = device
        self._sources = sources
        self._kept = kept
        self._mark_intact = mark_intact
        self._versions = _versions(sources)
        self._written: list[str] | None = None

    def is_done(self) -> bool:
        """Return whether the copy is complete; never waits."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait on the host until the copy is complete."""
        if self.event is not None:
            self.event.synchronize()

    def wait_before_step(self) -> None:
        """Make later work on the current stream wait for the copy."""
        self._written = self.written()
        if not self._written:
            self._mark_intact()
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)

    def written(self) -> list[str]:
        """Return the tensors that were written before `wait_before_step`, so that the copy is torn.

        torch counts each write in the tensor's version, except through ``.data``, by a fused or
        foreach kernel on a DTensor, and in a CUDA graph.
        """
        if self._written is not None:
            return self._written
        pairs = zip(self._sources, self._versions, _versions(self._sources), strict=True)
        return list(dict.fromkeys(name for (name, _), before, now in pairs if before != now))


def _versions(sources: Sequence[tuple[str, Sequence[torch.Tensor]]]) -> list[int]:
    return [
        sum(tensor._version for tensor in tensors if not tensor.is_inference())  # noqa: SLF001 documented
        for _, tensors in sources
    ]


@contextmanager
def drained_on_error(*streams: Any) -> Iterator[None]:  # noqa: ANN401 torch's
    """After an error, wait for what *streams* still copy into memory that is then given back."""
    try:
        yield
    except BaseException:  # boundary: raised again
        for stream in streams:
            with suppress(RuntimeError):  # a device that failed copies nothing any more
                stream.synchronize()
        raise
