"""The parameters, buffers and extra states of modules."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer.names import canonical_names
from gpuops.worker.checkpointer.part import Drain, Finish, Reading, Remembered, Sink, Source
from gpuops.worker.checkpointer.values import dumps

_SHOWN = 5


class ModelPart:
    """One module, or the parts of one that this rank has, by the names without wrappers.

    A tensor that stands under several names (tied weights) is stored once. Where ``state_dict``
    gives the live tensors, as it does unless somebody made it do otherwise, they are filled in
    place; whatever else it gives goes back through ``load_state_dict``.
    """

    def __init__(
        self, key: str, modules: Sequence[nn.Module], *, allow_pickle: bool = False
    ) -> None:
        """Raise CheckpointError for a module whose state cannot be told apart by rank."""
        for module in modules:
            _refuse_fsdp1(module)
        self.key = key
        self.modules = tuple(modules)
        self._allow_pickle = allow_pickle
        self._keys: tuple[tuple[str, ...], ...] | None = None
        self._kinds: list[bool] = []
        self._kept: list[int] = []
        self._aliases: list[tuple[int, int]] = []
        self._names: tuple[str, ...] = ()
        self._fqns: tuple[str, ...] = ()
        self._fragment = b""
        self._joined = Remembered()

    def read(self) -> Reading:
        """Return the state. Which of the tensors an optimizer owns is for the caller to say."""
        states = self._states()
        values = [value for state in states for value in state.values()]
        kinds = list(map(isinstance, values, repeat(torch.Tensor)))
        if (
            tuple(map(tuple, states)) != self._keys
            or kinds != self._kinds
            or any(values[a] is not values[b] for a, b in self._aliases)
        ):
            self._arrange(states, values, kinds)
        whole = len(self._kept) == len(values)
        tensors = values if whole else [values[index] for index in self._kept]
        if all(kinds):
            return Reading(self._names, tensors, self._fragment)
        return self._with_others(values, tensors)

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each tensor of the modules, by its `id`; the first of several."""
        states = self._states()
        found: dict[int, str] = {}
        for fqn, (_, _, value) in zip(self._fqns_of(states), _entries(states), strict=True):
            found.setdefault(id(value), fqn)
        return found

    def aim(self, source: Source) -> Finish:
        """Want each tensor of the modules, under its own name or the one that it was tied to."""
        states = self._states()
        fqns = self._fqns_of(states)
        aliases, others = _merged(source.fragments(self.key))
        self._check_names(fqns, source, aliases, others)
        live = {id(tensor) for module in self.modules for tensor in _tensors(module)}
        changed: list[dict[str, Any]] = [{} for _ in states]
        drain = Drain(source, allow_pickle=self._allow_pickle)
        for fqn, (index, raw, value) in zip(fqns, _entries(states), strict=True):
            if not isinstance(value, torch.Tensor):
                root = f"{self.key}.{fqn}"
                changed[index][raw] = drain.decode(others[fqn], root)
                continue
            target = value
            if id(value) not in live:
                target = changed[index][raw] = value.detach().clone()
            source.want(f"{self.key}.{aliases.get(fqn, fqn)}", target)
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
            raise CheckpointError(f"two tensors of the model are called {_listed(twice, self.key)}")
        return joined

    def _arrange(
        self, states: Sequence[Mapping[str, Any]], values: list[Any], kinds: list[bool]
    ) -> None:
        fqns = self._fqns_of(states)
        first: dict[int, int] = {}
        aliases: list[tuple[int, int]] = []
        for index, value in enumerate(values):
            if kinds[index] and first.setdefault(id(value), index) != index:
                aliases.append((index, first[id(value)]))
        dropped = {index for index, _ in aliases}
        self._keys, self._fqns = tuple(map(tuple, states)), fqns
        self._kinds, self._aliases = kinds, aliases
        self._kept = [i for i, is_tensor in enumerate(kinds) if is_tensor and i not in dropped]
        self._names = tuple(f"{self.key}.{fqns[index]}" for index in self._kept)
        self._fragment = dumps(self._json({}))

    def _json(self, others: Mapping[str, object]) -> dict[str, object]:
        fqns = self._fqns
        return {"aliases": {fqns[a]: fqns[b] for a, b in self._aliases}, "others": others}

    def _with_others(self, values: list[Any], tensors: Sequence[Any]) -> Reading:
        sink = Sink(allow_pickle=self._allow_pickle)
        others = {
            fqn: sink.encoder.encode(value, f"{self.key}.{fqn}")
            for fqn, value, is_tensor in zip(self._fqns, values, self._kinds, strict=True)
            if not is_tensor
        }
        fragment = dumps(self._json(others))
        if not sink.names:
            return Reading(self._names, tensors, fragment)
        names = self._joined.same((*self._names, *sink.names))
        return Reading(names, [*tensors, *sink.tensors], fragment)

    def _check_names(
        self,
        fqns: Iterable[str],
        source: Source,
        aliases: Mapping[str, str],
        others: Mapping[str, Any],
    ) -> None:
        begin = f"{self.key}."
        saved = {name.removeprefix(begin) for name in source.names(begin)}
        own = set(fqns)
        missing = sorted(own - saved - aliases.keys() - others.keys())
        if missing:
            raise CheckpointError(
                f"the checkpoint has no {_listed(missing, self.key)}; "
                "restore into a model of the structure that was saved"
            )
        below = tuple(f"{fqn}." for fqn in others)
        surplus = sorted(
            name for name in saved - own if not (below and name.startswith(below))
        ) or sorted(aliases.keys() - own)
        if surplus and source.is_own:
            raise CheckpointError(
                f"the checkpoint has {_listed(surplus, self.key)}, which the model has not; "
                "restore into a model of the structure that was saved"
            )


def _refuse_fsdp1(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if type(child).__name__ == "FullyShardedDataParallel":
            raise CheckpointError(
                f"the model{' at ' if name else ''}{name} is a FullyShardedDataParallel (FSDP1), "
                "which torch has replaced; shard it with fully_shard (FSDP2)"
            )


def _state_of(module: nn.Module) -> Mapping[str, Any]:
    try:
        kept: Mapping[str, Any] = module.state_dict(keep_vars=True)
    except TypeError:  # a state_dict of somebody's own, which takes nothing
        kept = module.state_dict()
    return kept


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _entries(states: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, Any]]:
    return [(i, raw, value) for i, state in enumerate(states) for raw, value in state.items()]


def _merged(fragments: Iterable[Any]) -> tuple[dict[str, str], dict[str, Any]]:
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    for fragment in fragments:
        if isinstance(fragment, dict):
            aliases = {**fragment.get("aliases", {}), **aliases}
            others = {**fragment.get("others", {}), **others}
    return aliases, others


def _listed(names: Sequence[str], key: str) -> str:
    shown = ", ".join(f"{key}.{name}" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
