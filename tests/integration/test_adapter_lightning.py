"""``GpuopsCheckpoint`` in the real Trainer: a fit that broke off goes on bit for bit."""

import contextlib
import gc
import warnings

import pytest
import torch
from support.in_process_keeper import InProcessNode

from gpuops.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # Lightning's own, of its own making
]
lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402 after the skip

from gpuops.worker.adapters.lightning import GpuopsCheckpoint  # noqa: E402 after the skip


@pytest.fixture(autouse=True)
def one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture
def node():
    with contextlib.closing(InProcessNode()) as node:
        yield node


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


@pytest.mark.parametrize(
    ("dies_at", "options"),
    [
        (3, {}),
        (7, {}),
        (10, {}),
        (14, {}),
        (7, {"max_steps": 18, "max_epochs": -1}),
        (5, {"limit_train_batches": 5}),
        (2, {"accumulate_grad_batches": 3}),
        (4, {"accumulate_grad_batches": 3}),
    ],
    ids=str,
)
def test_a_fit_that_broke_off_goes_on_bit_for_bit(tmp_path, dies_at, options, node):
    whole, _ = fit(tmp_path, **options)
    counts = Counts()
    first, _ = fit(
        tmp_path, counts, GpuopsCheckpoint(keeper=node.connect(), every=1), Dies(dies_at), **options
    )
    gc.collect()
    resumed_counts = Counts()
    ours = GpuopsCheckpoint(keeper=node.connect(generation=1), every=1)
    second, trainer = fit(tmp_path, resumed_counts, ours, **options)

    n_first = len(first.losses)
    assert first.losses == whole.losses[:n_first]
    assert second.losses == whole.losses[n_first:]
    assert same_weights(second, whole)
    assert trainer.global_step == whole.losses[-1][0] + 1
    if "max_steps" not in options:  # Lightning counts one more there after any restart
        assert trainer.current_epoch == 3
    assert resumed_counts.n_batches == len(whole.losses)
    assert ours.checkpointer is None


def test_validation_and_plateaus_go_on_as_well(tmp_path, node):
    class Watched(Module):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.net(batch[0]).square().mean())

        def val_dataloader(self):
            return torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=2
            )

    whole, _ = fit(tmp_path, kind=Watched)
    saving = GpuopsCheckpoint(keeper=node.connect(), every=1)
    first, _ = fit(tmp_path, saving, Dies(9), kind=Watched)
    resuming = GpuopsCheckpoint(keeper=node.connect(generation=1), every=1)
    second, _ = fit(tmp_path, resuming, kind=Watched)

    assert first.losses + second.losses == whole.losses
    assert same_weights(second, whole)


def test_a_loader_without_a_state_is_told_by_lightning(tmp_path, node):
    data = torch.utils.data.TensorDataset(torch.randn(14, 4))
    plain = torch.utils.data.DataLoader(data, batch_size=2)
    fit(tmp_path, GpuopsCheckpoint(keeper=node.connect(), every=1), Dies(3), data=plain)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module, _ = fit(
            tmp_path, GpuopsCheckpoint(keeper=node.connect(generation=1), every=1), data=plain
        )

    assert any("not resumable" in str(item.message) for item in told)
    assert module.losses[0][:3] == (3, 0, 3)


def test_two_sources_are_refused(tmp_path, node):
    _, trainer = fit(tmp_path, max_steps=2)
    path = str(tmp_path / "x.ckpt")
    trainer.save_checkpoint(path)

    with pytest.raises(UsageError, match="ckpt_path"):
        fit(tmp_path, GpuopsCheckpoint(keeper=node.connect(), every=1), ckpt_path=path)


def test_it_is_of_no_use_outside_of_fit_and_harms_nothing(tmp_path):
    ours = GpuopsCheckpoint(directory=str(tmp_path / "ckpt"))
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[ours]
    )

    class Tested(Module):
        def test_step(self, batch, batch_idx):
            return None

    trainer.test(Tested(), loader(), verbose=False)
    assert ours.checkpointer is None
