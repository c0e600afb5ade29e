"""A state as nested dicts of tensors and values, named as torch's own functions do it, and back.

A model is ``{name: tensor}``; an optimizer ``{"state": {name: {…}}, "param_groups": […]}`` by the
names of its parameters, like ``torch.distributed.checkpoint.state_dict``; other parts are what
their ``state_dict`` returned.
"""

# ruff: noqa: ANN401 users' values have any type

import base64
import binascii
import io
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.tensors import needs_carrier
from gpuops.convert.values import STATE_FORMAT, StateEncoder, ValueDecoder, dumps, loads

GetTensor = Callable[[str, str | None], torch.Tensor]
RankMetadata = Mapping[str, Any]
_DEPTH_MAX = 100
_MODEL = "model"  # the key that `gpuops.Checkpointer` gives to a module; of several "model.NAME"
_OPTIMIZER = {"state", "param_groups"}
# Of a field of an optimizer's state: not a tensor; on the device of its parameter; on the host.
_NOT_TENSOR, _ON_PARAMETER_DEVICE, _ON_HOST = 0, 1, 2


class NestedState(dict[str, Any]):
    """The nested dicts; ``omitted``: what they cannot represent."""

    omitted: list[str]


def parse_metadata_blobs(blobs: Sequence[bytes]) -> list[RankMetadata]:
    """Return the metadata of each rank; empty where it is not of gpuops.

    Raises:
        CorruptError: It is not JSON.
    """
    found: list[RankMetadata] = []
    for rank, text in enumerate(blobs):
        extra = loads(text or b"{}", f"the extra of rank {rank}")
        found.append(extra if isinstance(extra, dict) else {})
    return found


def to_nested(
    rank_metadata: Sequence[RankMetadata], names: Iterable[str], tensor_of: GetTensor
) -> NestedState:
    """Return the state of ranks that saved *rank_metadata*, with the tensors called *names*.

    *tensor_of* gets the name of a tensor, and its dtype where an image stores it as another one.

    Raises:
        CorruptError: The metadata is not what the checkpointer writes.
    """
    nested = NestedState()
    nested.omitted = []
    unused = dict.fromkeys(names)

    def take(what: object, path: str) -> torch.Tensor:
        name, dtype = what if isinstance(what, list) and len(what) == 2 else (what, None)
        if not isinstance(name, str):
            raise CorruptError(f"{path[:200]} is the tensor {name!r:.80}, which is not there")
        unused.pop(name, None)
        return tensor_of(name, dtype if isinstance(dtype, str) else None)

    keys = list(dict.fromkeys(key for extra in rank_metadata for key in _parts(extra)))
    names_by_part = _names_by_part(keys, list(unused))
    for key in keys:
        fragments = [_parts(extra)[key] for extra in rank_metadata if key in _parts(extra)]
        try:
            nested[key] = _nested_part(key, fragments, names_by_part[key], ValueDecoder(take), take)
        except CorruptError:
            raise
        except CheckpointError as exc:
            nested.omitted.append(str(exc))
        except (KeyError, TypeError, ValueError, StopIteration, AttributeError) as exc:
            raise CorruptError(f"the saved state of {key} cannot be read: {exc!r:.200}") from exc
    _add_dcp(nested, rank_metadata, unused, tensor_of)
    for name in unused:
        nested.setdefault(name, tensor_of(name, None))
    return nested


def _parts(metadata: RankMetadata) -> Mapping[str, Any]:
    parts = metadata.get("parts")
    return parts if isinstance(parts, dict) else {}


