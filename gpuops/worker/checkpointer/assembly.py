"""Makes parts of a state out of what the user gave."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer.model_part import ModelPart
from gpuops.worker.checkpointer.object_part import GeneratorPart, ObjectPart, ValuePart
from gpuops.worker.checkpointer.optimizer_part import OptimizerPart
from gpuops.worker.checkpointer.part import Part

_log = logging.getLogger(__name__)

_FILLED = (Mapping, torch.Tensor, torch.Generator)
"""What is filled where it is, and needs no place to be put back into."""


class Given:
    """What `Checkpointer` was given, as parts in the order in which they are restored.

    Each argument is one object, a list or a mapping of them. A list of modules is one model of
    which this rank has these parts (pipeline parallelism); a mapping names different models.
    """

    def __init__(self, *, allow_pickle: bool, warn: Callable[[str], None]) -> None:
        self._allow_pickle = allow_pickle
        self._warn = warn
        self._models: list[ModelPart] = []
        self._mappings: list[tuple[str, Mapping[Any, Any], frozenset[object]]] = []
        self.parts: list[Part] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def model(self, model: object) -> None:
        """Add the model or models."""
        if model is None:
            return
        named = _named("model", model) if isinstance(model, Mapping) else [("model", model)]
        for key, value in named:
            many = value if isinstance(value, list | tuple) else [value]
            modules = [each for each in many if isinstance(each, nn.Module)]
            if modules and len(modules) == len(many):
                part = ModelPart(key, modules, allow_pickle=self._allow_pickle)
                self._models.append(part)
                self.parts.append(part)
            else:
                for name, each in _named(key, value):
                    self.parts.append(self._stateful(name, each))

    def optimizer(self, optimizer: object) -> None:
        """Add the optimizer or optimizers; after the models, whose names they use."""
        for key, value in _named("optimizer", optimizer):
            if isinstance(value, torch.optim.Optimizer):
                self.optimizers.append(value)
                self.parts.append(
                    OptimizerPart(key, value, self._names, allow_pickle=self._allow_pickle)
                )
            else:
                self.parts.append(self._stateful(key, value))

    def stateful(self, kind: str, value: object) -> None:
        """Add a scheduler, a scaler, or several: whatever has ``state_dict``."""
        for key, each in _named(kind, value):
            self.parts.append(self._stateful(key, each))

    def dataloader(self, value: object) -> None:
        """Add what tells how far the data are read; warn where it cannot tell."""
        for key, each in _named("dataloader", value):
            if _is_stateful(each):
                self.parts.append(self._stateful(key, each))
            else:
                self._warn(
                    f"{key} ({type(each).__name__}) has no state_dict: the order of the data is "
                    "not resumed; torchdata's StatefulDataLoader has one, or give the position in "
                    "the data as extra"
                )

    def check(self) -> None:
        """Raise CheckpointError where nothing was given, or two things by one name."""
        if not self.parts:
            raise CheckpointError("nothing to save was given: model=, optimizer=, … or extra=")
        for key, n in Counter(part.key for part in self.parts).items():
            if n > 1:
                raise CheckpointError(f"two things are called {key}; give each a name of its own")

    def values(self, kind: str, value: object) -> None:
        """Add averages, or anything else: things with a state, generators, plain values."""
        if isinstance(value, Mapping) and not _is_tensors(value):
            self._mappings.append((kind, value, frozenset(value)))
            for name in value:
                self.parts.append(self._any(f"{kind}.{name}", value, name))
        elif value is not None:
            named = [(kind, value)] if isinstance(value, Mapping) else _named(kind, value)
            for key, each in named:
                if not isinstance(each, _FILLED) and not _is_stateful(each):
                    raise CheckpointError(
                        f"{key} is a {type(each).__qualname__}, and what is loaded could not be "
                        f"given back to the script: give it in a mapping, {kind}={{'name': …}}"
                    )
                self.parts.append(self._any(key, MappingProxyType({key: each}), key))

    def late_names(self) -> list[str]:
        """Return what was put into the mappings after they were given."""
        return [
            f"{kind}.{name}"
            for kind, mapping, known in self._mappings
            if len(mapping) != len(known)
            for name in mapping
            if name not in known
        ]

    def _any(self, key: str, holder: Mapping[Any, Any], name: object) -> Part:
        value = holder[name]
        if isinstance(value, nn.Module):
            return ModelPart(key, [value], allow_pickle=self._allow_pickle)
        if isinstance(value, torch.Generator):
            return GeneratorPart(key, value)
        if _is_stateful(value):
            return self._stateful(key, value)
        return ValuePart(key, holder, name, allow_pickle=self._allow_pickle)

    def _stateful(self, key: str, value: object) -> Part:
        if isinstance(value, nn.Module):
            return ModelPart(key, [value], allow_pickle=self._allow_pickle)
        if not _is_stateful(value):
            raise CheckpointError(
                f"{key} is a {type(value).__qualname__}, which has no state_dict and "
                "load_state_dict; plain values go into extra={...}"
            )
        return ObjectPart(key, value, allow_pickle=self._allow_pickle)

    def _names(self) -> dict[int, str]:
        """Return what the parameters of all models are called, by their `id`."""
        found: dict[int, str] = {}
        for part in self._models:
            prefix = part.key.removeprefix("model").removeprefix(".")
            begin = f"{prefix}." if prefix else ""
            for number, name in part.parameter_names().items():
                found.setdefault(number, begin + name)
        return found


def _named(kind: str, value: object) -> Iterable[tuple[str, Any]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [(f"{kind}.{name}", each) for name, each in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{kind}.{index}", each) for index, each in enumerate(value)]
    return [(kind, value)]


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _is_tensors(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(each, torch.Tensor) for each in value.values())
