"""Nested dicts of tensors and values as a state: the reverse of `unfold`."""

# ruff: noqa: ANN401 what users keep in a state may be anything

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuops.convert.state_encoder import STATE_FORMAT, StateEncoder
from gpuops.convert.tensors import needs_carrier
from gpuops.convert.values import dumps

_MODEL = "model"  # the key that `gpuops.Checkpointer` gives to a module; of several "model.NAME"
_OPTIMIZER = {"state", "param_groups"}
# As an optimizer's fragment says it: no tensor; where its parameter is; on the host.
_NOT_TENSOR, _ON_PARAMETER_DEVICE, _ON_HOST = 0, 1, 2


@dataclass(slots=True)
class FlatState:
    """The tensors of a state by name, what is saved beside them, and what to tell the user."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metadata_blob: bytes = b""
    notes: list[str] = field(default_factory=list)


def from_nested(tree: Mapping[str, Any], step: int) -> FlatState:
    """Return the state of one rank that *tree* is of, as `gpuops.Checkpointer` would save it.

    The random generators are seeded with *step*: nobody knows what they were.

    Raises:
        CheckpointError: Something in it cannot be stored; says where it is.
    """
    flat = FlatState()
    encoder = StateEncoder(allow_pickle=False)
    parts: dict[str, Any] = {}
    for key, value in tree.items():
        name = str(key)
        if _is_model(name, value):
            parts[name] = _model(name, value, encoder)
        elif _is_optimizer(value):
            parts[name] = _optimizer(name, value, encoder, flat.notes)
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


def _model(key: str, value: Mapping[str, Any], encoder: StateEncoder) -> dict[str, Any]:
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


def _optimizer(key: str, value: Mapping[str, Any], encoder: StateEncoder, notes: list[str]) -> Any:
    names = _names_of_parameters(value)
    if names is None:
        notes.append(
            f"{key} has its parameters by numbers, not by names: it is kept, but nothing can be "
            "restored from it; save it by torch.distributed.checkpoint.state_dict's functions"
        )
        return encoder.encoder.encode(value, key)
    state: list[list[Any]] = []
    values: list[Any] = []
    # Where torch's own load_state_dict puts the count of steps.
    on_device = any(g.get("capturable") or g.get("fused") for g in value["param_groups"])
    for number, entry in value["state"].items():
        name = names.get(number, number)
        fields = _fields(f"{key}.state.{name}", entry, encoder, values, step_on_device=on_device)
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


def _fields(
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
    """Return the names by what stands for the parameters; None where there are numbers only."""
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
