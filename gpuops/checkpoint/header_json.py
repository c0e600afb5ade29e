"""The JSON of an image's header: bounded before it is parsed, and its values checked."""

import json
from collections.abc import Mapping
from typing import Any

from gpuops.checkpoint.types import CheckpointError, CorruptError

N_DIMS_MAX = 64  # NumPy's limit, and more than a model's tensors have
DIM_MAX = 2**63 - 1
# Bounds on what json makes of a header: at most a few hundred bytes for each of these characters.
N_BRACKETS_MAX = 2_500_000
N_COMMAS_MAX = 8_000_000


def compact(value: object) -> str:
    """Return *value* as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def check_cost(text: str, error: type[CheckpointError]) -> None:
    """Bound what parsing *text* can cost, before it is parsed; `plan_image` applies it, too."""
    n_brackets = text.count("{") + text.count("[")
    n_commas = text.count(",")
    if n_brackets > N_BRACKETS_MAX or n_commas > N_COMMAS_MAX:
        raise error(f"the header has {n_brackets} brackets and {n_commas} commas: too many")


def parse_header(text: bytes) -> dict[str, Any]:
    """Return the object in a padded header; raises CorruptError."""
    if not text.startswith(b"{"):
        raise CorruptError("the header does not begin with a brace")
    try:
        return as_mapping(parse_json(text.rstrip(b" ").decode()), "the header")
    except UnicodeDecodeError as exc:
        raise CorruptError(f"the header is not UTF-8: {exc.reason} at {exc.start}") from exc


def parse_json(text: str) -> object:
    """Return the value of *text*; raises CorruptError where it is invalid or costs too much."""
    check_cost(text, CorruptError)
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except RecursionError as exc:
        raise CorruptError("the header is nested too deeply") from exc
    except ValueError as exc:
        raise CorruptError(f"the header cannot be read: {str(exc)[:200]}") from exc


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a valid number")


def as_mapping(value: object, what: str) -> dict[str, Any]:
    """Return *value*, called *what*; raises CorruptError where it is not an object."""
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not an object")
    return value


def text_of(metadata: Mapping[str, object], key: str) -> str:
    """Return the text under *key*; raises CorruptError where there is none."""
    value = metadata.get(key)
    if not isinstance(value, str):
        raise CorruptError(f"the header's {key} is not text")
    return value


def as_numbers(value: object, what: str, name: str) -> tuple[int, ...]:
    """Return the dimensions in *value*, *what* of the tensor *name*.

    Raises:
        CorruptError: It is anything else.
    """
    if isinstance(value, list) and len(value) <= N_DIMS_MAX:
        for item in value:  # faster than a generator: a header has four lists for each tensor
            if type(item) is not int or not 0 <= item <= DIM_MAX:
                break
        else:
            return tuple(value)
    raise CorruptError(f"the {what} of {abbreviate(name)} is not a list of whole numbers")


def abbreviate(value: object) -> str:
    """Return *value*, which may be anything, shortened for a message."""
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:80] + "…")
    return repr(value) if type(value) is int and abs(value) <= DIM_MAX else type(value).__name__
