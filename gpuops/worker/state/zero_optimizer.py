"""The state of an optimizer of which each rank has a part (ZeRO 1; Rajbhandari et al., SC 2020).

torch's `ZeroRedundancyOptimizer` and fairscale's ``OSS`` are alike: ``optim`` is the optimizer of
this rank's part, and schedulers change the settings of the outer one, which copies them when it
steps. Their own ``state_dict`` needs all parts sent to one rank first.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gpuops.checkpoint.types import CheckpointError
from gpuops.worker.state.adapter import AdapterSnapshot
from gpuops.worker.state.optimizer import NamesOf, OptimizerAdapter, parameters_of, settings_of


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank has a part of the state of *optimizer*."""
    return callable(getattr(optimizer, "consolidate_state_dict", None))


class ZeroOptimizerAdapter(OptimizerAdapter):
    """The state of this rank's part, and the settings of the outer optimizer.

    With another number of ranks each finds the state of its new part in those of all saved ones.
    """

    def __init__(
        self,
        key: str,
        optimizer: torch.optim.Optimizer,
        names_of: NamesOf,
        *,
        allow_pickle: bool = False,
    ) -> None:
        """Raise CheckpointError where the part of this rank is not made yet."""
        inner = vars(optimizer).get("optim")
        if not isinstance(inner, torch.optim.Optimizer):
            raise CheckpointError(
                f"{key} is a {type(optimizer).__qualname__} whose part of this rank is made in the "
                "first steps: make it without overlap_with_ddp=True"
            )
        self._outer = optimizer
        self._names_of_models = names_of
        super().__init__(key, inner, self._all_names, allow_pickle=allow_pickle)

    @property
    def parameters(self) -> Iterable[torch.Tensor]:
        """All of them: each rank steps its part and sends it to the others, unless rounded."""
        return [] if getattr(self._outer, "broadcast_fp16", False) else parameters_of(self._outer)

    @property
    def is_replicated(self) -> bool:
        """False: no other rank has the state of this part."""
        return False

    def _all_names(self) -> Mapping[int, str]:
        """Return the names by `id`; a parameter in no model is numbered alike on all ranks."""
        numbers = {id(each): f"#{index}" for index, each in enumerate(parameters_of(self._outer))}
        return {**numbers, **self._names_of_models()}

    def read(self) -> AdapterSnapshot:
        _copy_settings(self._outer, self.optimizer)
        return super().read()

    def _load(
        self,
        state: Mapping[Any, Any],
        groups: Sequence[dict[str, Any]],
        parameters: Mapping[int, torch.Tensor],
    ) -> None:
        super()._load(state, groups, parameters)
        _copy_settings(self.optimizer, self._outer)


def _copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for group, copied in zip(source.param_groups, target.param_groups, strict=True):
        copied.update(settings_of(group))
