"""The interface of a part of a state (a model, an optimizer, any object with a state).

A part is saved as tensors, which go into the image under their names, and a JSON fragment for
the rest. It is restored in two phases, so that nothing is changed before all of it is known to fit:
`StateAdapter.plan_load` requests the tensors, and returns what to do once they are filled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from gpuops.checkpoint.image import TensorSpec
from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.tensors import DTYPES, is_dtensor
from gpuops.convert.values import DEPTH_MAX, ValueDecoder

if TYPE_CHECKING:  # it imports this module
    from gpuops.worker.state.saved_state import SavedState

FinishLoad = Callable[[], None]


class AdapterSnapshot(NamedTuple):
    """The current state of a part.

    ``names`` is the same object as last time as long as nothing was added, removed or renamed.
    ``fragment`` is JSON. ``n_optimizer_owned``: the first so many tensors are changed only by the
    given optimizers, so that they can be copied until the next step.
    """

    names: tuple[str, ...]
    tensors: Sequence[torch.Tensor]
    fragment: bytes
    n_optimizer_owned: int = 0


class StateAdapter(Protocol):
    """One object that has a state."""

    key: str

    def read(self) -> AdapterSnapshot:
        """Return the current state; CheckpointError where some of it cannot be stored."""
        ...

    def plan_load(self, source: "SavedState") -> FinishLoad:
        """Request tensors from *source*; return the function that completes the load.

        Raises:
            CheckpointError: The saved state does not fit this part; the message says how.
        """
        ...


class NameCache:
    """Returns the same object for equal names, so that a change of names shows by identity."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def intern(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return *names*, or the last object where that is equal."""
        if names != self._names:
            self._names = names
        return self._names


class StateDecoder:
    """Decodes values, with tensors: those of *current* at the same path, else new ones.

    New ones are sharded like *like*, where that is a DTensor of the same shape. Their data are
    there once the source is loaded, not before.
    """

    def __init__(
        self,
        source: "SavedState",
        current: object = None,
        *,
        allow_pickle: bool,
        like: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._source = source
        self._like = like
        self._device = device or torch.device("cpu")
        self._current: dict[str, torch.Tensor | None] = {}
        _index_tensors(current, "", self._current)
        self._root = ""
        self._decoder = ValueDecoder(self._to_tensor, allow_pickle=allow_pickle)

    def decode(self, value: object, root: str, path: str | None = None) -> Any:  # noqa: ANN401
        """Decode *value*.

        It was stored under *path*; *current* is the counterpart of what was stored under *root*.
        """
        self._root = root
        return self._decoder.decode(value, path or root)

    def _to_tensor(self, reference: object, path: str) -> torch.Tensor:
        name, dtype_name = (
            reference if isinstance(reference, list) and len(reference) == 2 else (reference, None)
        )
        spec = self._source.spec(name) if isinstance(name, str) else None
        if spec is None or not isinstance(name, str):
            raise CorruptError(f"{path[:200]} is the tensor {name!r:.200}, which is not there")
        dtype = getattr(torch, str(dtype_name), None) if dtype_name else DTYPES[spec.dtype]
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(f"{path[:200]} has the dtype {dtype_name!r:.80}, unknown to torch")
        target = self._current.get(name.removeprefix(self._root))
        if (
            target is None
            or target.dtype is not dtype
            or tuple(target.shape) != logical_shape(spec, dtype)
            or not self._source.can_fill(name, target)
        ):
            target = allocate_like(spec, self._like, dtype, self._device)
        self._source.request(name, target)
        return target


def logical_shape(spec: TensorSpec, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a tensor of *dtype* that is stored in an image as *spec*."""
    return spec.global_shape[:-1] if dtype is torch.complex128 else spec.global_shape


def _index_tensors(value: object, path: str, found: dict[str, torch.Tensor | None]) -> None:
    """Collect the tensors in *value* into *found*, by paths as those of a `ValueEncoder`.

    An ambiguous path, of two tensors, is left out.
    """
    if path.count(".") > DEPTH_MAX:
        return
    if isinstance(value, torch.Tensor):
        found[path] = None if path in found else value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _index_tensors(item, f"{path}.{key}", found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _index_tensors(item, f"{path}.{index}", found)


def allocate_like(
    spec: TensorSpec,
    like: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    dims: Sequence[int | None] | None = None,
) -> torch.Tensor:
    """Return a new tensor for *spec*.

    It is a DTensor on the mesh of *like*, where that is one of the same global shape; or if *dims*
    has the dimension that each dimension of the mesh shards (None: none).

    Raises:
        CheckpointError: It was one part of a sharded tensor, and *like* is none or of another
            shape: the sharding of the new one is unknown.
    """
    shape = logical_shape(spec, dtype)
    has_same_shape = tuple(like.shape) == shape and bool(shape) if like is not None else False
    made: torch.Tensor
    if is_dtensor(like) and dims is not None:
        from torch.distributed.tensor import Replicate, Shard, empty

        placements = [Replicate() if dim is None else Shard(int(dim)) for dim in dims]
        made = empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)
        return made
    if is_dtensor(like) and has_same_shape:
        from torch.distributed.tensor import DTensor

        made = DTensor.from_local(
            torch.empty_like(like.to_local(), dtype=dtype, device=device, requires_grad=False),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return made
    if spec.shape != spec.global_shape and not has_same_shape:
        raise CheckpointError(
            f"{spec.name} is one part of a tensor of shape {spec.global_shape}, and its target "
            "has no known sharding: create it before restoring"
        )
    return torch.empty(shape, dtype=dtype, device=device)
