"""Any other object with a state: a scheduler, a scaler, a data loader, the user's own values."""

import random
import sys
from array import array
from collections.abc import Callable, Mapping, MutableMapping
from hashlib import blake2b
from typing import Any

import torch

from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
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


def read_rng() -> dict[str, object]:
    """Return the states of Python's, NumPy's (where it is imported) and torch's generators.

    CUDA's are those of the devices this process uses, by their numbers; reading them does not
    synchronise.
    """
    version, state_words, gauss = random.getstate()
    found: dict[str, object] = {
        "python": [version, array("Q", state_words).tobytes(), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        found["cuda"] = {device: torch.cuda.get_rng_state(device).numpy().tobytes()}
    return found


def write_rng(states: Mapping[str, Any]) -> None:
    """Set the generators to *states*.

    A generator of CUDA is set on the current device, which need not have the same number.

    Raises:
        CorruptError: They are not states of generators.
    """
    try:
        version, state_words, gauss = states["python"]
        random.setstate((version, tuple(array("Q", state_words)), gauss))
        torch.set_rng_state(_tensor(states["torch"]))
        if "numpy" in states:
            import numpy as np

            np.random.set_state(states["numpy"])  # noqa: NPY002 the one that the job may use
        if "cuda" in states and torch.cuda.is_available():
            for state in states["cuda"].values():
                torch.cuda.set_rng_state(_tensor(state), torch.cuda.current_device())
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as exc:
        raise CorruptError(f"the random states cannot be set: {str(exc)[:200]}") from exc


def reseed(step: int, rank: int, world: int, entropy: bytes) -> None:
    """Seed all generators from the position of the job: equal arguments give equal seeds.

    *entropy* is a part of the saved state that differs from job to job.
    """
    text = f"{step} {rank} {world} ".encode() + entropy
    seed = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA's as well
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class ObjectAdapter:
    """An object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, key: str, stateful: Any, *, allow_pickle: bool = False) -> None:  # noqa: ANN401
        self.key = key
        self._stateful = stateful
        self._allow_pickle = allow_pickle
        self._name_cache = NameCache()

    @property
    def is_iterable(self) -> bool:
        """Whether it yields data, as loaders and samplers do."""
        return hasattr(self._stateful, "__iter__")

    def read(self) -> AdapterSnapshot:
        return self._encode(self._stateful.state_dict())

    def plan_load(self, source: SavedState) -> FinishLoad:
        state = self._decode(source, _current_state(self._stateful.state_dict))
        return lambda: self._stateful.load_state_dict(state)

    def _encode(self, value: object) -> AdapterSnapshot:
        encoder = StateEncoder(allow_pickle=self._allow_pickle)
        fragment = dumps(encoder.encoder.encode(value, self.key))
        return AdapterSnapshot(
            self._name_cache.intern(tuple(encoder.names)), encoder.tensors, fragment
        )

    def _decode(self, source: SavedState, current: object) -> Any:  # noqa: ANN401 anything
        fragments = source.fragments(self.key)
        if not fragments:
            raise StructureError(
                f"the checkpoint has nothing of {self.key}: it was saved without it; "
                "restore first without it as well"
            )
        decoder = StateDecoder(source, current, allow_pickle=self._allow_pickle)
        return decoder.decode(fragments[0], self.key)


class ScalerAdapter(ObjectAdapter):
    """A `torch.amp.GradScaler`, whose own ``state_dict`` waits for its device."""

    def __init__(self, key: str, scaler: torch.amp.GradScaler) -> None:
        super().__init__(key, scaler)

    def read(self) -> AdapterSnapshot:
        scaler = self._stateful
        if not scaler.is_enabled():
            return super().read()
        # No public name returns them as they are.
        scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
        if scale is None or tracker is None:  # before its first use, which makes such tensors
            state, device = scaler.state_dict(), getattr(scaler, "_device", "cpu")
            scale = torch.tensor(state["scale"], dtype=torch.float32, device=device)
            tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32, device=device)
        return self._encode(
            {
                "scale": scale,
                "growth_factor": scaler.get_growth_factor(),
                "backoff_factor": scaler.get_backoff_factor(),
                "growth_interval": scaler.get_growth_interval(),
                "_growth_tracker": tracker,
            }
        )

    def plan_load(self, source: SavedState) -> FinishLoad:
        state = self._decode(source, None)
        return lambda: self._stateful.load_state_dict(
            {name: it.item() if isinstance(it, torch.Tensor) else it for name, it in state.items()}
        )


class GeneratorAdapter(ObjectAdapter):
    """A `torch.Generator`, for example of a sampler."""

    def __init__(self, key: str, generator: torch.Generator) -> None:
        super().__init__(key, generator)

    def read(self) -> AdapterSnapshot:
        return self._encode(self._stateful.get_state().numpy().tobytes())

    def plan_load(self, source: SavedState) -> FinishLoad:
        state = self._decode(source, None)
        if not isinstance(state, bytes):
            raise CorruptError(f"{self.key} is not a generator state")
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        return lambda: self._stateful.set_state(tensor)


class ValueAdapter(ObjectAdapter):
    """One value of a mapping that the user gave: read from it at each save, put back into it."""

    def __init__(
        self, key: str, holder: Mapping[Any, Any], name: object, *, allow_pickle: bool = False
    ) -> None:
        super().__init__(key, holder, allow_pickle=allow_pickle)
        self._name = name

    def read(self) -> AdapterSnapshot:
        if self._name not in self._stateful:
            raise CheckpointError(f"{self.key} was given, and is no longer in its mapping")
        return self._encode(self._stateful[self._name])

    def plan_load(self, source: SavedState) -> FinishLoad:
        current = self._stateful[self._name]
        value = self._decode(source, current)
        if value is current:
            return lambda: None
        if isinstance(current, dict) and isinstance(value, dict):
            return lambda: _replace_items(current, value)
        if not isinstance(self._stateful, MutableMapping):
            raise CheckpointError(
                f"{self.key} has another shape or type than the saved value, which cannot be "
                "returned: give it in a dict"
            )
        holder = self._stateful
        return lambda: holder.__setitem__(self._name, value)


def _replace_items(mapping: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Replace the values of the user's own *mapping*: others may refer to it."""
    for key in mapping.keys() - values.keys():
        del mapping[key]
    mapping.update(values)


def _current_state(state_dict: Callable[[], object]) -> object:
    """Return the current state, for its tensors; None where there is none before a restore."""
    try:
        return state_dict()
    except Exception:  # noqa: BLE001 boundary: a missing state is not an error
        return None
