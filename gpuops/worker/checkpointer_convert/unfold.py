"""A saved state as nested dicts of tensors and values, named as torch's own functions do it.

A model is ``{name: tensor}``; an optimizer ``{"state": {name: {…}}, "param_groups": […]}`` by the
names of its parameters, as ``torch.distributed.checkpoint.state_dict`` has it; all else is what its
``state_dict`` returned.
"""

# ruff: noqa: ANN401 what users keep in a state may be anything

import base64
import binascii
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gpuops.checkpoint.states import CheckpointError, CorruptError
from gpuops.worker.checkpointer.values import Decoder, loads

TensorOf = Callable[[str, str | None], torch.Tensor]
Extra = Mapping[str, Any]
_DEPTH_MAX = 100
_OTHER = 0  # a field of an optimizer's state that is no tensor


class Unfolded(dict[str, Any]):
    """The nested dicts, and in ``left_out`` what could not be put into them."""

    left_out: list[str]


def read_extras(texts: Sequence[bytes]) -> list[Extra]:
    """Return what each rank saved beside tensors; an empty mapping where that is not known to us.

    Raises:
        CorruptError: It is no JSON.
    """
    found: list[Extra] = []
    for rank, text in enumerate(texts):
        extra = loads(text or b"{}", f"the extra of rank {rank}")
        found.append(extra if isinstance(extra, dict) else {})
    return found


def unfold(extras: Sequence[Extra], names: Iterable[str], tensor_of: TensorOf) -> Unfolded:
    """Return the state whose ranks saved *extras* and which has the tensors called *names*.

    *tensor_of* is given the name of a tensor, and its dtype where an image holds it under another.

    Raises:
        CorruptError: The extras are not what the checkpointer writes.
    """
    made = Unfolded()
    made.left_out = []
    unused = dict.fromkeys(names)

    def take(what: object, path: str) -> torch.Tensor:
        name, dtype = what if isinstance(what, list) and len(what) == 2 else (what, None)
        if not isinstance(name, str):
            raise CorruptError(f"{path[:200]} is the tensor {name!r:.80}, which is not there")
        unused.pop(name, None)
        return tensor_of(name, dtype if isinstance(dtype, str) else None)

    keys = list(dict.fromkeys(key for extra in extras for key in _parts(extra)))
    owned = _owned(keys, list(unused))
    for key in keys:
        fragments = [_parts(extra)[key] for extra in extras if key in _parts(extra)]
        try:
            made[key] = _part(key, fragments, owned[key], Decoder(take), take)
        except CorruptError:
            raise
        except CheckpointError as exc:
            made.left_out.append(str(exc))
        except (KeyError, TypeError, ValueError, StopIteration, AttributeError) as exc:
            raise CorruptError(f"what was saved of {key} cannot be read: {exc!r:.200}") from exc
    _add_dcp(made, extras, unused, tensor_of)
    for name in unused:
        made.setdefault(name, tensor_of(name, None))
    return made


def _parts(extra: Extra) -> Mapping[str, Any]:
    parts = extra.get("parts")
    return parts if isinstance(parts, dict) else {}


