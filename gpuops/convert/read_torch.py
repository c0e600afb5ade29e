"""Read what ``torch.save`` wrote, without running anything in it unless the user trusts it."""

# ruff: noqa: ANN401 what is in such a file may be anything

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpuops.checkpoint.types import CheckpointError
from gpuops.convert.export import EXPORT_KEY
from gpuops.convert.import_source import ImportSource

_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,200})")


def read_torch(path: Path, *, trust: bool) -> ImportSource:
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
        return ImportSource(tree=tree, is_flat=True)
    gpuops_metadata = tree.pop(EXPORT_KEY, None)
    return ImportSource(
        tree=tree, gpuops_metadata=gpuops_metadata if isinstance(gpuops_metadata, Mapping) else None
    )


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
        f"{_refusal_reason(failed)}. If you trust who wrote it, give --trust"
    ) from failed


def _refusal_reason(exc: Exception) -> str:
    """Return what of torch's words is about the file: the rest is advice on how to give in."""
    matched = _GLOBAL.search(str(exc))
    return f": it names {matched[1]}" if matched else ""
