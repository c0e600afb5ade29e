"""Skip the data that a Trainer has seen before a restart, from a callback.

By the time of ``on_train_begin`` the Trainer has decided to begin with the first batch of the first
epoch. So the data loader is made to yield nothing in finished epochs, and the rest in the epoch
that was interrupted; the Trainer's own counts of that epoch are corrected.
"""

# ruff: noqa: ANN401 accelerate's loaders have no common type

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from accelerate.data_loader import skip_first_batches  # type: ignore[import-untyped]
from torch.utils.data import DataLoader
from transformers.training_args import TrainingArguments

# accelerate's loaders report the class of the loader that they wrap, and cannot be assigned.
_set_class = object.__dict__["__class__"].__set__
_NO_SAMPLE = "There seems not to be a single sample"


@dataclass(slots=True, kw_only=True)
class DataResume:
    """Where the data resume: ``n_batches`` into the epoch ``epoch``, both from 0.

    ``now`` is the current epoch, ``n_in_epoch`` the number of its batches (0: unknown).
    """

    epoch: int = 0
    n_batches: int = 0
    n_in_epoch: int = 0
    step: int = 0
    now: int = -1
    accumulates: int | None = None
    is_logged: bool = False

    @classmethod
    def of(cls, args: TrainingArguments, loader: Any, step: int, *, is_done: bool) -> Self:
        """Return where the data resume after *step* optimizer steps; *loader* does so from now on.

        It equals the Trainer's own resuming counts (``Trainer._init_training_state``). Where the
        training *is_done*, there are no more data.
        """
        accumulate = args.gradient_accumulation_steps
        n_in_epoch = len(loader) if _has_length(loader) else 0
        n_steps = max(-(-n_in_epoch // accumulate), 1) if n_in_epoch else step + 1
        epoch, n_done = divmod(step, n_steps)
        found = cls(
            epoch=sys.maxsize if is_done else epoch,
            n_batches=0 if args.ignore_data_skip else n_done * accumulate,
            n_in_epoch=n_in_epoch,
            step=step,
        )
        _fast_forward(loader, found, args)
        return found

    @property
    def is_over(self) -> bool:
        """Return whether the current epoch was finished before the restart."""
        return self.now < self.epoch

    def begin_epoch(self) -> None:
        self.now += 1
        _suppress_warning(on=self.is_over)

    def end_epoch(self, args: TrainingArguments) -> None:
        """Undo the changes for one epoch."""
        if self.accumulates is not None:
            args.gradient_accumulation_steps = self.accumulates
            self.accumulates = None
        _suppress_warning(on=False)

    def epoch_at(self, counted: float) -> float:
        """Return the finished share of the epochs that the Trainer counts from the restart on."""
        if self.now != self.epoch or not self.n_batches or not self.n_in_epoch:
            return counted
        n_since = round((counted - self.now) * self.n_in_epoch)
        return self.now + (self.n_batches + n_since) / self.n_in_epoch

    def loss_factor(self, step: int) -> float:
        """Return the factor for a mean that the Trainer computed over all steps since 0."""
        n_since = step - self.step
        return step / n_since if self.step and n_since > 0 else 1.0

    def rest_of(self, loader: Any, args: TrainingArguments) -> Iterator[Any]:
        """Yield the batches of this epoch that were not seen.

        The Trainer steps after a fixed number of batches, and after the last one of an epoch, which
        it finds by counting from the first. Where the last group is short, the setting that it
        reads for each batch is changed so that it steps there.
        """
        rest = skip_first_batches(loader, self.n_batches)
        rest.set_epoch(self.now)
        accumulate = args.gradient_accumulation_steps
        n_rest = self.n_in_epoch - self.n_batches
        n_short = n_rest % accumulate if self.n_in_epoch else 0
        for index, batch in enumerate(rest):
            if n_short and index == n_rest - n_short:
                self.accumulates = accumulate
                args.gradient_accumulation_steps = n_rest
            yield batch


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) > 0
    except (TypeError, NotImplementedError):
        return False


def _fast_forward(loader: Any, resume: DataResume, args: TrainingArguments) -> None:
    kind: type[DataLoader[Any]] = type(loader)

    class FastForward(kind):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[Any]:
            if resume.is_over:
                return iter(())
            if resume.now == resume.epoch and resume.n_batches:
                return resume.rest_of(self, args)
            return super().__iter__()  # type: ignore[no-any-return]

    FastForward.__name__ = kind.__name__
    _set_class(loader, FastForward)


class _IsNoSample(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NO_SAMPLE)


_FILTER = _IsNoSample()


def _suppress_warning(*, on: bool) -> None:
    """Suppress the Trainer's warning of an epoch without samples, where that is intended."""
    logger = logging.getLogger("transformers.trainer")
    if on:
        logger.addFilter(_FILTER)
    else:
        logger.removeFilter(_FILTER)