def _owned(keys: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return for each part the names of its tensors: the longest key that they begin with."""
    owned: dict[str, list[str]] = {key: [] for key in keys}
    for name in names:
        whose = max((key for key in keys if name.startswith(f"{key}.")), key=len, default=None)
        if whose is not None:
            owned[whose].append(name)
    return owned


def _part(
    key: str,
    fragments: Sequence[Any],
    names: Sequence[str],
    decoder: Decoder,
    take: Callable[[object, str], torch.Tensor],
) -> Any:
    first = fragments[0]
    if isinstance(first, dict) and first.keys() == {"aliases", "others"}:
        return _model(key, fragments, names, decoder, take)
    if isinstance(first, dict) and first.keys() == {"fixed", "moving"}:
        return _optimizer(key, fragments, decoder, take)
    return plain(decoder.decode(first, key))


def _model(
    key: str,
    fragments: Sequence[Any],
    names: Sequence[str],
    decoder: Decoder,
    take: Callable[[object, str], torch.Tensor],
) -> dict[str, Any]:
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    for fragment in reversed(fragments):
        aliases.update(fragment["aliases"])
        others.update(fragment["others"])
    values = {fqn: plain(decoder.decode(value, f"{key}.{fqn}")) for fqn, value in others.items()}
    inside = {name for name in names if _is_below(name, (f"{key}.{fqn}" for fqn in others))}
    begin = len(key) + 1
    made = {name[begin:]: take(name, name) for name in names if name not in inside}
    for alias, fqn in aliases.items():
        if fqn in made:
            made[alias] = made[fqn]
    return {**made, **values}


def _is_below(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _optimizer(
    key: str,
    fragments: Sequence[Any],
    decoder: Decoder,
    take: Callable[[object, str], torch.Tensor],
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for fragment in fragments:
        values = iter(fragment["moving"]["values"])
        for name, fields in fragment["fixed"]["state"]:
            entry = _entry(f"{key}.state.{name}", fields, values, decoder, take)
            state.setdefault(name, entry)
        saved = zip(fragment["moving"]["groups"], fragment["fixed"]["params"], strict=True)
        for index, (settings, params) in enumerate(saved):
            if index == len(groups):
                decoded = decoder.decode(settings, f"{key}.param_groups.{index}")
                groups.append({**plain(decoded), "params": []})
            known = groups[index]["params"]
            known += [name for name in params if name not in known]
    return {"state": state, "param_groups": groups}


def _entry(
    root: str,
    fields: Any,
    values: Iterator[Any],
    decoder: Decoder,
    take: Callable[[object, str], torch.Tensor],
) -> Any:
    if fields is None:
        return plain(decoder.decode(next(values), root))
    made: dict[str, Any] = {}
    for field, kind, *more in fields:
        path = f"{root}.{field}"
        if kind == _OTHER:
            made[field] = plain(decoder.decode(next(values), path))
        else:
            made[field] = take([path, more[0]] if more and more[0] else path, path)
    return made


def _add_dcp(
    made: Unfolded, extras: Sequence[Extra], unused: dict[str, None], tensor_of: TensorOf
) -> None:
    """Add what the storage writer for DCP saved: values by name, and paths of all names."""
    for extra in extras:
        saved = extra.get("dcp")
        if not isinstance(saved, dict):
            continue
        paths = {name: tuple(path) for name, path in saved["paths"].items()}
        for name, text in saved["values"].items():
            try:
                value = safe_value(base64.b64decode(text, validate=True), name)
            except binascii.Error as exc:
                raise CorruptError(f"the value {name!r:.200} cannot be read: {exc}") from exc
            except CheckpointError as exc:
                made.left_out.append(str(exc))
            else:
                put(made, paths.get(name, (name,)), value)
        for name in [name for name in unused if name in paths]:
            put(made, paths[name], tensor_of(name, None))
            del unused[name]
    for key, value in made.items():
        made[key] = lists_of(value)


def safe_value(data: bytes, name: str, *, trust: bool = False) -> Any:
    """Return the value in the ``torch.save`` bytes *data*; nothing in it is run.

    Raises:
        CheckpointError: It is of a class that torch does not load without running code.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trust)
    except Exception as exc:  # boundary: torch.load raises whatever hostile bytes make it raise
        if trust:
            raise CheckpointError(
                f"the value {name!r:.200} cannot be loaded: {exc!r:.200}"
            ) from exc
        raise CheckpointError(
            f"the value {name!r:.200} is refused: it is not made of tensors and plain values"
        ) from exc


def put(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Set ``tree[path[0]][path[1]]… = value``; numbers are keys for now, see `lists_of`."""
    if len(path) > _DEPTH_MAX:
        raise CorruptError(f"a name of {len(path)} parts: {path[:5]!r:.200} …")
    for key in path[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise CorruptError(f"{'.'.join(map(str, path))[:200]!r} lies inside of a value")
        tree = below
    tree[path[-1]] = value


def lists_of(value: Any) -> Any:
    """Return *value* with each dict of the keys 0, 1, … n-1 as a list."""
    if not isinstance(value, dict):
        return value
    made = {key: lists_of(item) for key, item in value.items()}
    if made and all(type(key) is int for key in made) and set(made) == set(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made


def plain(value: Any) -> Any:
    """Return *value* made of types that ``torch.load`` admits with ``weights_only=True``."""
    made = value
    if isinstance(value, Mapping):
        made = {plain(key): plain(item) for key, item in value.items()}
    elif isinstance(value, list | deque):
        made = [plain(item) for item in value]
    elif isinstance(value, tuple) and not isinstance(value, torch.Size):
        made = tuple(plain(item) for item in value)
    elif isinstance(value, set | frozenset):
        made = {plain(item) for item in value}
    elif isinstance(value, io.BytesIO):
        made = value.getvalue()
    elif isinstance(value, bytearray):
        made = bytes(value)
    elif type(value).__module__ == "numpy":
        made = _of_numpy(value)
    return made


def _of_numpy(value: Any) -> Any:
    if value.ndim == 0:
        return value.item()
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # text, dates, other byte orders
        return value.tolist()
