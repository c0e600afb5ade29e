"""A saved state: the images of all ranks, opened as far as they are needed.

In a world of the same size each rank has its own image, and all that is plain comes from there:
ranks may differ in what no placement tells of, such as running averages of a batch norm. Where the
world or the placements changed, tensors are put together out of all images, and of what is not
sharded the lowest rank's counts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from gpuops.checkpoint.image import ImageLayout, PlacedTensor, TensorSpec, read_extra, read_layout
from gpuops.checkpoint.states import CheckpointError, CorruptError, Shard
from gpuops.worker.checkpointer.capture import FORMAT
from gpuops.worker.checkpointer.filling import fill
from gpuops.worker.checkpointer.part import shape_of
from gpuops.worker.checkpointer.pieces import Piece, distinct
from gpuops.worker.checkpointer.tensors import NAMES, Places, carried, check, is_dtensor, local_of
from gpuops.worker.checkpointer.values import loads
from gpuops.worker.checkpointer.views import view_of

OpenImage = Callable[[Shard], memoryview]


class _Memory(NamedTuple):
    """What two tensors that are one have in common; ``address`` is 0 where nothing is in it."""

    address: int
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Image(NamedTuple):
    memory: memoryview
    layout: ImageLayout
    tensors: Mapping[str, PlacedTensor]
    extra: Mapping[str, Any]


class SavedState:
    """A state that *world* ranks saved, for rank *rank* of a world of *own_world*.

    *open_image* gives the verified bytes of a shard's image; they must stay until `load` returned.
    ``notes`` has what a user should know of where values came from.
    """

    def __init__(
        self, open_image: OpenImage, *, step: int, world: int, rank: int, own_world: int
    ) -> None:
        self._open = open_image
        self._step = step
        self._world = world
        self._images: dict[int, _Image] = {}
        self.is_own = world == own_world
        self._home = rank if self.is_own else 0
        self._wants: list[tuple[str, torch.Tensor]] = []
        self._filled: dict[_Memory, str] = {}
        self.notes: list[str] = []

    @property
    def head(self) -> Mapping[str, Any]:
        """What was saved beside parts: ``rng``, versions; of this rank, or of the lowest."""
        return self._image(self._home).extra

    def part_keys(self) -> set[str]:
        """Return the keys of the parts that were saved."""
        return set(self.head["parts"])

    def spec(self, name: str) -> TensorSpec | None:
        found = self._find(name)
        return found[1].spec if found else None

    def names(self, prefix: str) -> list[str]:
        found: dict[str, None] = {}
        for image in [self._image(self._home)] if self.is_own else self._all():
            found.update(dict.fromkeys(n for n in image.tensors if n.startswith(prefix)))
        return list(found)

    def fragments(self, key: str) -> list[Any]:
        if self.is_own:
            parts = self.head["parts"]
            return [parts[key]] if key in parts else []
        return [image.extra["parts"][key] for image in self._all() if key in image.extra["parts"]]

    def want(self, name: str, target: torch.Tensor) -> None:
        check(target, name)
        spec = self.spec(name)
        if spec is None:
            raise CheckpointError(f"the checkpoint has no {name}")
        with torch.no_grad():
            kept = carried(target) if not is_dtensor(target) else target
            dtype = NAMES[kept.dtype]
        if spec.dtype != dtype:
            raise CheckpointError(
                f"{name} was saved as {spec.dtype} and is {dtype} now; restore with the dtypes "
                "that were saved, and convert afterwards"
            )
        if tuple(target.shape) != shape_of(spec, target.dtype):
            raise CheckpointError(
                f"{name} was saved with the shape {shape_of(spec, target.dtype)} and has "
                f"{tuple(target.shape)} now; restore into a model of the structure that was saved"
            )
        if target.is_inference():
            raise CheckpointError(
                f"{name} was made in inference mode, and nothing can be loaded into it; make it "
                "outside, or give its clone()"
            )
        memory = _memory_of(target)
        if not self.can_fill(name, target):
            raise CheckpointError(
                f"{name} and {self._filled[memory]} are one tensor here, and were saved with "
                "different values; give each its own memory (clone()) before restoring"
            )
        if memory not in self._filled:
            self._wants.append((name, target))
        if memory.address:
            self._filled.setdefault(memory, name)

    def can_fill(self, name: str, target: torch.Tensor) -> bool:
        memory = _memory_of(target)
        first = self._filled.get(memory, name)
        return first == name or not memory.address or self._is_alike(first, name)

    @torch.no_grad()
    def load(self, n_threads: int) -> int:
        """Fill all that is wanted, with so many threads; return how many bytes were written.

        Raises:
            CheckpointError: The parts of a tensor do not make up the whole; nothing is known then
                of what the wanted tensors hold.
        """
        places = Places()
        straight: list[tuple[torch.Tensor, torch.Tensor]] = []
        spread: dict[str, torch.Tensor] = {}
        nbytes = 0
        for name, target in self._wants:
            local = local_of(target)
            if local.numel() == 0:
                continue
            nbytes += local.numel() * local.element_size()
            found = self._find(name)
            assert found is not None
            image, placed = found
            if _is_same(places.spec_of(target, local, name), placed.spec):
                straight.append((local, view_of(image.memory, placed)))
            elif name in spread:
                straight.append((local, local_of(spread[name])))
            else:
                spread[name] = target if is_dtensor(target) else local
        if spread:
            # Imported where it is needed: most restores find everything in place.
            from gpuops.worker.checkpointer.resharding import load_resharded

            load_resharded(spread, {name: self._pieces(name) for name in spread})
        fill([a for a, _ in straight], [b for _, b in straight], n_threads)
        return nbytes

    def _is_alike(self, one: str, other: str) -> bool:
        """Say whether two tensors were saved with the same values."""
        for image in self._all():
            a, b = image.tensors.get(one), image.tensors.get(other)
            if a is None and b is None:
                continue
            if a is None or b is None or not _is_same(a.spec, b.spec):
                return False
            if not torch.equal(_bytes_of(image.memory, a), _bytes_of(image.memory, b)):
                return False
            if self.is_own:
                return True
        return True

    def _find(self, name: str) -> tuple[_Image, PlacedTensor] | None:
        for image in self._all():
            if name in image.tensors:
                return image, image.tensors[name]
        return None

    def _pieces(self, name: str) -> list[Piece]:
        found = distinct(
            (image.memory, image.tensors[name]) for image in self._all() if name in image.tensors
        )
        if not found:
            raise CheckpointError(f"no rank saved anything of {name}")
        return found

    def _all(self) -> Iterator[_Image]:
        """Yield the own image first, then the others from the lowest rank on."""
        yield self._image(self._home)
        for rank in range(self._world):
            if rank != self._home:
                yield self._image(rank)

    def _image(self, rank: int) -> _Image:
        if rank not in self._images:
            self._images[rank] = self._read(Shard(rank, self._world))
        return self._images[rank]

    def _read(self, shard: Shard) -> _Image:
        memory = self._open(shard)
        layout = read_layout(memory)
        if layout.shard != shard:
            raise CorruptError(
                f"the image of rank {shard.rank} of {shard.world} says that it is of rank "
                f"{layout.shard.rank} of {layout.shard.world}"
            )
        extra = loads(read_extra(memory, layout), f"the extra of rank {shard.rank}")
        if not isinstance(extra, dict) or not isinstance(extra.get("parts"), dict):
            raise CorruptError(f"the extra of rank {shard.rank} does not say what was saved")
        if extra.get("format") != FORMAT:
            raise CheckpointError(
                f"the state of rank {shard.rank} has the format {extra.get('format')!r:.40}, this "
                f"gpuops reads {FORMAT}; use the gpuops that saved it, or a newer one"
            )
        if extra.get("step") != self._step:
            raise CorruptError(
                f"the image of rank {shard.rank} is of step {extra.get('step')!r:.40}, the others "
                f"are of step {self._step}"
            )
        tensors = {placed.spec.name: placed for placed in layout.tensors}
        return _Image(memory, layout, tensors, extra)


def _memory_of(tensor: torch.Tensor) -> _Memory:
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    address = local.data_ptr() if local.numel() else 0
    return _Memory(address, local.device, tuple(local.shape), local.stride())


def _bytes_of(memory: memoryview, placed: PlacedTensor) -> torch.Tensor:
    return view_of(memory, placed).reshape(-1).view(torch.uint8)


def _is_same(wanted: TensorSpec, saved: TensorSpec) -> bool:
    return (
        wanted.shape == saved.shape
        and wanted.offsets == saved.offsets
        and wanted.global_shape == saved.global_shape
    )
