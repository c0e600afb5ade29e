"""What a part of a state (a model, an optimizer, anything with a state) gives and takes.

A part is saved as tensors, which go into the image under their names, and a fragment of JSON for
all else. It is restored in two moves, so that nothing is changed before all of it is known to fit:
`Part.aim` says which tensors it wants, and returns what is left to do once they are filled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gpuops.checkpoint.image import TensorSpec
from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.tensors import DTYPES, is_dtensor
from gpuops.convert.values import DEPTH_MAX, ValueDecoder

FinishLoad = Callable[[], None]


class AdapterSnapshot(NamedTuple):
    """A part as it is now.

    ``names`` is the same object as last time as long as nothing was added, removed or renamed.
    ``fragment`` is JSON. ``n_optimizer_owned``: that many of the first tensors are changed by the
    optimizers that were given and by nobody else, so that they can be copied until the next step.
    """

    names: tuple[str, ...]
    tensors: Sequence[torch.Tensor]
    fragment: bytes
    n_optimizer_owned: int = 0


class LoadSource(Protocol):
    """A saved state, of which parts take what they want.

    ``is_own``: it is what this very rank saved, in a world of the same size.
    """

    is_own: bool

    def spec(self, name: str) -> TensorSpec | None:
        """Return the tensor of that name in the image of the lowest rank that has it."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Return the names of what this rank had that begin so; of all ranks in another world."""
        ...

    def request(self, name: str, target: torch.Tensor) -> None:
        """Have *target* filled with what is saved as *name*.

        Raises:
            CheckpointError: There is none, or it is of another shape or dtype; or *target* is to
                be filled with something else already.
        """
        ...

    def can_fill(self, name: str, target: torch.Tensor) -> bool:
        """Say whether *target* is not to be filled with something else than *name* already."""
        ...

    def fragments(self, key: str) -> list[Any]:
        """Return what was saved of that part beside tensors: of this rank, or of all, in order."""
        ...


class StateAdapter(Protocol):
    """One thing that has a state."""

    key: str

    def read(self) -> AdapterSnapshot:
        """Return the state as it is now; CheckpointError where some of it cannot be stored."""
        ...

    def plan_load(self, source: LoadSource) -> FinishLoad:
        """Say to *source* what is wanted; return what puts it in place.

        Raises:
            CheckpointError: What is saved is not what this part can take; says what.
        """
        ...


class NameCache:
    """Returns the same object for equal names, so that a change of names shows by identity."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def intern(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return *names*, or what was returned last where that is equal."""
        if names != self._names:
            self._names = names
        return self._names


class StateDecoder:
    """Gives values their tensors back: those of *current* at the same path, else new ones.

    New ones are sharded as *like*, where that is a DTensor of the same shape. They have their data
    once the source is loaded, not before.
    """

    def __init__(
        self,
        source: LoadSource,
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
        """Return what *value* stands for.

        It was stored under *path*, and *current* stands for what was stored under *root*.
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
        is_fit = target is not None and _fits(target, spec, dtype)
        if target is None or not is_fit or not self._source.can_fill(name, target):
            target = allocate_like(spec, self._like, dtype, self._device)
        self._source.request(name, target)
        return target


def _fits(target: torch.Tensor, spec: TensorSpec, dtype: torch.dtype) -> bool:
    return target.dtype is dtype and tuple(target.shape) == logical_shape(spec, dtype)


def logical_shape(spec: TensorSpec, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the whole shape of a tensor of *dtype* that stands in an image as *spec*."""
    return spec.global_shape[:-1] if dtype is torch.complex128 else spec.global_shape


def _index_tensors(value: object, path: str, found: dict[str, torch.Tensor | None]) -> None:
    """Put the tensors in *value* into *found*, by paths as those of an `ValueEncoder`.

    Where a path leads to two, nobody can tell which one is meant: it leads to none.
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
    """Return a new tensor for what *spec* says.

    It is a DTensor on the mesh of *like*, where that is one, if the whole shape is the same; or if
    *dims* says which dimension each dimension of the mesh shards (None: none).

    Raises:
        CheckpointError: It was one part of a sharded tensor, and *like* is none or of another
            shape: nobody says how the new one is sharded.
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
            f"{spec.name} is one part of a tensor of shape {spec.global_shape}, and what it is to "
            "go into does not say how it is sharded: make it before restoring"
        )
    return torch.empty(shape, dtype=dtype, device=device)
