"""``GpuopsCheckpoint`` in the real Trainer: a fit that broke off goes on bit for bit."""

import contextlib
import gc
import importlib
import signal
import warnings

import pytest
import torch
from support.in_process_keeper import InProcessNode
from support.rings import connected

from gpuops.errors import UsageError
from gpuops.wire.ring import WorkerFlag

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # Lightning's own, of its own making
]


@pytest.fixture(scope="module")
def lit():
    """Return the module of the fits: as a fixture, since Lightning takes seconds to import."""
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    return importlib.import_module("support.lightning_fit")


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
def test_a_fit_that_broke_off_goes_on_bit_for_bit(tmp_path, dies_at, options, node, lit):
    whole, undisturbed = lit.fit(tmp_path, **options)
    counts = lit.Counts()
    first, _ = lit.fit(
        tmp_path,
        counts,
        lit.saving(keeper=node.connect(), every=1),
        lit.Dies(dies_at),
        **options,
    )
    gc.collect()
    resumed_counts = lit.Counts()
    ours = lit.saving(keeper=node.connect(generation=1), every=1)
    second, trainer = lit.fit(tmp_path, resumed_counts, ours, **options)

    n_first = len(first.losses)
    assert first.losses == whole.losses[:n_first]
    assert second.losses == whole.losses[n_first:]
    assert lit.same_weights(second, whole)
    assert trainer.global_step == whole.losses[-1][0] + 1
    assert trainer.current_epoch == undisturbed.current_epoch
    assert resumed_counts.n_batches == len(whole.losses)
    assert ours.checkpointer is None


def drawn(lit, order, seed):
    """Return a loader, mostly of one rank of two; who resumes draws other numbers at first."""
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4, generator=generator))
    torch.manual_seed(seed)
    place = {"num_replicas": 2, "rank": 1}
    if order == "distributed":
        sampler = torch.utils.data.DistributedSampler(data, **place)
    elif order == "alone":
        sampler = torch.utils.data.RandomSampler(data, num_samples=8)
    else:  # as Lightning wraps all samplers but torch's own for shuffle=
        inner = {
            "shuffled": lit.StatefulDataLoader(data, shuffle=True).sampler,
            "weighted": torch.utils.data.WeightedRandomSampler([0.1] * 10 + [0.9] * 6, 16),
        }
        sampler = lit.DistributedSamplerWrapper(inner[order], **place)
    if order == "weighted":  # what Lightning gives the wrapper to depends on the loader
        batches = lit.StatefulDataLoader(data, batch_size=2).batch_sampler
        batches.sampler = sampler
        return lit.StatefulDataLoader(data, batch_sampler=batches)
    return lit.StatefulDataLoader(data, batch_size=2, sampler=sampler)


@pytest.mark.parametrize(
    ("order", "dies_at", "options"),
    [
        *(("distributed", step, {}) for step in (4, 6)),
        *(("shuffled", step, {}) for step in (2, 4, 6)),
        *(("weighted", step, {}) for step in (2, 4, 6)),
        ("alone", 6, {}),
        ("distributed", 4, {"max_steps": 11, "max_epochs": -1}),
        ("shuffled", 6, {"max_steps": 11, "max_epochs": -1}),
    ],
    ids=str,
)
def test_the_order_of_data_goes_on_whatever_draws_it(tmp_path, order, dies_at, options, node, lit):
    """An epoch has four steps."""
    whole, undisturbed = lit.fit(tmp_path, data=drawn(lit, order, 1), **options)
    first, _ = lit.fit(
        tmp_path,
        lit.saving(keeper=node.connect(), every=1),
        lit.Dies(dies_at),
        data=drawn(lit, order, 1),
        **options,
    )
    gc.collect()
    second, trainer = lit.fit(
        tmp_path,
        lit.saving(keeper=node.connect(generation=1), every=1),
        data=drawn(lit, order, 2),
        **options,
    )

    assert first.losses + second.losses == whole.losses
    assert lit.same_weights(second, whole)
    assert trainer.current_epoch == undisturbed.current_epoch


