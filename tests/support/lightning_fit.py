"""A small fit in the real Lightning Trainer, which can break off after a step.

Lightning takes seconds to import: tests import this module in a fixture.
"""

import contextlib

import lightning.pytorch as lightning
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuops.worker.adapters.lightning import GpuopsCheckpoint

__all__ = ["DistributedSamplerWrapper", "StatefulDataLoader"]  # for tests, as slow to import


def saving(**options):
    """Return the callback of gpuops."""
    return GpuopsCheckpoint(**options)


class KilledError(Exception):
    """What ends a fit in the middle."""


class Module(lightning.LightningModule):
    """Dropout, batch norm, a schedule by steps and one by epochs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 1),
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.losses.append((self.global_step, self.current_epoch, batch_idx, loss.item()))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Dies(lightning.Callback):
    """Ends the fit after so many optimizer steps."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and not trainer.is_last_batch:
            raise KilledError

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step == self.step:
            raise KilledError


class Counts(lightning.Callback):
    """A callback with a state of its own."""

    def __init__(self):
        self.n_batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.n_batches += 1

    def state_dict(self):
        return {"n": self.n_batches}

    def load_state_dict(self, state):
        self.n_batches = state["n"]


def loader():
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(14, 4, generator=generator))
    return StatefulDataLoader(data, batch_size=2, shuffle=True)


def fit(tmp_path, *callbacks, kind=Module, data=None, ckpt_path=None, **options):
    torch.manual_seed(9)
    module = kind()
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **({"max_epochs": 3} | options),
    )
    with contextlib.suppress(KilledError):
        trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return module, trainer


def same_weights(a, b):
    one, other = a.state_dict(), b.state_dict()
    return all(torch.equal(one[name], other[name]) for name in one)
