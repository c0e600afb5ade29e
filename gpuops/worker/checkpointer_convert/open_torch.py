"""Read what ``torch.save`` wrote, without running anything in it unless the user trusts it."""

# ruff: noqa: ANN401 what is in such a file may be anything

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer_convert.export import OWN_KEY
from gpuops.worker.checkpointer_convert.incoming import Incoming


def open_torch(path: Path, *, trust: bool) -> Incoming:
    """Return what is in the file *path*, a dict; its tensors are mapped, not read.

    Raises:
        CheckpointError: torch loads it only by running code, and *trust* is false; it cannot be
            read; or it is no dict.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    loaded = _load(path, trust=trust)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}, not a dict of states: save "
            "model.state_dict(), or a dict of several"
        )
    tree = dict(loaded)
    if tree and all(isinstance(value, torch.Tensor) for value in tree.values()):
        return Incoming(tree=tree, flat=True)
    own = tree.pop(OWN_KEY, None)
    return Incoming(tree=tree, own=own if isinstance(own, Mapping) else None)


def _load(path: Path, *, trust: bool) -> Any:
    for mmap in (True, False):  # files in the format before torch 1.6 cannot be mapped
        try:
            return torch.load(path, map_location="cpu", weights_only=not trust, mmap=mmap)
        except Exception as exc:  # noqa: BLE001 boundary: whatever hostile bytes make torch raise
            failed: Exception = exc
    if trust:
        raise CheckpointError(f"cannot load {path}: {failed!r:.300}") from failed
    raise CheckpointError(
        f"{path} is refused: torch loads it only by running what it contains, or not at all "
        f"({_first_line(failed)}). If you trust who wrote it, give --trust"
    ) from failed


def _first_line(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0][:200]
