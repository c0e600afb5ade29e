"""``GpuopsCallback`` in the real Trainer: a run that broke off goes on bit for bit."""

import contextlib
import gc

import pytest
import torch
from support.in_process_keeper import InProcessNode

from gpuops.errors import UsageError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from gpuops.worker.adapters.huggingface import GpuopsCallback  # noqa: E402 after the skip

N_SAMPLES, BATCH = 22, 2  # 11 batches an epoch


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
    """What ends a run in the middle."""


class Recorder(transformers.TrainerCallback):
    """Notes what each step was, and ends the run after *dies_at* steps."""

    def __init__(self, dies_at=None):
        self.dies_at = dies_at
        self.steps = []
        self.batches = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append((state.global_step, state.epoch))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.steps[-1] += (logs["loss"], logs["learning_rate"])
        if state.global_step == self.dies_at:
            raise KilledError


class Samples(torch.utils.data.Dataset):
    """Tokens; notes which were asked for."""

    def __init__(self):
        torch.manual_seed(11)
        self.tokens = torch.randint(0, 50, (N_SAMPLES, 8))
        self.asked = []

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        self.asked.append(int(index))
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer(tmp_path, callbacks, samples=None, **options):
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.2
    )
    arguments = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    }
    return transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(str(tmp_path / "out"), **(arguments | options)),
        train_dataset=samples or Samples(),
        callbacks=callbacks,
    )


def run(tmp_path, callbacks, recorder, **options):
    made = trainer(tmp_path, [*callbacks, recorder], **options)
    with contextlib.suppress(KilledError):
        made.train()
    return made


def same_weights(a, b):
    one, other = a.model.state_dict(), b.model.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(
    ("dies_at", "options"),
    [
        (4, {}),
        (11, {}),
        (17, {}),
        (22, {"dataloader_drop_last": True}),
        (3, {"gradient_accumulation_steps": 4}),
        (5, {"gradient_accumulation_steps": 4}),
        (8, {"gradient_accumulation_steps": 4, "max_steps": 10}),
        (13, {"max_steps": 20, "lr_scheduler_type": "cosine", "warmup_steps": 5}),
    ],
    ids=str,
)
def test_a_run_that_broke_off_goes_on_bit_for_bit(tmp_path, dies_at, options, node):
    whole = Recorder()
    undisturbed = run(tmp_path, [], whole, **options)
    first, second = Recorder(dies_at), Recorder()
    run(tmp_path, [GpuopsCallback(keeper=node.connect(generation=0), every=1)], first, **options)
    gc.collect()
    resumed = run(
        tmp_path, [GpuopsCallback(keeper=node.connect(generation=1), every=1)], second, **options
    )

    assert first.steps == whole.steps[:dies_at]
    assert second.steps == whole.steps[dies_at:]
    assert same_weights(resumed, undisturbed)
    assert resumed.state.global_step == undisturbed.state.global_step
    assert resumed.args.gradient_accumulation_steps == options.get("gradient_accumulation_steps", 1)
    logged = [entry["loss"] for entry in undisturbed.state.log_history if "loss" in entry]
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert again[dies_at - 1 :] == logged[dies_at:]  # the last log came after the last state


def test_the_same_callback_serves_the_training_after_one_that_broke_off(tmp_path):
    whole, first, second = Recorder(), Recorder(4), Recorder()
    undisturbed = run(tmp_path, [], whole)
    callback = GpuopsCallback(directory=str(tmp_path / "states"), every=1)
    run(tmp_path, [callback], first)
    resumed = run(tmp_path, [callback], second)

    # Of which step the newest state is depends on how fast the keeper took the ones before.
    n_steps = len(second.steps)
    assert first.steps == whole.steps[:4]
    assert len(whole.steps) - 4 <= n_steps < len(whole.steps)
    assert second.steps == whole.steps[-n_steps:]
    assert same_weights(resumed, undisturbed)


def test_what_was_seen_is_not_read_again(tmp_path, node):
    run(tmp_path, [GpuopsCallback(keeper=node.connect(), every=1)], Recorder(15))
    samples = Samples()
    run(
        tmp_path,
        [GpuopsCallback(keeper=node.connect(generation=1), every=1)],
        Recorder(),
        samples=samples,
    )

    assert len(samples.asked) == 3 * N_SAMPLES - 15 * BATCH


def test_epochs_that_are_over_evaluate_and_save_nothing(tmp_path, node):
    run(tmp_path, [GpuopsCallback(keeper=node.connect(), every=1)], Recorder(15))
    resumed = run(
        tmp_path,
        [GpuopsCallback(keeper=node.connect(generation=1), every=1)],
        Recorder(),
        save_strategy="epoch",
        save_only_model=True,
    )

    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert saved == {"checkpoint-22", "checkpoint-33"}
    assert resumed.state.global_step == 33


def test_the_loss_of_the_first_log_is_over_the_steps_made_here(tmp_path, node):
    whole = Recorder()
    run(tmp_path, [], whole, logging_steps=11)
    ended = Recorder(11)
    run(tmp_path, [GpuopsCallback(keeper=node.connect(), every=1)], ended, logging_steps=11)
    second = Recorder()
    made = run(
        tmp_path,
        [GpuopsCallback(keeper=node.connect(generation=1), every=1)],
        second,
        logging_steps=11,
    )

    assert second.steps[10][2] == pytest.approx(whole.steps[21][2], rel=1e-6)
    assert second.steps[21][2] == whole.steps[32][2]
    assert made.state.log_history[-1]["train_loss"] == pytest.approx(
        (whole.steps[21][2] + whole.steps[32][2]) / 2, rel=1e-6
    )


@pytest.mark.parametrize("n_steps", [11, 4])
def test_a_training_that_is_done_makes_no_step(tmp_path, n_steps, node):
    done = run(
        tmp_path, [GpuopsCallback(keeper=node.connect(), every=1)], Recorder(), max_steps=n_steps
    )
    again = Recorder()
    made = run(
        tmp_path,
        [GpuopsCallback(keeper=node.connect(generation=1), every=1)],
        again,
        max_steps=n_steps,
    )

    assert again.steps == []
    assert made.state.global_step == n_steps
    assert same_weights(made, done)


def test_no_state_is_a_fresh_start_and_two_sources_are_refused(tmp_path, node):
    callback = GpuopsCallback(keeper=node.connect(), every=2)
    made = run(tmp_path, [callback], Recorder(), max_steps=4, save_strategy="steps", save_steps=2)
    assert callback.checkpointer is None
    assert made.state.global_step == 4

    other = trainer(
        tmp_path, [GpuopsCallback(keeper=node.connect(generation=1), every=2)], max_steps=6
    )
    with pytest.raises(UsageError, match="resume_from_checkpoint"):
        other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_other_options_of_the_checkpointer_are_passed_on(tmp_path, node):
    seen = {"tokens": 5}
    callback = GpuopsCallback(keeper=node.connect(), every=1, extra=seen)
    run(tmp_path, [callback], Recorder(), max_steps=2)
    seen["tokens"] = 0
    run(
        tmp_path,
        [GpuopsCallback(keeper=node.connect(generation=1), every=1, extra=seen)],
        Recorder(),
        max_steps=3,
    )

    assert seen == {"tokens": 5}
