"""Tensors and images: the bytes of a tensor on this rank, and which part of the whole they are.

Of a DTensor the local tensor is saved; torch's own checkpoint planner computes its position. Any
other tensor is saved as a whole.

Also the tensors of an image as torch tensors over its memory, without copies.
"""

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from gpuops.checkpoint.image import ITEMSIZE_BYTES, ImageLayout, PlacedTensor, TensorSpec
from gpuops.checkpoint.types import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in _TORCH_NAMES.items()
    if hasattr(torch, attribute)
}
"""torch's dtypes by the names in an image."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# Dtypes without a safetensors name are stored as another one of the same width.
_CARRIERS = {"complex32": torch.int32, "float4_e2m1fn_x2": torch.uint8}
CARRIER_DTYPES: Mapping[torch.dtype, torch.dtype] = {
    getattr(torch, name): carrier for name, carrier in _CARRIERS.items() if hasattr(torch, name)
}

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""The tensor types of torch itself: no subclass changes their behaviour."""


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether *value* is a DTensor.

    Where the module is not imported there are none, and importing it would take a third of the time
    that torch takes.
    """
    if type(value) in PLAIN_TYPES:  # called often for each of many tensors
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def as_storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor* in a dtype that images support: itself, or a view of the same memory.

    A complex128 becomes float64 with one more dimension, of 2.
    """
    dtype = tensor.dtype
    if dtype in DTYPE_NAMES:
        return tensor
    if dtype is torch.complex128:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(CARRIER_DTYPES[dtype])


def needs_carrier(dtype: torch.dtype) -> bool:
    """Return whether an image stores *dtype* as another one."""
    return dtype is torch.complex128 or dtype in CARRIER_DTYPES


def check_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise CheckpointError where the tensor called *name* cannot be stored, with the reason."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    kind = type(local)
    if local.device.type == "meta":
        why = "is on the meta device: it has no data; materialise the model before training"
    elif local.is_nested:
        why = "is a nested tensor; store its values and offsets"
    elif local.layout is not torch.strided:
        why = f"has the layout {local.layout}; a checkpoint supports dense (strided) tensors"
    elif local.is_quantized:
        why = (
            f"is quantized ({local.dtype}); a checkpoint does not support it; store its int_repr()"
        )
    elif hasattr(kind, "__tensor_flatten__") and not _is_async_collective(local):
        why = f"is a {kind.__module__}.{kind.__qualname__}, a tensor made of others"
    elif local.dtype not in DTYPE_NAMES and not needs_carrier(local.dtype):
        why = f"has the dtype {local.dtype}, which a checkpoint does not support"
    elif is_dtensor(tensor) and any(place.is_partial() for place in tensor.placements):
        why = f"is a partial sum ({tensor.placements}): no rank has its value"
    elif is_dtensor(tensor) and needs_carrier(local.dtype):
        why = f"is a DTensor of {local.dtype}, which a checkpoint does not support"
    else:
        return
    raise CheckpointError(f"the tensor {name} {why}")


def _is_async_collective(local: torch.Tensor) -> bool:
    """Return whether *local* is the result of a collective: it waits when it is used."""
    return type(local).__name__ == "AsyncCollectiveTensor"


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of *tensor*, the same memory, in a dtype that images support.

    Call it without gradients.
    """
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local if local.dtype in DTYPE_NAMES else as_storable(local)


class TensorPlacements:
    """This rank's parts of DTensors; torch computes each distinct placement only once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}

    def spec_of(self, tensor: torch.Tensor, local: torch.Tensor, name: str) -> TensorSpec:
        """Return the spec of *tensor*, whose local part is *local*, as *name* in the image.

        Raises:
            CheckpointError: The local tensor is not the part that the DTensor's placements
                describe.
        """
        shape = tuple(local.shape)
        offsets, global_shape = (0,) * len(shape), shape
        if is_dtensor(tensor):
            offsets, global_shape = self._region_of(tensor, shape, name)
        nbytes = local.numel() * local.element_size()
        return TensorSpec(name, DTYPE_NAMES[local.dtype], shape, nbytes, offsets, global_shape)

    def _region_of(
        self, tensor: "DTensor", shape: tuple[int, ...], name: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        global_shape = tuple(tensor.shape)
        key = (tensor.device_mesh, tensor.placements, global_shape)
        if key not in self._known:
            self._known[key] = _planned_chunk(tensor, name)
        chunk = self._known[key]
        if chunk is None:  # this rank is not in its mesh, and has no part of it
            return (0,) * len(shape), shape
        offsets, sizes = chunk
        if sizes != shape:
            raise CheckpointError(
                f"the tensor {name} has the local shape {shape}, and its placements "
                f"{tensor.placements} say {sizes}"
            )
        return offsets, global_shape


def _planned_chunk(tensor: "DTensor", name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    items = create_default_local_save_plan({name: tensor}, is_coordinator=False).items
    if not items:
        return None
    data = items[0].tensor_data
    assert data is not None
    return tuple(data.chunk.offsets), tuple(data.chunk.sizes)


def view_of(memory: memoryview, placed: PlacedTensor) -> torch.Tensor:
    """Return one tensor of the image *memory*; it is read-only where the memory is."""
    spec = placed.spec
    dtype = _dtype(spec.dtype)
    count = prod(spec.shape)
    if count == 0:
        return torch.empty(spec.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=placed.begin)
    return flat.view(spec.shape)


def views_of(
    memory: memoryview, layout: ImageLayout, names: Sequence[str]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of the image called *names*, in that order.

    Many small tensors are cut out of a few long ones, which takes a tenth of the time.
    """
    cut: dict[str, torch.Tensor] = {}
    for run in _group_by_width(layout.tensors):
        cut.update(_split_run(memory, run))
    return tuple(cut[name] for name in names)


def _group_by_width(tensors: Iterable[PlacedTensor]) -> list[list[PlacedTensor]]:
    """Return the tensors by width: all of one width are contiguous."""
    by_width: dict[int, list[PlacedTensor]] = {}
    for placed in tensors:
        by_width.setdefault(ITEMSIZE_BYTES[placed.spec.dtype], []).append(placed)
    return list(by_width.values())


def _split_run(memory: memoryview, run: list[PlacedTensor]) -> dict[str, torch.Tensor]:
    width = ITEMSIZE_BYTES[run[0].spec.dtype]
    begin, end = run[0].begin, run[-1].end
    has_holes = any(a.end != b.begin for a, b in pairwise(run))
    if begin == end or has_holes:  # the metadata blob may lie between tensors of bytes
        return {placed.spec.name: view_of(memory, placed) for placed in run}
    counts = [(placed.end - placed.begin) // width for placed in run]
    views_by_dtype = {}
    for name in {placed.spec.dtype for placed in run}:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            whole = torch.frombuffer(
                memory, dtype=_dtype(name), count=(end - begin) // width, offset=begin
            )
        views_by_dtype[name] = whole.split(counts)
    return {
        placed.spec.name: views_by_dtype[placed.spec.dtype][index]
        if len(placed.spec.shape) == 1
        else views_by_dtype[placed.spec.dtype][index].view(placed.spec.shape)
        for index, placed in enumerate(run)
    }


def _dtype(name: str) -> torch.dtype:
    found = DTYPES.get(name)
    if found is None:
        raise CheckpointError(f"this torch ({torch.__version__}) has no dtype for {name}")
    return found