def _names_by_part(part_keys: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the tensors of each part: by the longest key that they begin with."""
    owned: dict[str, list[str]] = {key: [] for key in part_keys}
    for name in names:
        owner_key = max(
            (key for key in part_keys if name.startswith(f"{key}.")), key=len, default=None
        )
        if owner_key is not None:
            owned[owner_key].append(name)
    return owned


def _nested_part(
    key: str,
    fragments: Sequence[Any],
    names: Sequence[str],
    decoder: ValueDecoder,
    get_tensor: Callable[[object, str], torch.Tensor],
) -> Any:
    first = fragments[0]
    if isinstance(first, dict) and first.keys() == {"aliases", "others"}:
        return _nested_model(key, fragments, names, decoder, get_tensor)
    if isinstance(first, dict) and first.keys() == {"fixed", "moving"}:
        return _nested_optimizer(key, fragments, decoder, get_tensor)
    return to_plain(decoder.decode(first, key))


def _nested_model(
    key: str,
    fragments: Sequence[Any],
    names: Sequence[str],
    decoder: ValueDecoder,
    get_tensor: Callable[[object, str], torch.Tensor],
) -> dict[str, Any]:
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    for fragment in reversed(fragments):
        aliases.update(fragment["aliases"])
        others.update(fragment["others"])
    values = {fqn: to_plain(decoder.decode(value, f"{key}.{fqn}")) for fqn, value in others.items()}
    paths = tuple(f"{key}.{fqn}." for fqn in others)
    inside = {name for name in names if f"{name}.".startswith(paths)}
    begin = len(key) + 1
    made = {name[begin:]: get_tensor(name, name) for name in names if name not in inside}
    for alias, fqn in aliases.items():
        if fqn in made:
            made[alias] = made[fqn]
    return {**made, **values}


def _nested_optimizer(
    key: str,
    fragments: Sequence[Any],
    decoder: ValueDecoder,
    get_tensor: Callable[[object, str], torch.Tensor],
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for fragment in fragments:
        values = iter(fragment["moving"]["values"])
        for name, fields in fragment["fixed"]["state"]:
            entry = _nested_entry(f"{key}.state.{name}", fields, values, decoder, get_tensor)
            state.setdefault(name, entry)
        saved = zip(fragment["moving"]["groups"], fragment["fixed"]["params"], strict=True)
        for index, (settings, params) in enumerate(saved):
            if index == len(groups):
                decoded = decoder.decode(settings, f"{key}.param_groups.{index}")
                groups.append({**to_plain(decoded), "params": []})
            known = groups[index]["params"]
            known += [name for name in params if name not in known]
    return {"state": state, "param_groups": groups}


def _nested_entry(
    root: str,
    fields: Any,
    values: Iterator[Any],
    decoder: ValueDecoder,
    get_tensor: Callable[[object, str], torch.Tensor],
) -> Any:
    if fields is None:
        return to_plain(decoder.decode(next(values), root))
    made: dict[str, Any] = {}
    for name, kind, *more in fields:
        path = f"{root}.{name}"
        if kind == _NOT_TENSOR:
            made[name] = to_plain(decoder.decode(next(values), path))
        else:
            made[name] = get_tensor([path, more[0]] if more and more[0] else path, path)
    return made


def _add_dcp(
    nested: NestedState,
    rank_metadata: Sequence[RankMetadata],
    unused: dict[str, None],
    tensor_of: GetTensor,
) -> None:
    """Add what the storage writer for DCP saved: values by name, and paths of all names."""
    for metadata in rank_metadata:
        saved = metadata.get("dcp")
        if not isinstance(saved, dict):
            continue
        paths = {name: tuple(path) for name, path in saved["paths"].items()}
        for name, text in saved["values"].items():
            try:
                value = load_value(base64.b64decode(text, validate=True), name)
            except binascii.Error as exc:
                raise CorruptError(f"the value {name!r:.200} cannot be read: {exc}") from exc
            except CheckpointError as exc:
                nested.omitted.append(str(exc))
            else:
                set_nested(nested, paths.get(name, (name,)), value)
        for name in [name for name in unused if name in paths]:
            set_nested(nested, paths[name], tensor_of(name, None))
            del unused[name]
    for key, value in nested.items():
        nested[key] = dicts_to_lists(value)


def load_value(data: bytes, name: str, *, trust: bool = False) -> Any:
    """Return the value in the ``torch.save`` bytes *data*, without running code in it.

    Raises:
        CheckpointError: It is of a class that torch does not load without running code.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trust)
    except Exception as exc:  # boundary: hostile bytes make torch.load raise anything
        if trust:
            raise CheckpointError(
                f"the value {name!r:.200} cannot be loaded: {exc!r:.200}"
            ) from exc
        raise CheckpointError(
            f"the value {name!r:.200} is refused: it has more than tensors and plain values"
        ) from exc


