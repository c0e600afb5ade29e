"""Make the parts of a state from the user's arguments."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gpuops.checkpoint.types import ArgumentError, CheckpointError
from gpuops.worker.state.adapter import StateAdapter
from gpuops.worker.state.model import ModelAdapter
from gpuops.worker.state.objects import GeneratorAdapter, ObjectAdapter, ScalerAdapter, ValueAdapter
from gpuops.worker.state.optimizer import OptimizerAdapter
from gpuops.worker.state.zero_optimizer import ZeroOptimizerAdapter, is_zero

_FILLED_IN_PLACE = (Mapping, torch.Tensor, torch.Generator)
"""Types that are filled in place, and need no mapping to be put back into."""


@contextmanager
def refused() -> Iterator[None]:
    """Raise ArgumentError for a CheckpointError: the next attempt would give the same arguments."""
    try:
        yield
    except CheckpointError as exc:
        raise ArgumentError(str(exc)) from None


class StateAssembler:
    """The arguments of `Checkpointer`, as parts in the order in which they are restored.

    Each argument is one object, a list or a mapping of them. A list of modules is one model of
    which this rank has these parts (pipeline parallelism); a mapping names different models.
    """

    def __init__(self, *, allow_pickle: bool, warn: Callable[[str], None]) -> None:
        self._allow_pickle = allow_pickle
        self._warn = warn
        self._models: list[ModelAdapter] = []
        self._mappings: list[tuple[str, Mapping[Any, Any], frozenset[object]]] = []
        self.adapters: list[StateAdapter] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def add_model(self, model: object) -> None:
        if model is None:
            return
        named = _with_keys("model", model) if isinstance(model, Mapping) else [("model", model)]
        for key, value in named:
            modules_or_stateful = value if isinstance(value, list | tuple) else [value]
            modules = [item for item in modules_or_stateful if isinstance(item, nn.Module)]
            if modules and len(modules) == len(modules_or_stateful):
                adapter = ModelAdapter(key, modules, allow_pickle=self._allow_pickle)
                self._models.append(adapter)
                self.adapters.append(adapter)
            else:
                for name, item in _with_keys(key, value):
                    self.adapters.append(self._stateful_adapter(name, item))

    def add_optimizer(self, optimizer: object) -> None:
        """Add the optimizer or optimizers; after the models, whose names they use."""
        given = _with_keys("optimizer", optimizer)
        for key, value in chain.from_iterable(_unwrapped(*pair) for pair in given):
            if isinstance(value, torch.optim.Optimizer):
                kind = ZeroOptimizerAdapter if is_zero(value) else OptimizerAdapter
                adapter = kind(key, value, self._parameter_names, allow_pickle=self._allow_pickle)
                self.optimizers.append(adapter.optimizer)
                self.adapters.append(adapter)
            elif type(value).__module__.startswith("deepspeed."):
                raise CheckpointError(
                    f"{key} is DeepSpeed's, whose state is not saved: save it with the engine's "
                    "save_checkpoint"
                )
            else:
                self.adapters.append(self._stateful_adapter(key, value))

    def add_stateful(self, kind: str, value: object) -> None:
        """Add a scheduler, a scaler, or several: whatever has ``state_dict``."""
        for key, item in _with_keys(kind, value):
            self.adapters.append(self._stateful_adapter(key, item))

    def add_dataloader(self, value: object) -> None:
        """Add the data loaders; warn where one has no position to resume from."""
        for key, item in _with_keys("dataloader", value):
            if _is_stateful(item):
                self.adapters.append(self._stateful_adapter(key, item))
            else:
                self._warn(
                    f"{key} ({type(item).__name__}) has no state_dict: the order of the data is "
                    "not resumed; torchdata's StatefulDataLoader has one, or give the position in "
                    "the data as extra"
                )

    def check(self) -> None:
        """Raise CheckpointError where there is nothing to save, or a name occurs twice."""
        if not self.adapters:
            raise CheckpointError("there is nothing to save: give model=, optimizer=, … or extra=")
        for key, count in Counter(part.key for part in self.adapters).items():
            if count > 1:
                raise CheckpointError(f"two things are called {key}; give them different names")

    def add_values(self, kind: str, value: object) -> None:
        """Add averages, or anything else: objects with a state, generators, plain values."""
        if isinstance(value, Mapping) and not _is_tensors(value):
            self._mappings.append((kind, value, frozenset(value)))
            for name in value:
                self.adapters.append(self._adapter_for(f"{kind}.{name}", value, name))
        elif value is not None:
            named = [(kind, value)] if isinstance(value, Mapping) else _with_keys(kind, value)
            for key, item in named:
                if not isinstance(item, _FILLED_IN_PLACE) and not _is_stateful(item):
                    raise CheckpointError(
                        f"{key} is a {type(item).__qualname__}, whose loaded value could not be "
                        f"returned: give it in a mapping, {kind}={{'name': …}}"
                    )
                self.adapters.append(self._adapter_for(key, MappingProxyType({key: item}), key))

    def late_keys(self) -> list[str]:
        """Return the keys that were added to the mappings later."""
        return [
            f"{kind}.{name}"
            for kind, mapping, known in self._mappings
            if len(mapping) != len(known)
            for name in mapping
            if name not in known
        ]

    def _adapter_for(self, key: str, holder: Mapping[Any, Any], name: object) -> StateAdapter:
        value = holder[name]
        if isinstance(value, nn.Module):
            return ModelAdapter(key, [value], allow_pickle=self._allow_pickle)
        if isinstance(value, torch.Generator):
            return GeneratorAdapter(key, value)
        if _is_stateful(value):
            return self._stateful_adapter(key, value)
        return ValueAdapter(key, holder, name, allow_pickle=self._allow_pickle)

    def _stateful_adapter(self, key: str, value: object) -> StateAdapter:
        if isinstance(value, nn.Module):
            return ModelAdapter(key, [value], allow_pickle=self._allow_pickle)
        if not _is_stateful(value):
            raise CheckpointError(
                f"{key} is a {type(value).__qualname__}, which has no state_dict and "
                "load_state_dict; plain values go into extra={...}"
            )
        scaler = torch.amp.GradScaler
        if isinstance(value, scaler) and type(value).state_dict is scaler.state_dict:
            return ScalerAdapter(key, value)
        return ObjectAdapter(key, value, allow_pickle=self._allow_pickle)

    def _parameter_names(self) -> dict[int, str]:
        """Return the names of the parameters of all models, by their `id`."""
        found: dict[int, str] = {}
        for part in self._models:
            prefix = part.key.removeprefix("model").removeprefix(".")
            begin = f"{prefix}." if prefix else ""
            for number, name in part.parameter_names().items():
                found.setdefault(number, begin + name)
        return found


def _with_keys(kind: str, value: object) -> Iterable[tuple[str, Any]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [(f"{kind}.{name}", each) for name, each in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{kind}.{index}", each) for index, each in enumerate(value)]
    return [(kind, value)]


def _unwrapped(key: str, optimizer: object) -> Iterable[tuple[str, Any]]:
    """Return the optimizers that *optimizer* steps, itself where it wraps none.

    torchtitan's container has several; accelerate's and torchft's wrappers have one, and none of
    the hooks of torch's own.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [(key, optimizer)]
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, list | tuple):
        return _with_keys(key, several)
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return [(key, optimizer)]
    inner = getattr(optimizer, "optimizer", getattr(optimizer, "optim", None))
    if not isinstance(inner, torch.optim.Optimizer):
        name = type(optimizer).__qualname__
        raise CheckpointError(f"{key} is a {name}, which wraps an optimizer: give that one")
    return _unwrapped(key, inner)


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _is_tensors(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(each, torch.Tensor) for each in value.values())
