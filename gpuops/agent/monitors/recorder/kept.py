"""The flight recorders of a node's ranks as evidence: one file for each hang, named by its digest.

`gpuops.convert.flight_recorder.read_dumps` reads it.
"""

import gzip
import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from gpuops.convert.flight_recorder import KEPT_ENDING
from gpuops.host.trust import atomic_write
from gpuops.model import Json
from gpuops.scrub import scrub
from gpuops.units import format_bytes

log = logging.getLogger(__name__)

BYTES_MAX = 64 * 2**20  # of a run on a node
_scrub_short = lru_cache(maxsize=4096)(scrub)  # a dump repeats a few texts in many entries
_SHORT_CHARS = 256


def keep_recorders(
    folder: Path, bodies: Mapping[int, Json], bytes_max: int = BYTES_MAX
) -> Path | None:
    """Write *bodies*, the dumps by rank, to *folder* of a generation; return the file.

    The oldest files of the run are removed where they and this one are more than *bytes_max*. None
    where this one alone is, or cannot be written: the log says why.
    """
    try:
        ranks = {str(rank): _scrubbed(body) for rank, body in bodies.items()}
        data = gzip.compress(json.dumps({"ranks": ranks}).encode(), 6, mtime=0)
        if len(data) > bytes_max:
            log.warning("flight recorders of %s are not kept", format_bytes(len(data)))
            return None
        _make_room(folder.parent, bytes_max - len(data))
        path = folder / f"{sha256(data).hexdigest()}{KEPT_ENDING}"
        atomic_write(path, data, 0o600)
    except (OSError, RecursionError) as exc:
        log.warning("the flight recorders are not kept: %s", exc)
        return None
    return path


def _make_room(run: Path, bytes_max: int) -> None:
    """Remove the oldest files of *run* until the others have *bytes_max* bytes at most."""
    files = [(path.lstat(), path) for path in run.glob(f"*/*{KEPT_ENDING}")]
    total = sum(found.st_size for found, _ in files)
    for found, path in sorted(files, key=lambda item: item[0].st_mtime_ns):
        if total <= bytes_max:
            return
        log.warning("%s is removed: flight recorders of a run may be at most 64 MiB", path)
        path.unlink(missing_ok=True)
        total -= found.st_size


def _scrub(text: str) -> str:
    return _scrub_short(text) if len(text) <= _SHORT_CHARS else scrub(text)


def _scrubbed(value: object) -> object:
    if isinstance(value, str):
        return _scrub(value)
    if isinstance(value, dict):
        return {_scrub(key): _scrubbed(item) for key, item in value.items()}
    return [_scrubbed(item) for item in value] if isinstance(value, list) else value
