"""The state of a torch optimizer, by the names of its parameters.

Torch's own state dict numbers parameters; with names the state also fits where another rank, or
another number of ranks, has them. ``state`` of each parameter is stored unchanged: torch's
``load_state_dict`` would convert it to the dtype of the parameter, so that is corrected.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import not_
from typing import Any, NamedTuple

import torch

from gpuops.checkpoint.image import TensorSpec
from gpuops.checkpoint.types import (
    CorruptError,
    StructureError,
)
from gpuops.convert.tensors import DTYPES, is_dtensor, needs_carrier
from gpuops.convert.values import StateEncoder, dumps
from gpuops.worker.state.adapter import (
    AdapterSnapshot,
    FinishLoad,
    NameCache,
    StateDecoder,
    allocate_like,
    logical_shape,
)
from gpuops.worker.state.saved_state import SavedState

NamesOf = Callable[[], Mapping[int, str]]

_NOT_TENSOR, _ON_PARAMETER_DEVICE, _ON_HOST = (
    0,
    1,
    2,
)  # not a tensor; on the device of its parameter; on the host
_WHOLE_ENTRY = object()  # in place of the fields of a parameter's state that is not a mapping
_STATE_DICT = torch.optim.Optimizer.state_dict
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class _Structure(NamedTuple):
    """The inputs of the names: where they are equal, so are the names."""

    keys: list[object]
    counts: list[int]
    fields: list[object]
    kinds: list[bool]
    parameters: list[int]


class _Entry(NamedTuple):
    """The saved state of one parameter; ``fields`` is None where it is not a mapping."""

    fields: list[Any] | None
    values: list[Any]


class OptimizerAdapter:
    """A `torch.optim.Optimizer`; *names_of* returns the names of parameters by their `id`.

    A parameter without a name, which is not in any given model, is identified by its number.
    """

    def __init__(
        self,
        key: str,
        optimizer: torch.optim.Optimizer,
        names_of: NamesOf,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.key = key
        self.optimizer = optimizer
        self._names_of = names_of
        self._allow_pickle = allow_pickle
        self._shape: _Structure | None = None
        self._names: tuple[str, ...] = ()
        self._name_cache = NameCache()
        self._value_paths: list[str] = []
        self._fixed = b""

    @property
    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that a step changes on all ranks that hold them alike."""
        return parameters_of(self.optimizer)

    @property
    def is_replicated(self) -> bool:
        """Whether ranks that hold a parameter alike hold its state alike, as torch's own do."""
        return type(self.optimizer).__module__.startswith("torch.optim.")

    def read(self) -> AdapterSnapshot:
        """Return state and groups; all tensors of the state but nested ones come first."""
        keys, state = _state_of(self.optimizer)
        counts, fields, values, kinds = _flatten(state)
        tensors = list(compress(values, kinds))
        others = list(compress(values, map(not_, kinds)))
        groups = self.optimizer.param_groups
        parameters = [number for group in groups for number in map(id, group["params"])]
        shape = _Structure(keys, counts, fields, kinds, parameters)
        if shape != self._shape:
            self._update_names(self.optimizer.state_dict()["state"], shape)
        encoder = StateEncoder(allow_pickle=self._allow_pickle)
        encoded = [
            encoder.encoder.encode(value, path)
            for path, value in zip(self._value_paths, others, strict=True)
        ]
        settings = [
            encoder.encoder.encode(settings_of(group), f"{self.key}.param_groups.{index}")
            for index, group in enumerate(groups)
        ]
        moving = dumps({"values": encoded, "groups": settings})
        fragment = b'{"fixed":%b,"moving":%b}' % (self._fixed, moving)
        names = (
            self._name_cache.intern((*self._names, *encoder.names))
            if encoder.names
            else self._names
        )
        return AdapterSnapshot(names, [*tensors, *encoder.tensors], fragment, len(tensors))

    def plan_load(self, source: SavedState) -> FinishLoad:
        """Request the state of each parameter; create what is missing."""
        fragments = source.fragments(self.key)
        if not fragments:
            raise StructureError(
                f"the checkpoint has nothing of {self.key}: it was saved without it; "
                "restore first without it as well"
            )
        entries = _entries_of(fragments, self.key)
        parameters = _parameters_by_number(self.optimizer)
        names = self._named(parameters)
        self._check_names(names, entries, source)
        state: dict[Any, Any] = {
            index: self._state_of(parameters[index], name, entries[name], source)
            for index, name in names.items()
            if name in entries
        }
        for name in entries.keys() - set(names.values()):
            if name.startswith("$"):  # not a parameter
                state[name.removeprefix("$")] = self._state_of(None, name, entries[name], source)
        groups = [
            self._group_of(index, group, names, fragments, source)
            for index, group in enumerate(self.optimizer.state_dict()["param_groups"])
        ]
        return lambda: self._load(state, groups, parameters)

    def _load(
        self,
        state: Mapping[Any, Any],
        groups: Sequence[dict[str, Any]],
        parameters: Mapping[int, torch.Tensor],
    ) -> None:
        self.optimizer.load_state_dict({"state": dict(state), "param_groups": list(groups)})
        for index, entry in state.items():
            loaded = self.optimizer.state.get(parameters.get(index, index))
            if (
                isinstance(loaded, dict)
                and isinstance(entry, dict)
                and loaded.keys() == entry.keys()
            ):
                loaded.update(entry)
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({k: v for k, v in saved.items() if isinstance(v, torch.Tensor)})

    def _named(self, parameters: Mapping[int, torch.Tensor]) -> dict[int, str]:
        known = self._names_of()
        return {index: known.get(id(each), f"#{index}") for index, each in parameters.items()}

    def _update_names(self, state: Mapping[Any, Any], shape: _Structure) -> None:
        parameters = _parameters_by_number(self.optimizer)
        named = self._named(parameters)
        names: list[str] = []
        paths: list[str] = []
        entries: list[list[Any]] = []
        for index, entry in state.items():
            name = named.get(index, f"${index}")
            root = f"{self.key}.state.{name}"
            if not _is_plain(entry):
                paths.append(root)
                entries.append([name, None])
                continue
            fields = []
            for field, value in entry.items():
                path = f"{root}.{field}"
                if isinstance(value, torch.Tensor):
                    names.append(path)
                    fields.append(_field_of(field, value, parameters.get(index)))
                else:
                    paths.append(path)
                    fields.append([field, _NOT_TENSOR])
            entries.append([name, fields])
        grouped = [
            [named[index] for index in group["params"]]
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        self._shape, self._names, self._value_paths = shape, tuple(names), paths
        self._fixed = dumps({"state": entries, "params": grouped})

    def _check_names(
        self, names: Mapping[int, str], entries: Mapping[str, _Entry], source: SavedState
    ) -> None:
        known = set(names.values())
        surplus = sorted(name for name in entries.keys() - known if not name.startswith("$"))
        if surplus and source.is_own:
            raise StructureError(
                f"the checkpoint has the state of {len(surplus)} parameters that {self.key} has "
                f"not, {surplus[0]} among them; restore into an optimizer over the same parameters"
            )

    def _state_of(
        self, parameter: torch.Tensor | None, name: str, entry: _Entry, source: SavedState
    ) -> object:
        root = f"{self.key}.state.{name}"
        current_state = self.optimizer.state.get(parameter, {}) if parameter is not None else {}
        device = torch.device("cpu") if parameter is None else parameter.device
        decoder = StateDecoder(
            source, current_state, allow_pickle=self._allow_pickle, like=parameter, device=device
        )
        values = iter(entry.values)
        if entry.fields is None:
            return decoder.decode(next(values), root)
        made: dict[str, Any] = {}
        for field, kind, *more in entry.fields:
            path = f"{root}.{field}"
            if kind == _NOT_TENSOR:
                made[field] = decoder.decode(next(values), root, path)
                continue
            spec = source.spec(path)
            if spec is None:
                raise CorruptError(f"the checkpoint refers to {path} and does not have it")
            current = current_state.get(field) if isinstance(current_state, Mapping) else None
            host = kind == _ON_HOST
            made[field] = _load_target(
                spec, current, parameter, torch.device("cpu") if host else device, more
            )
            source.request(path, made[field])
        return made

    def _group_of(
        self,
        index: int,
        group: Mapping[str, Any],
        names: Mapping[int, str],
        fragments: Sequence[Any],
        source: SavedState,
    ) -> dict[str, Any]:
        own_names = [names[each] for each in group["params"]]
        root, saved = _saved_group(index, own_names, fragments, self.key, is_exact=source.is_own)
        if source.is_own and saved is None:
            raise StructureError(
                f"the checkpoint has no parameter group with the {len(own_names)} parameters of "
                f"group {index} of {self.key}; restore into an optimizer with the same groups"
            )
        decoder = StateDecoder(source, settings_of(group), allow_pickle=self._allow_pickle)
        settings = decoder.decode(saved, root) if saved is not None else {}
        return {**group, **settings, "params": group["params"]}


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[list[object], Mapping[Any, Any]]:
    """Return the structure of the state, and the state, in the state dict's order.

    Torch numbers all parameters for a state dict, which takes longer than reading their state.
    """
    is_torchs = (
        type(optimizer).state_dict is _STATE_DICT
        and "state_dict" not in vars(optimizer)
        and not any(vars(optimizer).get(hooks, True) for hooks in _HOOKS)
    )
    if is_torchs and all(map(isinstance, optimizer.state, repeat(torch.Tensor))):
        return list(map(id, optimizer.state)), optimizer.state
    state: Mapping[Any, Any] = optimizer.state_dict()["state"]
    return list(state), state


def _is_plain(entry: object) -> bool:
    return type(entry) is dict and all(type(field) is str for field in entry)


def _flatten(
    state: Mapping[Any, Any],
) -> tuple[list[int], list[object], list[Any], list[bool]]:
    """Return how many fields each entry has; and of all fields name, value and if it is a tensor.

    This runs at each save, for perhaps ten thousand entries: no loop of it is in Python.
    """
    entries = list(state.values())
    are_plain = set(map(type, entries)) <= {dict} and set(
        map(type, chain.from_iterable(entries))
    ) <= {str}
    if not are_plain:
        entries = [entry if _is_plain(entry) else {_WHOLE_ENTRY: entry} for entry in entries]
    fields = list(chain.from_iterable(entries))
    values = list(chain.from_iterable(map(dict.values, entries)))
    kinds = list(map(isinstance, values, repeat(torch.Tensor)))
    if not are_plain:
        kinds = [
            kind and field is not _WHOLE_ENTRY for kind, field in zip(kinds, fields, strict=True)
        ]
    return list(map(len, entries)), fields, values, kinds


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _parameters_by_number(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return the parameters by their numbers in the state dict."""
    every = list(parameters_of(optimizer))
    first: dict[int, int] = {}
    for index, each in enumerate(every):
        first.setdefault(id(each), index)
    return {index: every[index] for index in first.values()}


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a parameter group has beside its parameters."""
    return {key: value for key, value in group.items() if key not in {"params", "param_names"}}


def _field_of(field: str, value: torch.Tensor, parameter: torch.Tensor | None) -> list[Any]:
    is_on_parameter_device = parameter is None or value.device.type == parameter.device.type
    found: list[Any] = [field, _ON_PARAMETER_DEVICE if is_on_parameter_device else _ON_HOST]
    placements = _placements_of(value, parameter)
    if needs_carrier(value.dtype) or placements is not None:
        found += [str(value.dtype).removeprefix("torch."), placements]
    return found


def _placements_of(value: torch.Tensor, parameter: torch.Tensor | None) -> list[int | None] | None:
    """Return the sharded dimension per dimension of the mesh, where it is not the parameter's."""
    if not is_dtensor(value):
        return None
    if is_dtensor(parameter) and tuple(value.placements) == tuple(parameter.placements):
        return None
    return [getattr(place, "dim", None) for place in value.placements]


def _load_target(
    spec: TensorSpec,
    current: object,
    parameter: torch.Tensor | None,
    device: torch.device,
    more: Sequence[Any],
) -> torch.Tensor:
    dtype_name, dims = more if len(more) == 2 else (None, None)
    dtype = getattr(torch, str(dtype_name), None) if dtype_name else DTYPES[spec.dtype]
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"{spec.name} has the dtype {dtype_name!r:.80}, unknown to torch")
    if (
        isinstance(current, torch.Tensor)
        and current.dtype is dtype
        and tuple(current.shape) == logical_shape(spec, dtype)
    ):
        return current
    return allocate_like(spec, parameter, dtype, device, dims if isinstance(dims, list) else None)


def _entries_of(fragments: Sequence[Any], key: str) -> dict[str, _Entry]:
    """Return the saved states by the name of the parameter, of the first fragment that has it."""
    found: dict[str, _Entry] = {}
    for fragment in fragments:
        try:
            values = iter(fragment["moving"]["values"])
            for name, fields in fragment["fixed"]["state"]:
                entry = _Entry(fields, list(_take_values(fields, values)))
                found.setdefault(name, entry)
        except (KeyError, TypeError, ValueError, StopIteration, RuntimeError) as exc:
            raise CorruptError(
                f"the saved state of {key} is not that of an optimizer: {exc!r}"
            ) from exc
    return found


def _take_values(fields: list[Any] | None, values: Iterator[Any]) -> Iterator[Any]:
    n_values = 1 if fields is None else sum(field[1] == _NOT_TENSOR for field in fields)
    for _ in range(n_values):
        yield next(values)


def _saved_group(
    index: int, own_names: Sequence[str], fragments: Sequence[Any], key: str, *, is_exact: bool
) -> tuple[str, Any]:
    """Return the path of the settings of the group with these parameters, and the settings.

    Not *is_exact*: a group that had the first of them is accepted; where there are none (a part of
    a ZeRO optimizer), the group of that index.
    """
    best: tuple[str, Any] = ("", None)
    for fragment in fragments:
        groups, params = fragment["moving"]["groups"], fragment["fixed"]["params"]
        for number, names in enumerate(params):
            found = (f"{key}.param_groups.{number}", groups[number])
            if list(names) == list(own_names) and number == index:
                return found
            has_first = own_names[0] in names if own_names else number == index
            if not is_exact and best[1] is None and has_first:
                best = found
    return best
