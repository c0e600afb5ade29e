"""One rank's state at one moment: its tensors, and everything else as metadata."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

import torch

from gpuops.checkpoint.types import Shard
from gpuops.convert.tensors import local_tensor
from gpuops.convert.values import STATE_FORMAT, StateEncoder, dumps
from gpuops.worker.staging.copy_plan import (
    CapturedState,
    CopyPlan,
    SharedTensor,
    StateShape,
    plan_copy,
)
from gpuops.worker.state.adapter import AdapterSnapshot, StateAdapter
from gpuops.worker.state.expected import expected_state, read_ahead
from gpuops.worker.state.objects import read_rng
from gpuops.worker.state.optimizer import OptimizerAdapter


class StateCapturer:
    """Reads all parts of a state; plans the image again only where a shape changed.

    *node_ranks* share what they hold alike: each copies a part of it.
    """

    def __init__(
        self,
        adapters: Sequence[StateAdapter],
        shard: Shard,
        *,
        allow_pickle: bool,
        node_ranks: Sequence[int] = (),
    ) -> None:
        self._adapters = tuple(adapters)
        self._shard = shard
        self._node_ranks = node_ranks
        self._allow_pickle = allow_pickle
        self.annotations: Callable[[], Mapping[str, object]] = (
            dict  # plain values for readers of the checkpoint
        )
        self._planned: tuple[CopyPlan, StateShape] | None = None

    @torch.no_grad()
    def capture(self, step: int) -> CapturedState:
        """Return the current state; its tensors are not copied yet.

        Raises:
            CheckpointError: Something in it cannot be stored; the message says what.
        """
        return self._capture(step, [part.read() for part in self._adapters])

    @torch.no_grad()
    def plan_ahead(self, step: int) -> CopyPlan:
        """Return the plan for the state that there will be after the first step of optimizers.

        Raises:
            CheckpointError: As `capture`.
        """
        with ExitStack() as stack:
            for part in self._adapters:
                if isinstance(part, OptimizerAdapter):
                    stack.enter_context(expected_state(part.optimizer))
            return self._capture(step, [read_ahead(part) for part in self._adapters]).plan

    def stop_sharing(self) -> bool:
        """Plan images of all tensors from now on; return whether this changes anything."""
        was_sharing = len(self._node_ranks) > 1
        self._node_ranks = ()
        self._planned = None
        return was_sharing

    def _capture(self, step: int, readings: Sequence[AdapterSnapshot]) -> CapturedState:
        tensors = list(chain.from_iterable(reading.tensors for reading in readings))
        metadata_blob = self._encode_metadata(step, readings)
        plan, shape = self._plan_for(readings, tensors, len(metadata_blob))
        parts = [local_tensor(tensor) for tensor in tensors] if shape.needs_local else tensors
        if not plan.digested:
            return CapturedState(plan, parts, metadata_blob, tensors)
        return CapturedState(
            plan,
            [parts[place] for place in plan.copied],
            metadata_blob,
            [tensors[place] for place in plan.copied],
            [SharedTensor(name, parts[i], tensors[i], fenced) for name, i, fenced in plan.digested],
        )

    def _encode_metadata(self, step: int, readings: Sequence[AdapterSnapshot]) -> bytes:
        encoder = StateEncoder(allow_pickle=self._allow_pickle)
        head = {
            "format": STATE_FORMAT,
            "step": step,
            "rank": self._shard.rank,
            "world": self._shard.world,
            "torch": str(torch.__version__),
            "rng": encoder.encoder.encode(read_rng(), "rng"),
            **self.annotations(),
        }
        fragments = b",".join(
            b"%b:%b" % (dumps(part.key), reading.fragment)
            for part, reading in zip(self._adapters, readings, strict=True)
        )
        return b'%b,"parts":{%b}}' % (dumps(head)[:-1], fragments)

    def _plan_for(
        self,
        readings: Sequence[AdapterSnapshot],
        tensors: Sequence[torch.Tensor],
        metadata_bytes: int,
    ) -> tuple[CopyPlan, StateShape]:
        planned = self._planned
        if planned is not None:
            plan, shape = planned
            has_room = metadata_bytes <= plan.layout.metadata_capacity_bytes
            if has_room and shape.matches(readings, tensors):
                return planned
        plan = plan_copy(
            self._adapters, readings, tensors, self._shard, self._node_ranks, metadata_bytes
        )
        self._planned = planned = (plan, StateShape(readings, tensors))
        return planned
