"""The parameters, buffers and extra states of modules, by names without wrappers.

DistributedDataParallel, torch.compile and activation checkpointing insert names of their own into
the path of a parameter; a state that is saved under one of them loads without it, and vice versa.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from gpuops.checkpoint.types import (
    CheckpointError,
    StructureError,
)
from gpuops.convert.values import StateEncoder, dumps
from gpuops.worker.state.adapter import (
    AdapterSnapshot,
    FinishLoad,
    NameCache,
    StateDecoder,
)
from gpuops.worker.state.saved_state import SavedState

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_WRAPPER_TYPES = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def canonical_names(module: nn.Module, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the name without wrappers of each of *keys*, those of the module's state dict."""
    clean = _clean_prefixes(module)
    return tuple(_canonical(key, clean) for key in keys)


def _canonical(key: str, clean: Mapping[str, str]) -> str:
    head, _, last = key.rpartition(".")
    prefix = clean.get(head)
    if prefix is None:  # a key that the module itself made
        prefix = "".join(
            f"{component}."
            for component in head.split(".")
            if component and component not in _WRAPPER_NAMES
        )
    return prefix + last


def _clean_prefixes(module: nn.Module) -> dict[str, str]:
    """Return the prefix, without wrappers, of the names in each module, by its path."""
    clean = {"": ""}
    modules = dict(module.named_modules(remove_duplicate=False))
    for path in modules:
        if not path:
            continue
        parent, _, name = path.rpartition(".")
        is_wrapped = name in _WRAPPER_NAMES or (
            name == "module" and isinstance(modules.get(parent), _WRAPPER_TYPES)
        )
        begin = clean.get(parent, "")
        clean[path] = begin if is_wrapped else f"{begin}{name}."
    return clean


_FSDP1 = "FullyShardedDataParallel"
_SHOWN = 5


