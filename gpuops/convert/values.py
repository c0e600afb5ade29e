"""Encode the values of a state that are not tensors as JSON that preserves types, and decode it.

JSON's own types are stored as they are; all others as an object with the key ``$`` that names the
type. Nothing that is read is executed or unpickled: an unsupported value is refused with its path,
unless the user allowed ``torch.save`` for it.
"""

import base64
import binascii
import io
import json
import math
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.tensors import needs_carrier

TYPE_KEY = "$"
DEPTH_MAX = 100
_EXACT_MAX = 2**53  # some readers of JSON round larger numbers
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSUmM][1-9]\d{0,8}(\[\d{0,4}[A-Za-z]{1,2}\])?")

OnTensor = Callable[[torch.Tensor, str], object]
ToTensor = Callable[[object, str], torch.Tensor]


class ValueEncoder:
    """Encodes values for `json.dumps`.

    *on_tensor* gets each tensor and its path and returns its placeholder (any JSON); it is stored
    under the type ``tensor``.
    """

    def __init__(self, on_tensor: OnTensor, *, allow_pickle: bool = False) -> None:
        self._on_tensor = on_tensor
        self._allow_pickle = allow_pickle

    def encode(self, value: object, path: str, depth: int = 0) -> object:  # noqa: PLR0911 one line per type
        """Encode *value*, which is at *path* of the state.

        Raises:
            CheckpointError: A value in it is not supported; the message has its type and path.
        """
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return _encode_int(cast("int", value))
        if kind is float:
            return _encode_float(cast("float", value))
        if depth > DEPTH_MAX:
            raise CheckpointError(
                f"{path[:200]} is nested more than {DEPTH_MAX} deep: does it contain itself?"
            )
        if kind is dict:
            return self._mapping(cast("dict[Any, Any]", value), path, depth)
        if kind is list:
            return self._items(cast("list[Any]", value), path, depth)
        if isinstance(value, torch.Tensor):
            return {TYPE_KEY: "tensor", "v": self._on_tensor(value, path)}
        encoded = self._collection(value, path, depth) or _encode_leaf(value)
        if encoded is not None:
            return encoded
        return self._encode_pickled(value, path)

    def _items(self, values: Iterable[object], path: str, depth: int) -> list[object]:
        return [
            self.encode(value, f"{path}.{index}", depth + 1) for index, value in enumerate(values)
        ]

    def _pairs(self, values: Mapping[Any, Any], path: str, depth: int) -> list[list[object]]:
        return [
            [self.encode(key, f"a key of {path}", depth + 1), self._at(key, value, path, depth)]
            for key, value in values.items()
        ]

    def _at(self, key: object, value: object, path: str, depth: int) -> object:
        return self.encode(value, f"{path}.{key}" if type(key) in {str, int} else path, depth + 1)

    def _mapping(self, values: dict[Any, Any], path: str, depth: int) -> object:
        if all(type(key) is str for key in values) and TYPE_KEY not in values:
            return {key: self._at(key, value, path, depth) for key, value in values.items()}
        return {TYPE_KEY: "dict", "v": self._pairs(values, path, depth)}

    def _collection(self, value: object, path: str, depth: int) -> object | None:
        kind = type(value)
        if kind in {tuple, set, frozenset}:
            items = cast("Iterable[object]", value)
            ordered = items if kind is tuple else sorted(items, key=_sort_key)
            return {TYPE_KEY: kind.__name__, "v": self._items(ordered, path, depth)}
        if isinstance(value, OrderedDict | Counter) and kind in {OrderedDict, Counter}:
            name = "ordered" if kind is OrderedDict else "counter"
            return {TYPE_KEY: name, "v": self._pairs(value, path, depth)}
        if isinstance(value, deque) and kind is deque:
            return {TYPE_KEY: "deque", "max": value.maxlen, "v": self._items(value, path, depth)}
        return None

    def _encode_pickled(self, value: object, path: str) -> object:
        if not self._allow_pickle:
            raise CheckpointError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which is not "
                "supported; leave it out of the state, or turn it into tensors, numbers, "
                "text or lists and mappings of those (allow_pickle=True stores anything, and then "
                "whoever can write the checkpoint can run code in this job)"
            )
        stream = io.BytesIO()
        torch.save(value, stream)
        return {TYPE_KEY: "pickle", "v": _base64(stream.getvalue())}


