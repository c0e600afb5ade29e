"""One rank's state at one moment: its tensors, how they stand in an image, and all else as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, eq, is_

import torch

from gpuops.checkpoint.image import ImageLayout, plan_image
from gpuops.checkpoint.states import Shard
from gpuops.worker.checkpointer.optimizer_part import OptimizerPart
from gpuops.worker.checkpointer.part import Part, Reading, Sink
from gpuops.worker.checkpointer.replicated import replicated_by_name
from gpuops.worker.checkpointer.rng import read_rng
from gpuops.worker.checkpointer.tensors import Places, check, is_carried, is_dtensor, local_of
from gpuops.worker.checkpointer.values import dumps

FORMAT = 1
EXTRA_STEP_BYTES = 64 * 1024

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class Capture:
    """What is to be copied into a slot of *layout*.

    ``tensors`` are this rank's parts, in the order of ``plan.names``; those of ``plan.fenced`` are
    changed by the optimizers alone.
    """

    plan: "CopyPlan"
    tensors: Sequence[torch.Tensor]
    extra: bytes


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The layout of an image, and which tensor of a capture goes where in it.

    ``device`` is that of the tensors that are not on the host, None where all are.
    """

    layout: ImageLayout
    names: tuple[str, ...]
    device: torch.device | None
    fenced: tuple[int, ...]
    free: tuple[int, ...]


class Capturer:
    """Reads all parts of a state; plans the image anew only where something changed its shape."""

    def __init__(self, parts: Sequence[Part], shard: Shard, *, allow_pickle: bool) -> None:
        self._parts = tuple(parts)
        self._shard = shard
        self._allow_pickle = allow_pickle
        self.beside: Callable[[], Mapping[str, object]] = dict  # plain values for who looks at it
        self._plan: CopyPlan | None = None
        self._names: list[tuple[str, ...]] = []
        self._shapes: list[object] = []
        self._types: list[type] = []
        self._places: list[object] = []
        self._dtypes: list[torch.dtype] = []
        self._devices: list[object] = []
        self._has_indirect = False

    @torch.no_grad()
    def capture(self, step: int) -> Capture:
        """Return the state as it is now; its tensors are not copied yet.

        Raises:
            CheckpointError: Something in it cannot be stored; says which.
        """
        readings = [part.read() for part in self._parts]
        tensors = list(chain.from_iterable(reading.tensors for reading in readings))
        extra = self._extra(step, readings)
        if not self._is_planned(readings, tensors) or not self._has_room(extra):
            self._make_plan(readings, tensors, len(extra))
        assert self._plan is not None
        if self._has_indirect:
            tensors = [local_of(tensor) for tensor in tensors]
        return Capture(self._plan, tensors, extra)

    def _extra(self, step: int, readings: Sequence[Reading]) -> bytes:
        sink = Sink(allow_pickle=self._allow_pickle)
        head = {
            "format": FORMAT,
            "step": step,
            "rank": self._shard.rank,
            "world": self._shard.world,
            "torch": str(torch.__version__),
            "rng": sink.encoder.encode(read_rng(), "rng"),
            **self.beside(),
        }
        fragments = b",".join(
            b"%b:%b" % (dumps(part.key), reading.fragment)
            for part, reading in zip(self._parts, readings, strict=True)
        )
        return b'%b,"parts":{%b}}' % (dumps(head)[:-1], fragments)

    def _has_room(self, extra: bytes) -> bool:
        return self._plan is not None and len(extra) <= self._plan.layout.extra_capacity_bytes

    def _is_planned(self, readings: Sequence[Reading], tensors: list[torch.Tensor]) -> bool:
        if self._plan is None or len(self._names) != len(readings):
            return False
        if any(a.names is not b for a, b in zip(readings, self._names, strict=True)):
            return False
        # Nothing is kept of what is compared: many thousand new objects would have Python look for
        # garbage in all of the job's memory, again and again.
        return (
            len(tensors) == len(self._shapes)
            and all(map(eq, map(_SHAPE, tensors), self._shapes))
            and all(map(is_, map(_DTYPE, tensors), self._dtypes))
            and all(map(is_, map(type, tensors), self._types))
            and _first_devices(readings) == self._devices
            and (not self._places or _places(tensors) == self._places)
        )

    def _make_plan(
        self, readings: Sequence[Reading], tensors: list[torch.Tensor], n_extra: int
    ) -> None:
        names = tuple(name for reading in readings for name in reading.names)
        for name, tensor in zip(names, tensors, strict=True):
            check(tensor, name)
        places = Places()
        specs = [
            places.spec_of(tensor, local_of(tensor), name)
            for name, tensor in zip(names, tensors, strict=True)
        ]
        room = -(-2 * n_extra // EXTRA_STEP_BYTES) * EXTRA_STEP_BYTES
        alike = replicated_by_name(self._parts, names, tensors, self._shard.rank)
        layout = plan_image(self._shard, specs, room, alike)
        fenced = self._fenced(readings, tensors)
        self._plan = CopyPlan(
            layout,
            names,
            next((tensor.device for tensor in tensors if tensor.is_cuda), None),
            tuple(i for i, is_fenced in enumerate(fenced) if is_fenced),
            tuple(i for i, is_fenced in enumerate(fenced) if not is_fenced),
        )
        self._names = [reading.names for reading in readings]
        self._shapes = list(map(_SHAPE, tensors))
        self._dtypes = list(map(_DTYPE, tensors))
        self._devices = _first_devices(readings)
        self._types = list(map(type, tensors))
        self._places = _places(tensors)
        self._has_indirect = any(
            is_dtensor(tensor) or is_carried(tensor.dtype) for tensor in tensors
        )

    def _fenced(self, readings: Sequence[Reading], tensors: list[torch.Tensor]) -> list[bool]:
        owned = {
            id(each)
            for part in self._parts
            if isinstance(part, OptimizerPart)
            for group in part.optimizer.param_groups
            for each in group["params"]
        }
        fenced = [id(tensor) in owned for tensor in tensors]
        begin = 0
        for reading in readings:
            fenced[begin : begin + reading.n_fenced] = [True] * reading.n_fenced
            begin += len(reading.tensors)
        return fenced


def _first_devices(readings: Sequence[Reading]) -> list[object]:
    """Return where the parts are; a part is moved as a whole."""
    return [reading.tensors[0].device if reading.tensors else None for reading in readings]


def _places(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [
        (tensor.placements, tensor.to_local().shape) for tensor in tensors if is_dtensor(tensor)
    ]
