"""Read what ``torch.save`` wrote, without running anything in it unless the user trusts it."""

# ruff: noqa: ANN401 what is in such a file may be anything

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer_convert.export import OWN_KEY
from gpuops.worker.checkpointer_convert.incoming import Incoming

_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,200})")


def open_torch(path: Path, *, trust: bool) -> Incoming:
    """Return what is in the file *path*, a dict; its tensors are mapped, not read.

    Raises:
        CheckpointError: torch loads it only by running code, and *trust* is false; it cannot be
            read; or it is no dict.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty")
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what torch may not support, it refuses
                return torch.load(path, map_location="cpu", weights_only=not trust, mmap=mmap)
        except Exception as exc:  # noqa: BLE001 boundary: whatever hostile bytes make torch raise
            failed: Exception = exc
    if trust:
        raise CheckpointError(f"cannot load {path}: {failed!r:.300}") from failed
    raise CheckpointError(
        f"{path} is refused: torch loads it only by running what it contains, or not at all"
        f"{_reason(failed)}. If you trust who wrote it, give --trust"
    ) from failed


def _reason(exc: Exception) -> str:
    """Return what of torch's words is about the file: the rest is advice on how to give in."""
    said = _GLOBAL.search(str(exc))
    return f": it names {said[1]}" if said else ""
