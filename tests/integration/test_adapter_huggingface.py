"""``GpuopsCallback`` in the real Trainer: a run that broke off goes on bit for bit."""

import contextlib
import gc
import importlib

import pytest
import torch
from support.in_process_keeper import InProcessNode
from support.rings import connected

from gpuops.errors import UsageError
from gpuops.wire.ring import WorkerFlag

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hf():
    """Return the module of the trainings: Transformers takes seconds to import."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return importlib.import_module("support.huggingface_train")


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
        pytest.param(4, {}, marks=pytest.mark.soak),  # as the next test, which always runs
        pytest.param(11, {}, marks=pytest.mark.soak),
        (17, {}),
        (22, {"dataloader_drop_last": True}),
        (3, {"gradient_accumulation_steps": 4}),
        pytest.param(5, {"gradient_accumulation_steps": 4}, marks=pytest.mark.soak),
        (8, {"gradient_accumulation_steps": 4, "max_steps": 10}),
        (13, {"max_steps": 20, "lr_scheduler_type": "cosine", "warmup_steps": 5}),
    ],
    ids=str,
)
def test_a_run_that_broke_off_goes_on_bit_for_bit(tmp_path, dies_at, options, node, hf):
    whole = hf.Recorder()
    undisturbed = hf.run(tmp_path, [], whole, **options)
    first, second = hf.Recorder(dies_at), hf.Recorder()
    hf.run(tmp_path, [hf.saving(keeper=node.connect(generation=0), every=1)], first, **options)
    gc.collect()
    resumed = hf.run(
        tmp_path, [hf.saving(keeper=node.connect(generation=1), every=1)], second, **options
    )

    assert first.steps == whole.steps[:dies_at]
    assert second.steps == whole.steps[dies_at:]
    assert hf.same_weights(resumed, undisturbed)
    assert resumed.state.global_step == undisturbed.state.global_step
    assert resumed.args.gradient_accumulation_steps == options.get("gradient_accumulation_steps", 1)
    logged = [entry["loss"] for entry in undisturbed.state.log_history if "loss" in entry]
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert again[dies_at - 1 :] == logged[dies_at:]  # the last log came after the last state


def test_the_same_callback_serves_the_training_after_one_that_broke_off(tmp_path, hf):
    whole, first, second = hf.Recorder(), hf.Recorder(4), hf.Recorder()
    undisturbed = hf.run(tmp_path, [], whole)
    callback = hf.saving(directory=str(tmp_path / "states"), every=1)
    hf.run(tmp_path, [callback], first)
    resumed = hf.run(tmp_path, [callback], second)

    # Of which step the newest state is depends on how fast the keeper took the ones before.
    n_steps = len(second.steps)
    assert first.steps == whole.steps[:4]
    assert len(whole.steps) - 4 <= n_steps < len(whole.steps)
    assert second.steps == whole.steps[-n_steps:]
    assert hf.same_weights(resumed, undisturbed)


@pytest.mark.parametrize("stop", [5, 11], ids=["within an epoch", "at its end"])
def test_a_drain_ends_the_training_after_a_step_that_is_saved(tmp_path, stop, node, hf):
    whole, first, second = hf.Recorder(), hf.Recorder(), hf.Recorder()
    undisturbed = hf.run(tmp_path, [], whole)
    options = {"save_strategy": "epoch"}
    callback = hf.saving(keeper=node.connect(), every=1000, directory=str(tmp_path / "states"))
    with connected() as ring:
        ring.drain(stop)
        drained = hf.run(tmp_path, [callback], first, **options)
    assert drained.state.global_step == stop
    assert WorkerFlag.STOP_RETURNED | WorkerFlag.SAVED_AT_STOP in ring.flags
    # What takes long is left out: the grace is short.
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    resumed = hf.run(tmp_path, [hf.saving(keeper=node.connect(generation=1), every=1000)], second)

    assert first.steps + second.steps == whole.steps
    assert hf.same_weights(resumed, undisturbed)


def test_what_was_seen_is_not_read_again(tmp_path, node, hf):
    hf.run(tmp_path, [hf.saving(keeper=node.connect(), every=1)], hf.Recorder(15))
    samples = hf.Samples()
    hf.run(
        tmp_path,
        [hf.saving(keeper=node.connect(generation=1), every=1)],
        hf.Recorder(),
        samples=samples,
    )

    assert len(samples.asked) == 3 * hf.N_SAMPLES - 15 * hf.BATCH


def test_epochs_that_are_over_evaluate_and_save_nothing(tmp_path, node, hf):
    hf.run(tmp_path, [hf.saving(keeper=node.connect(), every=1)], hf.Recorder(15))
    resumed = hf.run(
        tmp_path,
        [hf.saving(keeper=node.connect(generation=1), every=1)],
        hf.Recorder(),
        save_strategy="epoch",
        save_only_model=True,
    )

    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert saved == {"checkpoint-22", "checkpoint-33"}
    assert resumed.state.global_step == 33


def test_the_loss_of_the_first_log_is_over_the_steps_made_here(tmp_path, node, hf):
    whole = hf.Recorder()
    hf.run(tmp_path, [], whole, logging_steps=11)
    ended = hf.Recorder(11)
    hf.run(tmp_path, [hf.saving(keeper=node.connect(), every=1)], ended, logging_steps=11)
    second = hf.Recorder()
    made = hf.run(
        tmp_path,
        [hf.saving(keeper=node.connect(generation=1), every=1)],
        second,
        logging_steps=11,
    )

    assert second.steps[10][2] == pytest.approx(whole.steps[21][2], rel=1e-6)
    assert second.steps[21][2] == whole.steps[32][2]
    assert made.state.log_history[-1]["train_loss"] == pytest.approx(
        (whole.steps[21][2] + whole.steps[32][2]) / 2, rel=1e-6
    )


@pytest.mark.parametrize("n_steps", [11, 4])
def test_a_training_that_is_done_makes_no_step(tmp_path, n_steps, node, hf):
    done = hf.run(
        tmp_path,
        [hf.saving(keeper=node.connect(), every=1)],
        hf.Recorder(),
        max_steps=n_steps,
    )
    again = hf.Recorder()
    made = hf.run(
        tmp_path,
        [hf.saving(keeper=node.connect(generation=1), every=1)],
        again,
        max_steps=n_steps,
    )

    assert again.steps == []
    assert made.state.global_step == n_steps
    assert hf.same_weights(made, done)


def test_no_state_is_a_fresh_start_and_two_sources_are_refused(tmp_path, node, hf):
    callback = hf.saving(keeper=node.connect(), every=2)
    made = hf.run(
        tmp_path, [callback], hf.Recorder(), max_steps=4, save_strategy="steps", save_steps=2
    )
    assert callback.checkpointer is None
    assert made.state.global_step == 4

    other = hf.trainer(
        tmp_path, [hf.saving(keeper=node.connect(generation=1), every=2)], max_steps=6
    )
    with pytest.raises(UsageError, match="resume_from_checkpoint"):
        other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_other_options_of_the_checkpointer_are_passed_on(tmp_path, node, hf):
    seen = {"tokens": 5}
    callback = hf.saving(keeper=node.connect(), every=1, extra=seen)
    hf.run(tmp_path, [callback], hf.Recorder(), max_steps=2)
    seen["tokens"] = 0
    hf.run(
        tmp_path,
        [hf.saving(keeper=node.connect(generation=1), every=1, extra=seen)],
        hf.Recorder(),
        max_steps=3,
    )

    assert seen == {"tokens": 5}