class ModelAdapter:
    """One module, or this rank's parts of one, by the names without wrappers.

    A tensor with several names (tied weights) is stored once. Where ``state_dict`` returns the live
    tensors, as it does unless it was overridden, they are filled in place; other values are passed
    to ``load_state_dict``.
    """

    def __init__(
        self, key: str, modules: Sequence[nn.Module], *, allow_pickle: bool = False
    ) -> None:
        """Raise CheckpointError for a module whose state is not separable by rank."""
        for module in modules:
            _reject_flattened(module)
        self.key = key
        self.modules = tuple(modules)
        self._allow_pickle = allow_pickle
        self._keys: tuple[tuple[str, ...], ...] | None = None
        self._is_tensor: list[bool] = []
        self._stored: list[int] = []
        self._aliases: list[tuple[int, int]] = []
        self._names: tuple[str, ...] = ()
        self._fqns: tuple[str, ...] = ()
        self._fragment = b""
        self._name_cache = NameCache()

    def read(self) -> AdapterSnapshot:
        """Return the state. The caller determines which tensors an optimizer owns."""
        states = self._states()
        values = [value for state in states for value in state.values()]
        kinds = list(map(isinstance, values, repeat(torch.Tensor)))
        if (
            tuple(map(tuple, states)) != self._keys
            or kinds != self._is_tensor
            or any(values[a] is not values[b] for a, b in self._aliases)
        ):
            self._update_names(states, values, kinds)
        whole = len(self._stored) == len(values)
        tensors = values if whole else [values[index] for index in self._stored]
        if all(kinds):
            return AdapterSnapshot(self._names, tensors, self._fragment)
        return self._with_others(values, tensors)

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each tensor of the modules, by its `id`; the first of several."""
        states = self._states()
        found: dict[int, str] = {}
        for fqn, (_, _, value) in zip(self._fqns_of(states), _entries(states), strict=True):
            found.setdefault(id(value), fqn)
        return found

    def plan_load(self, source: SavedState) -> FinishLoad:
        """Request each tensor of the modules, under its own name or the one that it was tied to."""
        states = self._states()
        fqns = self._fqns_of(states)
        aliases, others = _merge_fragments(source.fragments(self.key))
        self._check_names(fqns, source, aliases, others)
        live = {id(t) for m in self.modules for t in (*m.parameters(), *m.buffers())}
        changed: list[dict[str, Any]] = [{} for _ in states]
        decoder = StateDecoder(source, allow_pickle=self._allow_pickle)
        for fqn, (index, raw, value) in zip(fqns, _entries(states), strict=True):
            if not isinstance(value, torch.Tensor):
                root = f"{self.key}.{fqn}"
                changed[index][raw] = decoder.decode(others[fqn], root)
                continue
            target = value
            if id(value) not in live:
                target = changed[index][raw] = value.detach().clone()
            source.request(f"{self.key}.{aliases.get(fqn, fqn)}", target)
        return lambda: self._load(states, changed)

    def _load(self, states: Sequence[Mapping[str, Any]], changed: list[dict[str, Any]]) -> None:
        for module, state, values in zip(self.modules, states, changed, strict=True):
            if values:
                module.load_state_dict({**state, **values})

    def _states(self) -> list[Mapping[str, Any]]:
        return [_state_of(module) for module in self.modules]

    def _fqns_of(self, states: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        each = [
            canonical_names(module, state)
            for module, state in zip(self.modules, states, strict=True)
        ]
        joined = tuple(fqn for fqns in each for fqn in fqns)
        if len(self.modules) > 1 and len(set(joined)) < len(joined):
            joined = tuple(f"{i}.{fqn}" for i, fqns in enumerate(each) for fqn in fqns)
        if len(set(joined)) < len(joined):
            twice = sorted({fqn for fqn in joined if joined.count(fqn) > 1})
            raise CheckpointError(
                f"two tensors of the model are called {_join_names(twice, self.key)}"
            )
        return joined

    def _update_names(
        self, states: Sequence[Mapping[str, Any]], values: list[Any], is_tensor_flags: list[bool]
    ) -> None:
        fqns = self._fqns_of(states)
        first: dict[int, int] = {}
        aliases: list[tuple[int, int]] = []
        for index, value in enumerate(values):
            if is_tensor_flags[index] and first.setdefault(id(value), index) != index:
                aliases.append((index, first[id(value)]))
        dropped = {index for index, _ in aliases}
        self._keys, self._fqns = tuple(map(tuple, states)), fqns
        self._is_tensor, self._aliases = is_tensor_flags, aliases
        self._stored = [
            i for i, is_tensor in enumerate(is_tensor_flags) if is_tensor and i not in dropped
        ]
        self._names = tuple(f"{self.key}.{fqns[index]}" for index in self._stored)
        self._fragment = dumps(self._fragment_json({}))

    def _fragment_json(self, others: Mapping[str, object]) -> dict[str, object]:
        fqns = self._fqns
        return {"aliases": {fqns[a]: fqns[b] for a, b in self._aliases}, "others": others}

    def _with_others(self, values: list[Any], tensors: Sequence[Any]) -> AdapterSnapshot:
        encoder = StateEncoder(allow_pickle=self._allow_pickle)
        others = {
            fqn: encoder.encoder.encode(value, f"{self.key}.{fqn}")
            for fqn, value, is_tensor in zip(self._fqns, values, self._is_tensor, strict=True)
            if not is_tensor
        }
        fragment = dumps(self._fragment_json(others))
        if not encoder.names:
            return AdapterSnapshot(self._names, tensors, fragment)
        names = self._name_cache.intern((*self._names, *encoder.names))
        return AdapterSnapshot(names, [*tensors, *encoder.tensors], fragment)

    def _check_names(
        self,
        fqns: Iterable[str],
        source: SavedState,
        aliases: Mapping[str, str],
        others: Mapping[str, Any],
    ) -> None:
        begin = f"{self.key}."
        saved = {name.removeprefix(begin) for name in source.names(begin)}
        own_names = set(fqns)
        missing = sorted(own_names - saved - aliases.keys() - others.keys())
        if missing:
            raise StructureError(
                f"the checkpoint has no {_join_names(missing, self.key)}; "
                "restore into a model of the structure that was saved"
            )
        below = tuple(f"{fqn}." for fqn in others)
        surplus = sorted(
            name for name in saved - own_names if not (below and name.startswith(below))
        ) or sorted(aliases.keys() - own_names)
        if surplus and source.is_own:
            raise StructureError(
                f"the checkpoint has {_join_names(surplus, self.key)}, which the model has not; "
                "restore into a model of the structure that was saved"
            )


def _reject_flattened(module: nn.Module) -> None:
    """Raise CheckpointError for FSDP1 and ZeRO 3: their parameters are pieces without a place."""
    for path, child in module.named_modules():
        if any(kind.__name__ == _FSDP1 for kind in type(child).__mro__):
            raise CheckpointError(
                f"the model{' at ' if path else ''}{path} is a {_FSDP1} (FSDP1), which is not "
                "saved: shard it with fully_shard (FSDP2)"
            )
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_fsdp_flattened", False):
            raise CheckpointError(
                f"the model's {name} is sharded by a {_FSDP1} (FSDP1), which is not saved: shard "
                "the model with fully_shard (FSDP2)"
            )
        if hasattr(parameter, "ds_id"):
            raise CheckpointError(
                f"the model's {name} is partitioned by DeepSpeed (ZeRO 3): save it with the "
                "engine's save_checkpoint"
            )


def _state_of(module: nn.Module) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    except TypeError:  # an overridden state_dict without parameters
        state = module.state_dict()
    return state


def _entries(states: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, Any]]:
    return [(i, raw, value) for i, state in enumerate(states) for raw, value in state.items()]


def _merge_fragments(fragments: Iterable[Any]) -> tuple[dict[str, str], dict[str, Any]]:
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    for fragment in fragments:
        if isinstance(fragment, dict):
            aliases = {**fragment.get("aliases", {}), **aliases}
            others = {**fragment.get("others", {}), **others}
    return aliases, others


def _join_names(names: Sequence[str], key: str) -> str:
    shown = ", ".join(f"{key}.{name}" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