def set_nested(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Set ``tree[path[0]][path[1]]… = value``; numbers are keys for now, see `dicts_to_lists`."""
    if len(path) > _DEPTH_MAX:
        raise CorruptError(f"a name of {len(path)} parts: {path[:5]!r:.200} …")
    for key in path[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise CorruptError(f"{'.'.join(map(str, path))[:200]!r} lies inside of a value")
        tree = below
    tree[path[-1]] = value


def dicts_to_lists(value: Any) -> Any:
    """Return *value* with each dict of the keys 0, 1, … n-1 as a list."""
    if not isinstance(value, dict):
        return value
    made = {key: dicts_to_lists(item) for key, item in value.items()}
    if made and all(type(key) is int for key in made) and set(made) == set(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made


def to_plain(value: Any) -> Any:
    """Return *value* as types that ``torch.load`` admits with ``weights_only=True``."""
    made = value
    if isinstance(value, Mapping):
        made = {to_plain(key): to_plain(item) for key, item in value.items()}
    elif isinstance(value, list | deque):
        made = [to_plain(item) for item in value]
    elif isinstance(value, tuple) and not isinstance(value, torch.Size):
        made = tuple(to_plain(item) for item in value)
    elif isinstance(value, set | frozenset):
        made = {to_plain(item) for item in value}
    elif isinstance(value, io.BytesIO):
        made = value.getvalue()
    elif isinstance(value, bytearray):
        made = bytes(value)
    elif type(value).__module__ == "numpy":
        made = _plain_numpy(value)
    return made


def _plain_numpy(value: Any) -> Any:
    if value.ndim == 0:
        return value.item()
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # text, dates, other byte orders
        return value.tolist()


@dataclass(slots=True)
class FlatState:
    """The tensors of a state by name, the metadata saved with them, and notes for the user."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metadata_blob: bytes = b""
    notes: list[str] = field(default_factory=list)


def from_nested(tree: Mapping[str, Any], step: int) -> FlatState:
    """Return *tree* as the state of one rank, as `gpuops.Checkpointer` would save it.

    The random generators are seeded with *step*: their states are not known.

    Raises:
        CheckpointError: Something in it cannot be stored; the message says where.
    """
    flat = FlatState()
    encoder = StateEncoder(allow_pickle=False)
    parts: dict[str, Any] = {}
    for key, value in tree.items():
        name = str(key)
        if _is_model(name, value):
            parts[name] = _flat_model(name, value, encoder)
        elif _is_optimizer(value):
            parts[name] = _flat_optimizer(name, value, encoder, flat.notes)
        else:
            parts[name] = encoder.encoder.encode(value, name)
    flat.tensors = dict(zip(encoder.names, encoder.tensors, strict=True))
    metadata = {
        "format": STATE_FORMAT,
        "step": step,
        "rank": 0,
        "world": 1,
        "torch": str(torch.__version__),
        "rng": encoder.encoder.encode(_seeded_rng(step), "rng"),
        "parts": parts,
    }
    flat.metadata_blob = dumps(metadata)
    return flat


def _seeded_rng(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "python": random.Random(step).getstate(),  # noqa: S311 a training's randomness
        "torch": generator.get_state().numpy().tobytes(),
    }


def _is_model(key: str, value: Any) -> bool:
    named = key == _MODEL or key.startswith(f"{_MODEL}.")
    return named and isinstance(value, dict) and all(type(fqn) is str for fqn in value)


def _flat_model(key: str, value: Mapping[str, Any], encoder: StateEncoder) -> dict[str, Any]:
    others = {}
    for fqn, item in value.items():
        if isinstance(item, torch.Tensor):
            encoder.put(item, f"{key}.{fqn}")
        else:
            others[fqn] = encoder.encoder.encode(item, f"{key}.{fqn}")
    return {"aliases": {}, "others": others}


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _OPTIMIZER
        and isinstance(value["state"], dict)
        and isinstance(value["param_groups"], list)
        and all(isinstance(group, dict) for group in value["param_groups"])
    )


def _flat_optimizer(
    key: str, value: Mapping[str, Any], encoder: StateEncoder, notes: list[str]
) -> Any:
    names = _names_of_parameters(value)
    if names is None:
        notes.append(
            f"{key} has its parameters by numbers, not by names: it cannot be restored; "
            "save it with torch.distributed.checkpoint.state_dict's functions"
        )
        return encoder.encoder.encode(value, key)
    state: list[list[Any]] = []
    values: list[Any] = []
    # Torch's own load_state_dict puts the count of steps there.
    on_device = any(g.get("capturable") or g.get("fused") for g in value["param_groups"])
    for number, entry in value["state"].items():
        name = names.get(number, number)
        fields = _flat_fields(
            f"{key}.state.{name}", entry, encoder, values, step_on_device=on_device
        )
        state.append([name, fields])
    params = [
        [names.get(each, each) for each in group["params"]] for group in value["param_groups"]
    ]
    settings = [
        {k: v for k, v in group.items() if k not in {"params", "param_names"}}
        for group in value["param_groups"]
    ]
    groups = [
        encoder.encoder.encode(item, f"{key}.param_groups.{index}")
        for index, item in enumerate(settings)
    ]
    return {
        "fixed": {"state": state, "params": params},
        "moving": {"values": values, "groups": groups},
    }


def _flat_fields(
    root: str, entry: Any, encoder: StateEncoder, values: list[Any], *, step_on_device: bool
) -> list[list[Any]] | None:
    if not isinstance(entry, dict) or not all(type(name) is str for name in entry):
        values.append(encoder.encoder.encode(entry, root))
        return None
    fields: list[list[Any]] = []
    for name, item in entry.items():
        if not isinstance(item, torch.Tensor):
            fields.append([name, _NOT_TENSOR])
            values.append(encoder.encoder.encode(item, f"{root}.{name}"))
            continue
        encoder.put(item, f"{root}.{name}")
        found: list[Any] = [
            name,
            _ON_HOST if name == "step" and not step_on_device else _ON_PARAMETER_DEVICE,
        ]
        if needs_carrier(item.dtype):
            found += [str(item.dtype).removeprefix("torch."), None]
        fields.append(found)
    return fields


def _names_of_parameters(value: Mapping[str, Any]) -> dict[Any, str] | None:
    """Return the parameters' names by their placeholders; None where there are only numbers."""
    names: dict[Any, str] = {}
    for group in value["param_groups"]:
        params, known = group.get("params"), group.get("param_names")
        if not isinstance(params, list):
            return None
        if isinstance(known, list) and len(known) == len(params):
            names.update(zip(params, map(str, known), strict=True))
        elif all(type(each) is str for each in params):
            names.update({each: each for each in params})
        else:
            return None
    if not all(type(each) is str or each in names for each in value["state"]):
        return None
    return names
