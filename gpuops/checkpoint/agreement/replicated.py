"""Read from an image's header which tensors are bitwise equal on other ranks.

The header's ``gpuops`` object has ``replicated``: for each set of ranks the ranks and the numbers
of the tensors, in the order of their data, without the metadata blob, as spans
``[begin, end, begin, end, …]``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gpuops.checkpoint.types import Shard

KEY = "replicated"
SETS_MAX = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class ReplicatedTensors:
    """``tensors`` (by number) must be equal on all of ``ranks``; both are sorted."""

    ranks: tuple[int, ...]
    tensors: tuple[int, ...]


def to_json(
    names: Sequence[str], ranks_by_name: Mapping[str, tuple[int, ...]]
) -> list[dict[str, Any]]:
    """Return the header's value: *ranks_by_name* has the ranks by the name of each tensor.

    *names* are those of all tensors, in the order of their data. The number of sets of ranks is
    bounded: tensors of further sets are not compared.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for number, name in enumerate(names):
        ranks = ranks_by_name.get(name)
        if ranks is not None and (ranks in sets or len(sets) < SETS_MAX):
            sets.setdefault(ranks, []).append(number)
    return [
        {"ranks": to_spans(ranks), "tensors": to_spans(numbers)}
        for ranks, numbers in sorted(sets.items())
    ]


def read_replicated(header: bytes, shard: Shard, n_tensors: int) -> tuple[ReplicatedTensors, ...]:
    """Return what *header* describes; () where it has no valid description.

    *header* is that of a layout that was read: valid JSON, bounded. Comparisons do not affect a
    restore, so invalid values only disable the comparison.
    """
    own = json.loads(json.loads(header[_LENGTH_BYTES:])["__metadata__"]["gpuops"])
    entries = own.get(KEY, [])
    if not isinstance(entries, list) or len(entries) > SETS_MAX:
        return ()
    found = []
    for item in entries:
        ranks = from_spans(item.get("ranks"), shard.world) if isinstance(item, dict) else ()
        tensors = from_spans(item.get("tensors"), n_tensors) if ranks else ()
        if len(ranks) < 2 or shard.rank not in ranks or not tensors:
            return ()
        found.append(ReplicatedTensors(ranks, tensors))
    numbers = [number for each in found for number in each.tensors]
    return tuple(found) if len(set(numbers)) == len(numbers) else ()


def format_spans(numbers: Sequence[int]) -> str:
    """Return ascending *numbers* as short text: ``0-2, 5``."""
    spans = to_spans(numbers)
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return ", ".join(f"{b}-{e - 1}" if e - b > 1 else str(b) for b, e in pairs)


def to_spans(numbers: Iterable[int]) -> list[int]:
    """Return ascending *numbers* as ``[begin, end, begin, end, …]``, the ends exclusive."""
    found: list[int] = []
    for number in numbers:
        if found and found[-1] == number:
            found[-1] = number + 1
        else:
            found += [number, number + 1]
    return found


def from_spans(spans: object, below: int) -> tuple[int, ...]:
    """Return the numbers of *spans*, () where they are not ascending or not below *below*."""
    is_list = isinstance(spans, list) and len(spans) % 2 == 0
    if not is_list or not isinstance(spans, list) or len(spans) > 2 * below:
        return ()
    if any(type(number) is not int for number in spans):
        return ()
    ends = [0, *spans, below]
    if any(a > b for a, b in pairwise(ends)):
        return ()
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return tuple(number for begin, end in pairs for number in range(begin, end))