class ValueDecoder:
    """Decodes the values of a `ValueEncoder`.

    *to_tensor* gets the placeholder of a tensor, and the path.
    """

    def __init__(self, to_tensor: ToTensor, *, allow_pickle: bool = False) -> None:
        self._to_tensor = to_tensor
        self._allow_pickle = allow_pickle

    def decode(self, value: object, path: str, depth: int = 0) -> Any:  # noqa: ANN401 anything
        """Decode *value*.

        Raises:
            CorruptError: It was not made by a `ValueEncoder`; the message has its path.
            CheckpointError: It is pickled, and that is not allowed.
        """
        if depth > 2 * DEPTH_MAX:
            raise CorruptError(f"{path[:200]} is nested too deeply")
        if isinstance(value, list):
            return [
                self.decode(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)
            ]
        if not isinstance(value, dict):
            return value
        if TYPE_KEY not in value:
            return {
                key: self.decode(item, f"{path}.{key}", depth + 1) for key, item in value.items()
            }
        try:
            return self._tagged(value[TYPE_KEY], value, path, depth)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, binascii.Error) as e:
            raise CorruptError(
                f"{path[:200]} cannot be read as {value[TYPE_KEY]!r:.40}: {str(e)[:200]}"
            ) from e

    def _tagged(self, kind: object, value: dict[str, Any], path: str, depth: int) -> object:
        if kind == "tensor":
            return self._to_tensor(value["v"], path)
        if kind in _LEAVES:
            return _LEAVES[cast("str", kind)](value)
        if kind in _COLLECTIONS:
            items = value["v"]
            if not isinstance(items, list):
                raise TypeError("not a list of items")
            made = [
                self.decode(item, f"{path}.{index}", depth + 1) for index, item in enumerate(items)
            ]
            return _COLLECTIONS[cast("str", kind)](made, value)
        if kind == "pickle":
            if not self._allow_pickle:
                raise CheckpointError(
                    f"{path} was stored with allow_pickle=True; loading it can run any code, so it "
                    "is loaded only with allow_pickle=True as well"
                )
            stream = io.BytesIO(base64.b64decode(value["v"], validate=True))
            return torch.load(stream, weights_only=False)
        raise ValueError("unknown type")