def test_validation_and_plateaus_go_on_as_well(tmp_path, node, lit):
    class Watched(lit.Module):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.net(batch[0]).square().mean())

        def val_dataloader(self):
            return torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=2
            )

    whole, _ = lit.fit(tmp_path, kind=Watched)
    saving = lit.saving(keeper=node.connect(), every=1)
    first, _ = lit.fit(tmp_path, saving, lit.Dies(9), kind=Watched)
    resuming = lit.saving(keeper=node.connect(generation=1), every=1)
    second, _ = lit.fit(tmp_path, resuming, kind=Watched)

    assert first.losses + second.losses == whole.losses
    assert lit.same_weights(second, whole)


class Watched:
    """Which SIGTERM handler the steps are made under."""

    def __init__(self):
        self.handlers = set()

    def __call__(self, lightning):
        watched = self

        class Callback(lightning.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                watched.handlers.add(signal.getsignal(signal.SIGTERM))

        return Callback()


@pytest.mark.parametrize("stop", [5, 7], ids=["within an epoch", "at its end"])
def test_a_drain_ends_the_fit_after_a_step_that_is_saved(tmp_path, stop, node, lit):
    whole, _ = lit.fit(tmp_path)
    ours = lambda *_: None  # noqa: E731 the handler of the shim
    before, watched = signal.signal(signal.SIGTERM, ours), Watched()
    saving = lit.saving(keeper=node.connect(), every=1000, directory=str(tmp_path / "states"))
    try:
        with connected() as ring:
            ring.drain(stop)
            with pytest.raises(SystemExit) as ended:
                lit.fit(tmp_path, saving, watched(lit.lightning), min_epochs=3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ended.value.code
    assert watched.handlers == {ours}, "not Lightning's, which calls a collective"
    assert WorkerFlag.STOP_RETURNED | WorkerFlag.SAVED_AT_STOP in ring.flags
    assert saving.checkpointer is None
    second, _ = lit.fit(tmp_path, lit.saving(keeper=node.connect(generation=1), every=1000))

    assert second.losses == whole.losses[stop:]
    assert lit.same_weights(second, whole)


def test_a_loader_without_a_state_is_told_by_lightning(tmp_path, node, lit):
    data = torch.utils.data.TensorDataset(torch.randn(14, 4))
    plain = torch.utils.data.DataLoader(data, batch_size=2)
    lit.fit(tmp_path, lit.saving(keeper=node.connect(), every=1), lit.Dies(3), data=plain)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module, _ = lit.fit(
            tmp_path, lit.saving(keeper=node.connect(generation=1), every=1), data=plain
        )

    assert any("not resumable" in str(item.message) for item in told)
    assert module.losses[0][:3] == (3, 0, 3)


def test_two_sources_are_refused(tmp_path, node, lit):
    _, trainer = lit.fit(tmp_path, max_steps=2)
    path = str(tmp_path / "x.ckpt")
    trainer.save_checkpoint(path)

    with pytest.raises(UsageError, match="ckpt_path"):
        lit.fit(tmp_path, lit.saving(keeper=node.connect(), every=1), ckpt_path=path)


def test_it_is_of_no_use_outside_of_fit_and_harms_nothing(tmp_path, lit):
    ours = lit.saving(directory=str(tmp_path / "ckpt"))
    trainer = lit.lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[ours]
    )

    class Tested(lit.Module):
        def test_step(self, batch, batch_idx):
            return None

    trainer.test(Tested(), lit.loader(), verbose=False)
    assert ours.checkpointer is None


@pytest.mark.usefixtures("lit")  # or it is not installed
def test_a_lightning_without_the_names_that_the_order_of_data_needs_trains_all_the_same(caplog):
    from gpuops.worker.adapters.lightning import _data_order

    assert _data_order(object()) is None
    assert "does not know this version of Lightning ('object' object has no" in caplog.text
