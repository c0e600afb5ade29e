"""Read dumps of torch's flight recorder, each a pickle or JSON, as plain data.

A dump is data of another process, perhaps of another site: nothing that a pickle names is called
(`gpuops.convert.pickle_reader`).
"""

import json
import zlib
from collections.abc import Iterator

from gpuops.checkpoint.types import CheckpointError
from gpuops.convert.pickle_reader import PickleDict, read_pickle

BYTES_MAX = 256 * 2**20
# Of a file in which an agent keeps those of its node's ranks, JSON in gzip.
KEPT_ENDING = ".recorders.json.gz"
_GZIP = zlib.MAX_WBITS | 16
_PICKLE = b"\x80"
# A dump is a table of entries, with lists of frames, which are tables.
_DEPTH = 8
# A pickle of torch has one value in four bytes or more; those that it names again count again.
_VALUES_A_BYTE, _VALUES_MAX = 20, 10_000_000


def read_dump(data: bytes) -> object:
    """Return the lists, dicts with text keys and scalars that *data* holds.

    Raises:
        ValueError: It is neither, holds more than data, or is larger than `BYTES_MAX`.
    """
    if len(data) > BYTES_MAX:
        raise ValueError(f"it is larger than {BYTES_MAX >> 20} MiB")
    try:
        if data[:1] != _PICKLE:
            return json.loads(data)
        n_values_max = min(_VALUES_MAX, _VALUES_A_BYTE * len(data))
        return _plain(read_pickle(data, ()), iter(range(n_values_max)))
    except (CheckpointError, ValueError) as exc:
        raise ValueError(f"it is neither JSON nor a pickle of data: {exc}") from exc
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def read_dumps(data: bytes) -> dict[int, object]:
    """Return by rank the dumps that an agent has kept, *data* being such a file.

    Raises:
        ValueError: It is none, is cut off, or holds more than `BYTES_MAX`.
    """
    inflate = zlib.decompressobj(_GZIP)
    try:
        text = inflate.decompress(data, BYTES_MAX + 1)
    except zlib.error as exc:
        raise ValueError(f"it is no gzip file: {exc}") from exc
    if not inflate.eof and len(text) <= BYTES_MAX:
        raise ValueError("it is cut off")
    body = read_dump(text)
    ranks = body.get("ranks") if isinstance(body, dict) else None
    if not isinstance(ranks, dict) or not all(map(str.isdecimal, ranks)):
        raise ValueError("it has no dumps by rank")
    return {int(rank): dump for rank, dump in ranks.items()}


def _plain(value: object, left: Iterator[int], depth: int = _DEPTH) -> object:
    """Return *value* as ``json`` would give it; what is nested deeper is left out.

    A small pickle can name one list again and again, in lists that do the same: *left* counts.
    """
    if next(left, None) is None:
        raise ValueError("it has more values than a dump of its size")
    if isinstance(value, PickleDict):
        named = value.by_name() if depth else {}
        return {name: _plain(item, left, depth - 1) for name, item in named.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, left, depth - 1) for item in value] if depth else []
    return value
