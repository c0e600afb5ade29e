"""Assemble the tensors of a state from its shards, within bounded memory.

Shards are mapped, those of an object store after a download into a scratch folder; each is verified
once, before its bytes are used. A tensor in several shards is assembled in a scratch file. So only
the page cache holds these files in memory.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from gpuops.checkpoint.digest import find_damaged_chunks
from gpuops.checkpoint.image import ITEMSIZE_BYTES, ImageLayout, read_metadata_blob
from gpuops.checkpoint.manifest import Manifest
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.directory_files import wrap_os_errors
from gpuops.checkpoint.storage.inspection import (
    StoredTensor,
    TensorPart,
    assemble_tensors,
    read_layouts,
)
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard

# The unit in which elements are moved; nothing is computed with it.
_UNSIGNED_BY_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
OnBytes = Callable[[int], object]


class StateReader:
    """One state, open for reading; ``with`` closes it and removes its scratch files.

    Args:
        store: The store of the state.
        manifest: Its manifest.
        scratch: The folder for scratch files; they have no name and end with this process.
        advance: Called with the bytes that were verified, for a progress bar.

    Raises:
        CorruptError: A shard is not what was saved.
        CheckpointError: A shard is missing or cannot be read, or the scratch folder is full.
    """

    def __init__(
        self,
        store: CheckpointStore,
        manifest: Manifest,
        scratch: Path,
        advance: OnBytes = lambda _nbytes: None,
    ) -> None:
        self._store = store
        self.manifest = manifest
        self._scratch = scratch
        self._advance = advance
        self._views: dict[Shard, memoryview] = {}
        self._open = contextlib.ExitStack()
        self.layouts = read_layouts(store, manifest)
        self.tensors: Mapping[str, StoredTensor] = assemble_tensors(self.layouts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the mappings; those still in use end with their last user."""
        self._views.clear()
        self._open.close()

    def metadata_blob_of(self, layout: ImageLayout) -> bytes:
        return read_metadata_blob(self._view(layout.shard), layout)

    def bytes_of(self, tensor: StoredTensor) -> memoryview:
        """Return the bytes of the complete tensor, in element order; writes to them are private.

        Each tensor of several parts takes its size on the scratch folder's disk until `close`.
        """
        if len(tensor.parts) == 1:
            return self._bytes_of_part(tensor.parts[0])
        target = scratch_memory(self._scratch, tensor.nbytes)
        self.fill(tensor, target)
        return target

    def fill(self, tensor: StoredTensor, target: memoryview) -> None:
        """Write the bytes of the complete tensor into *target*, which has the same size."""
        if tensor.nbytes == 0:
            return
        whole = _elements(target, tensor.dtype, tensor.shape)
        for part in tensor.parts:
            offsets, shape = part.region
            where = tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))
            whole[where] = _elements(self._bytes_of_part(part), tensor.dtype, shape)

    def _bytes_of_part(self, part: TensorPart) -> memoryview:
        return self._view(part.shard)[part.placed.begin : part.placed.end]

    def _view(self, shard: Shard) -> memoryview:
        if shard not in self._views:
            self._views[shard] = self._verified(shard)
        return self._views[shard]

    def _verified(self, shard: Shard) -> memoryview:
        record = self.manifest.record(shard)
        path = self._store.local_shard_path(self.manifest.state, shard)
        if path is None:
            view = scratch_memory(self._scratch, record.digest.nbytes)
            self._store.fetch_shard(record, self.manifest.state, view)
        else:
            view = map_file(path, record.digest.nbytes)
            damaged = find_damaged_chunks(view, record.digest)
            if damaged:
                raise CorruptError(
                    f"{path}: {len(damaged)} of {len(record.digest.table) // 8} chunks are not "
                    f"what was saved, the first is number {damaged[0]}; use another state: "
                    "`gpuops ckpt verify --all` says which are intact"
                )
        self._advance(record.digest.nbytes)
        return view


def _elements(
    data: memoryview, dtype: str, shape: tuple[int, ...]
) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    unit = _UNSIGNED_BY_WIDTH[ITEMSIZE_BYTES[dtype]]
    return np.frombuffer(data, dtype=unit).reshape(shape)


def map_file(path: Path, nbytes: int) -> memoryview:
    """Map the file *path*, which must have *nbytes* bytes; writes to the mapping are private.

    Raises:
        CorruptError: It has another size.
        CheckpointError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != nbytes:
                raise CorruptError(f"{path} has {size} bytes, but {nbytes} were saved")
            # Copy on write: torch warns about read-only memory.
            return memoryview(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY))
    except OSError as exc:
        raise CheckpointError(f"cannot map {path}: {exc.strerror or exc}") from exc


def scratch_memory(folder: Path, nbytes: int) -> memoryview:
    """Return zeroed memory of *nbytes* in an unnamed file of *folder*.

    Raises:
        CheckpointError: There is no room for it.
    """
    if nbytes == 0:
        return memoryview(bytearray())
    with scratch_file(folder, nbytes) as fd:
        return memoryview(mmap.mmap(fd, nbytes))


@contextlib.contextmanager
def scratch_file(folder: Path, nbytes: int) -> Iterator[int]:
    """Yield a descriptor of an unnamed file of *folder* with *nbytes* allocated bytes.

    Raises:
        CheckpointError: There is no room for it.
    """
    with contextlib.ExitStack() as stack:
        with wrap_os_errors(f"allocate {nbytes} bytes of scratch in", folder):
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            if nbytes:
                # Without it a write to the mapping on a full disk would raise SIGBUS.
                os.posix_fallocate(file.fileno(), 0, nbytes)
        yield file.fileno()
