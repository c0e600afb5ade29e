"""Checkpoints for Hugging Face's ``Trainer``: one callback, no other changes.

``Trainer(…, callbacks=[GpuopsCallback(directory="/shared/ckpt")])`` and ``trainer.train()``: at the
start the newest state is loaded in place, the data that it has seen are skipped without being read,
and `Checkpointer.step` is called after each optimizer step.

The run continues bit for bit where the order of the data depends on the epoch alone (the default)
and reading a batch draws nothing from the global generators. Callbacks still see the begin and end
of skipped epochs, within milliseconds; nothing is logged, evaluated or saved in them. The states of
other stateful callbacks are not saved.

A drain ends the training after a step whose state is saved, as ``should_training_stop`` ends it.
"""

# ruff: noqa: ARG002, ANN401 the hooks and their arguments are the framework's

import dataclasses
import json
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.training_args import TrainingArguments

from gpuops.checkpoint.types import CheckpointError
from gpuops.errors import UsageError
from gpuops.worker import api
from gpuops.worker.adapters.data_resume import DataResume
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.state.objects import read_rng, write_rng

# Values of this start of the job, not of the training.
_START_FIELDS = {
    "max_steps",
    "num_train_epochs",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
    "stateful_callbacks",
}
_STATE_FILE = "trainer_state.json"


class GpuopsCallback(TrainerCallback):
    """Restores at the start, saves after optimizer steps.

    *options* are those of `gpuops.Checkpointer` (``directory``, ``every``, ``persist_every``,
    ``slots``, ``keep_last``, ``extra``, …); the model, the optimizer, the schedule, the scaler and
    the Trainer's own progress are added here.

    Raises:
        UsageError: In ``trainer.train()``: DeepSpeed, which does not shard with torch, or a
            ``resume_from_checkpoint`` of another step than the one that is restored.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._resume = DataResume()
        self._rng_state: Mapping[str, Any] | None = None

    @property
    def checkpointer(self) -> Checkpointer | None:
        """Return the checkpointer of the current training, None outside of one."""
        return self._checkpointer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        # A training that an exception ended has had no on_train_end; its last state must not be
        # saved with the current random numbers.
        self._close(save=False)
        if getattr(args, "deepspeed", None):
            raise UsageError("the adapter does not support DeepSpeed's engine; use DDP or FSDP2")
        # accelerate wraps both.
        optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
        options = dict(self._options)
        # The state is restored into the first of them, the user's own.
        extra = ChainMap(options.pop("extra", {}), {_STATE_FILE: _Progress(state)})
        reported_step = state.global_step
        checkpointer = Checkpointer(
            model=kwargs["model"],
            optimizer=getattr(optimizer, "optimizer", optimizer),
            scheduler=getattr(scheduler, "scheduler", scheduler),
            scaler=getattr(optimizer, "scaler", None),
            extra=extra,
            **options,
        )
        self._checkpointer = checkpointer
        start = checkpointer.restore()
        self._resume = DataResume()
        self._rng_state = None
        if start == 0:
            return
        if reported_step not in {0, start}:
            raise UsageError(
                f"resume_from_checkpoint moved the data to step {reported_step}, and the newest "
                f"state is of step {start}: call trainer.train() without it"
            )
        if state.global_step != start:
            raise CheckpointError(
                f"the state of step {start} has the Trainer at step {state.global_step}"
            )
        self._rng_state = read_rng()
        if reported_step == 0:
            loader = kwargs["train_dataloader"]
            self._resume = DataResume.of(args, loader, start, is_done=start >= state.max_steps)

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._resume.begin_epoch()
        if self._resume.now == self._resume.epoch and not self._resume.n_batches:
            self._restore_rng()  # making the iterator drew numbers after the state was saved

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if self._resume.now == self._resume.epoch:
            self._restore_rng()  # making the iterator drew numbers before the state was saved

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        state.epoch = self._resume.epoch_at(state.epoch)
        if self._checkpointer is not None:
            self._checkpointer.step(state.global_step)
        if api.should_stop():
            # At once: the Trainer may load its best model before on_train_end.
            self._close()
            control.should_training_stop = True
            _skip_evaluation(control)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if self._resume.is_over:
            control.should_training_stop = state.global_step >= state.max_steps
            control.should_log = False
            _skip_evaluation(control)
        if api.should_stop():
            _skip_evaluation(control)  # the epoch may not be over, and the grace is short
        self._resume.end_epoch(args)

    def _restore_rng(self) -> None:
        """Reset the generators to their states at the time of the save."""
        if self._rng_state is not None:
            write_rng(self._rng_state)
            self._rng_state = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or not state.log_history:
            return
        is_first = "loss" in logs and not self._resume.is_logged
        self._resume.is_logged |= is_first
        if is_first or "train_loss" in logs:
            factor = self._resume.loss_factor(state.global_step)
            for entry in (logs, state.log_history[-1]):
                for name in {"loss", "train_loss"} & entry.keys():
                    entry[name] *= factor

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._close()

    def _close(self, *, save: bool = True) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close(save=save)
            self._checkpointer = None


def _skip_evaluation(control: TrainerControl) -> None:
    control.should_evaluate = control.should_save = False


class _Progress:
    """The Trainer's own state as JSON, the text of its ``trainer_state.json``."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, str]:
        values = {
            name: value
            for name, value in dataclasses.asdict(self._state).items()
            if name not in _START_FIELDS
        }
        return {"json": json.dumps(values)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        values = json.loads(saved["json"])
        names = {field.name for field in dataclasses.fields(self._state)} - _START_FIELDS
        for name in names & values.keys():
            setattr(self._state, name, values[name])
