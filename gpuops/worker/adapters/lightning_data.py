"""Keep the order of the data in Lightning's fit loop over a restart.

Lightning makes the iterators of the training data before it sets the epoch of their samplers, from
which a ``DistributedSampler`` draws its order. And no loader's state has the order of torch's own
random samplers, or of any that Lightning wraps for several ranks. Both are made good between the
making of the loaders and that of their iterators.
"""

# ruff: noqa: SLF001, ANN401 the fit loop has no public type and no public way to its loaders

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.loops.loop import _Loop
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gpuops.worker.state.objects import read_rng, write_rng

_HOOK = "_load_combined_loader_states"  # `FitLoop.setup_data` calls it once the loaders are made
_USED = ("_combined_loader_states_to_load", "_resuming_from_checkpoint", "reset_restart_stage")


class DataOrder:
    """The order of the training data of one fit; made before their loaders are."""

    def __init__(self, loop: Any) -> None:
        """Raise AttributeError where *loop* has not what is used of it later."""
        for owner, names in ((loop, _USED), (loop.epoch_loop, _USED[-1:])):
            for name in names:
                getattr(owner, name)
        self._loop = loop
        self._samplers: list[_RecordedSampler] = []
        self._saved_draws: Sequence[Mapping[str, Any]] = ()
        self._loader_states: Sequence[Mapping[str, Any]] = ()
        self._is_resuming = False
        self._load_loader_states = getattr(loop, _HOOK)
        setattr(loop, _HOOK, self._on_loaders_made)

    def close(self) -> None:
        """Leave the loop as it was."""
        vars(self._loop).pop(_HOOK, None)

    def state(self) -> list[Mapping[str, Any]]:
        """Return the generators from which samplers drew the order of this epoch."""
        return [sampler.drawn_from for sampler in self._samplers]

    def resume(self, draws: Sequence[Mapping[str, Any]]) -> None:
        """Resume with *draws*, an earlier `state`, and with the state that the loop has loaded."""
        self._is_resuming, self._saved_draws = True, draws
        self._loader_states = list(self._loop._combined_loader_states_to_load)

    def begin_epoch(self) -> bool:
        """Return whether the loaded state is of an epoch's end; then the next one begins normally.

        Lightning would count that epoch again, lose the loaders' states, or not draw a new order.
        """
        loop, was_resuming, self._is_resuming = self._loop, self._is_resuming, False
        self._set_draws(())
        if not was_resuming or not loop.epoch_loop.batch_progress.is_last_batch:
            return False
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # with all its parts
        if loop.epoch_progress.current.completed < loop.epoch_progress.current.processed:
            loop.epoch_progress.increment_completed()
        loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        # The order of the finished epoch is drawn once more: the next one follows from there.
        self._set_draws(self._saved_draws)
        states = iter(self._loader_states)
        for loader in filter(_has_state, self._loaders):
            state = next(states, {})
            if isinstance(loader, DataLoader):
                loader.load_state_dict(state)  # type: ignore[attr-defined]
                iter(loader)
        self._set_draws(())
        return True

    @property
    def _loaders(self) -> list[Any]:
        return list(self._loop._combined_loader.flattened)

    def _on_loaders_made(self) -> None:
        self._samplers = [each for loader in self._loaders for each in _recorded(loader)]
        if self._is_resuming:
            for loader in self._loaders:
                _set_sampler_epoch(loader, self._loop.epoch_progress.current.processed)
            self._set_draws(self._saved_draws)
        self._load_loader_states()

    def _set_draws(self, draws: Sequence[Mapping[str, Any]]) -> None:
        for sampler, drawn_from in zip_longest(self._samplers, draws[: len(self._samplers)]):
            sampler.draw_again = drawn_from


def _recorded(loader: object) -> list["_RecordedSampler"]:
    """Have the samplers of *loader* recorded whose order is in no state, and return them.

    Lightning gives its wrapper to the loader or to its batch sampler.
    """
    found = []
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, DistributedSamplerWrapper):
            found.append(_RecordedSampler.inside(sampler.dataset, "_sampler"))
        elif owner is not loader and isinstance(sampler, _DRAWING) and _has_state(loader):
            found.append(_RecordedSampler.inside(owner, "sampler"))
    return list(dict.fromkeys(found))


def _has_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class _RecordedSampler(Sampler[Any]):
    """A sampler that notes the generators from which it draws an order.

    ``draw_again``: what it draws from now; a loader that loads its state draws several times.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drawn_from: Mapping[str, Any] = {}
        self.draw_again: Mapping[str, Any] | None = None

    @classmethod
    def inside(cls, owner: object, name: str) -> "_RecordedSampler":
        """Return the sampler of that *name* in *owner*, which is put there if it is another."""
        sampler = getattr(owner, name)
        if not isinstance(sampler, cls):
            sampler = cls(sampler)
            setattr(owner, name, sampler)
        return sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        own = getattr(self._sampler, "generator", None)
        if self.draw_again:
            write_rng(self.draw_again["global"])
            if own is not None and (saved := self.draw_again["own"]):
                own.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
        state = None if own is None else own.get_state().numpy().tobytes()
        self.drawn_from = {"global": read_rng(), "own": state}
        yield from self._sampler

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


# torch's, that draw when the first index is asked for, as `_RecordedSampler` notes it.
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, _RecordedSampler)