def dumps(value: object) -> bytes:
    """Return the result of `ValueEncoder.encode` as JSON, pure ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(data: bytes, description: str) -> Any:  # noqa: ANN401 whatever the JSON has
    """Parse the JSON text *data*; *description* names it in errors.

    Raises:
        CorruptError: It is not JSON, or nested more deeply than a `ValueEncoder` does.
    """
    try:
        return json.loads(data, parse_constant=_reject_constant)
    except RecursionError as exc:
        raise CorruptError(f"{description} is nested too deeply") from exc
    except ValueError as exc:
        raise CorruptError(f"{description} cannot be read: {str(exc)[:200]}") from exc


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON number")


def _encode_int(value: int) -> object:
    return value if abs(value) <= _EXACT_MAX else {TYPE_KEY: "int", "v": hex(value)}


def _encode_float(value: float) -> object:
    return value if math.isfinite(value) else {TYPE_KEY: "float", "v": str(value)}


def _base64(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


def _sort_key(value: object) -> tuple[str, str]:
    return type(value).__name__, repr(value)


def _encode_leaf(value: object) -> object | None:  # noqa: PLR0911 one line per type
    kind = type(value)
    if kind is bytes or kind is bytearray:
        return {TYPE_KEY: kind.__name__, "v": _base64(cast("bytes", value))}
    if isinstance(value, io.BytesIO) and kind is io.BytesIO:
        return {TYPE_KEY: "bytesio", "at": value.tell(), "v": _base64(value.getvalue())}
    if isinstance(value, complex) and kind is complex:
        return {TYPE_KEY: "complex", "v": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.dtype):
        return {TYPE_KEY: "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {TYPE_KEY: "size", "v": list(value)}
    if isinstance(value, torch.device):
        return {TYPE_KEY: "device", "v": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    scalar = isinstance(value, numpy.generic)
    array = numpy.asarray(value)
    if kind is not numpy.ndarray and not scalar:
        return None
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        return None
    shape = None if scalar else list(array.shape)
    return {
        TYPE_KEY: "numpy",
        "dtype": array.dtype.str,
        "shape": shape,
        "v": _base64(array.tobytes()),
    }


def _numpy(value: dict[str, Any]) -> object:
    import numpy as np

    if not _NUMPY_DTYPE.fullmatch(value["dtype"]):
        raise ValueError("unknown dtype")
    data = base64.b64decode(value["v"], validate=True)
    dtype, shape = np.dtype(value["dtype"]), value["shape"]
    if shape is None:
        return np.frombuffer(data, dtype, count=1)[0]
    if not data:
        return np.empty((0,), dtype).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _dtype(value: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, value["v"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError("torch has no such dtype")  # noqa: TRY004 of the value that was read
    return found


def _bytesio(value: dict[str, Any]) -> io.BytesIO:
    stream = io.BytesIO(base64.b64decode(value["v"], validate=True))
    stream.seek(int(value["at"]))
    return stream


def _float(value: dict[str, Any]) -> float:
    if value["v"] not in {"nan", "inf", "-inf"}:
        raise ValueError("invalid number")
    return float(value["v"])


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in items]


_LEAVES: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "int": lambda value: int(value["v"], 16),
    "float": _float,
    "complex": lambda value: complex(*(float.fromhex(part) for part in value["v"])),
    "bytes": lambda value: base64.b64decode(value["v"], validate=True),
    "bytearray": lambda value: bytearray(base64.b64decode(value["v"], validate=True)),
    "bytesio": _bytesio,
    "dtype": _dtype,
    "size": lambda value: torch.Size(value["v"]),
    "device": lambda value: torch.device(value["v"]),
    "numpy": _numpy,
}
_COLLECTIONS: Mapping[str, Callable[[list[Any], dict[str, Any]], object]] = {
    "tuple": lambda items, _: tuple(items),
    "set": lambda items, _: set(items),
    "frozenset": lambda items, _: frozenset(items),
    "dict": lambda items, _: dict(_pairs(items)),
    "ordered": lambda items, _: OrderedDict(_pairs(items)),
    "counter": lambda items, _: Counter(dict(_pairs(items))),
    "deque": lambda items, value: deque(items, maxlen=value["max"]),
}


# The format of the metadata of a state.
STATE_FORMAT = 1


class StateEncoder:
    """Replaces the tensors in values by placeholders."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.encoder = ValueEncoder(self.put, allow_pickle=allow_pickle)
        self._n_by_path: dict[str, int] = {}
        self._used: set[str] = set()

    def put(self, tensor: torch.Tensor, path: str) -> object:
        """Record *tensor*, named by its path; return its placeholder.

        Keys such as 1 and "1", or ("a", 1) and ("a", 2), have one path: then it is numbered.
        """
        name, number = path, self._n_by_path.get(path, 1)
        while name in self._used:
            number += 1
            name = f"{path}#{number}"
        self._n_by_path[path] = number
        self._used.add(name)
        self.names.append(name)
        self.tensors.append(tensor)
        dtype = tensor.dtype
        return [name, str(dtype).removeprefix("torch.")] if needs_carrier(dtype) else name
