"""Checkpoints for Lightning's ``Trainer``: one callback, no other changes.

``Trainer(callbacks=[GpuopsCheckpoint(directory="/shared/ckpt")])`` and ``trainer.fit(…)``: before
the loops start the newest state is loaded in place, with the loops' own progress, and
`Checkpointer.step` is called after each batch that ended with an optimizer step.

As with Lightning's own checkpoints, the order of data within an epoch is resumed only where the
data loader has a state (torchdata's ``StatefulDataLoader``); Lightning warns where it has none. On
several ranks it needs what `gpuops.worker.adapters.lightning_data` adds.

A drain ends the fit after a step whose state is saved, as Lightning ends it on SIGTERM: by its
``SIGTERMException``, which ends the program with code 0 unless the script catches it.
"""

# ruff: noqa: ARG002, ANN401 the hooks and their arguments are the framework's

import logging
import signal
from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from gpuops.checkpoint.types import CheckpointError
from gpuops.errors import UsageError
from gpuops.worker import api
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.state.objects import read_rng, write_rng

if TYPE_CHECKING:  # needs private names of Lightning
    from gpuops.worker.adapters.lightning_data import DataOrder

_log = logging.getLogger(__name__)


class GpuopsCheckpoint(Callback):
    """Restores before the first step of ``fit``, saves after optimizer steps.

    *options* are those of `gpuops.Checkpointer` (``directory``, ``every``, ``persist_every``,
    ``slots``, ``keep_last``, ``extra``, …); the module, its optimizers and schedules, the scaler,
    the loops and the callbacks' states are added here.

    Raises:
        UsageError: In ``fit``: a ``ckpt_path`` as well, or a strategy that does not shard with
            torch.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._order: DataOrder | None = None
        self._begins_epoch = False  # the state is of an epoch's end
        self._step = 0
        self._rng_state: Mapping[str, Any] | None = None
        self._sigterm_handler: object = None

    @property
    def checkpointer(self) -> Checkpointer | None:
        """Return the checkpointer of the current fit, None outside of one."""
        return self._checkpointer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = type(trainer.strategy).__name__
        if "DeepSpeed" in strategy or strategy == "FSDPStrategy":
            raise UsageError(f"the adapter does not support {strategy}; use DDP or ModelParallel")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            raise UsageError(
                f"fit(ckpt_path={trainer.ckpt_path!r}) and this callback would both restore: "
                "leave the path out, or import it as a state with 'gpuops ckpt import'"
            )
        # An exception may have ended the fit before; its last state must not be saved with the
        # current random numbers.
        self._close(save=False)
        options = dict(self._options)
        # The state is restored into the first of them, the user's own.
        self._order = _data_order(trainer.fit_loop)
        progress = _Progress(trainer, self, self._order)
        extra = ChainMap(options.pop("extra", {}), {"lightning": progress})
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._checkpointer = Checkpointer(
            model=trainer.strategy.model or pl_module,
            optimizer=list(trainer.optimizers),
            scheduler=schedulers or None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            extra=extra,
            **options,
        )
        self._step = self._checkpointer.restore()
        if self._step != trainer.global_step:
            raise CheckpointError(
                f"the state of step {self._step} has the loops at step {trainer.global_step}"
            )
        self._rng_state = read_rng() if self._step else None
        self._sigterm_handler = signal.getsignal(signal.SIGTERM)  # Lightning replaces it next

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_sigterm_handler()
        self._begins_epoch = self._order is not None and self._order.begin_epoch()

    def _restore_sigterm_handler(self) -> None:
        """Under `gpuops run`, undo Lightning's handler: in it the ranks wait for each other.

        It would do so in the middle of a step, in which they wait for each other, too.
        """
        if api.is_watched() and callable(self._sigterm_handler):
            with suppress(ValueError):  # not the main thread: Lightning has replaced nothing
                signal.signal(signal.SIGTERM, self._sigterm_handler)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._begins_epoch:
            self._restore_rng()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._restore_rng()

    def _restore_rng(self) -> None:
        """Set the random numbers to those of the state, once: Lightning has drawn others since."""
        if self._rng_state is not None:
            write_rng(self._rng_state)
            self._rng_state = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not trainer.is_last_batch:  # else at the end of the epoch, so that none begins twice
            self._save_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_step(trainer)

    def _save_step(self, trainer: Trainer) -> None:
        if self._checkpointer is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self._checkpointer.step(self._step)
            if api.should_stop():
                # Not trainer.should_stop: it validates first, and min_epochs would overrule it.
                self._close()
                raise SIGTERMException

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self, *, save: bool = True) -> None:
        if self._order is not None:
            self._order.close()
            self._order = None
        if self._checkpointer is not None:
            self._checkpointer.close(save=save)
            self._checkpointer = None


def _data_order(loop: Any) -> "DataOrder | None":
    """Return what keeps the order of the data of *loop*, None in a Lightning that it does not know.

    It needs names that are private to Lightning, whose next version may lack one.
    """
    try:
        from gpuops.worker.adapters.lightning_data import DataOrder

        return DataOrder(loop)
    except (ImportError, AttributeError) as exc:
        _log.warning(
            "the order of the data within an epoch is not resumed: gpuops does not know this "
            "version of Lightning (%s)",
            exc,
        )
        return None


class _Progress:
    """The progress of the loops, the order of the data, and the states of the other callbacks."""

    def __init__(self, trainer: Trainer, own: Callback, order: "DataOrder | None") -> None:
        self._trainer = trainer
        self._own = own
        self._order = order

    def state_dict(self) -> dict[str, Any]:
        callbacks = {
            callback.state_key: state
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]
            if callback is not self._own and (state := callback.state_dict())
        }
        return {
            "fit_loop": self._trainer.fit_loop.state_dict(),
            "draws": [] if self._order is None else self._order.state(),
            "callbacks": callbacks,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(saved["fit_loop"])
        if self._order is not None:
            self._order.resume(saved.get("draws", ()))
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if callback is not self._own and callback.state_key in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][callback.state_key])
