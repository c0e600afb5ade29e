"""A small training in the real Hugging Face Trainer, which can break off after a step.

Transformers takes seconds to import: tests import this module in a fixture.
"""

import contextlib

import torch
import transformers

from gpuops.worker.adapters.huggingface import GpuopsCallback

N_SAMPLES, BATCH = 22, 2  # 11 batches an epoch


def saving(**options):
    """Return the callback of gpuops."""
    return GpuopsCallback(**options)


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
