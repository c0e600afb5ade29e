"""Rows of docs/frameworks.md: real trainings of each kind, whose rank 1 is killed once."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
DIES = 4
SOAK = pytest.mark.soak
PYTHONPATH = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def recovered(run, world, start=DIES, limit_s=240):
    """Check that rank 1 was blamed, and that all ranks went on from *start* as if undisturbed."""
    assert run.finish(limit_s) == 0, run.said()
    for rank in range(world):
        assert f"rank {rank} from step {start}: same True" in run.said(), run.said()
    (incident,) = run.incidents()
    assert [c["id"] for c in incident["culprits"] if c["kind"] == "rank"] == ["1"]
    assert incident["state"] == "closed"
    report = [sys.executable, "-m", "gpuops", "report", "--run-dir", str(run.directory), "--json"]
    shown = json.loads(subprocess.run(report, check=True, capture_output=True).stdout)
    assert [attempt["redone_steps"] for attempt in shown["attempts"]] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param("ddp", 2, marks=SOAK),
        pytest.param("fsdp1", 2, marks=SOAK),
        pytest.param("fsdp2", 2, marks=SOAK),
        pytest.param("hsdp", 4, marks=SOAK),
        pytest.param("tp", 2, marks=SOAK),
        pytest.param("pp", 2, marks=SOAK),
        pytest.param("compiled", 2, marks=SOAK),
        pytest.param("recomputed", 2, marks=SOAK),
        pytest.param("zero", 2, marks=SOAK),
        pytest.param("accumulation", 2, marks=SOAK),
        pytest.param("scaler", 2, marks=SOAK),
        pytest.param("ema", 2, marks=SOAK),
    ],
)
def test_torchs_own_ways_to_train(tmp_path, kind, world):
    env = {"JOB_DIR": str(tmp_path)}
    with Run(tmp_path / "run", JOBS / "frameworks.py", kind, env=env, nproc=world) as run:
        recovered(run, world)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("titan", "torchtitan.components.optimizer"),
        ("torchft", "torchft.optim"),
        ("oss", "fairscale.optim.oss"),
    ],
)
def test_optimizers_that_frameworks_wrap(tmp_path, kind, module):
    pytest.importorskip(module, reason=f"{module} is not installed")
    env = {"JOB_DIR": str(tmp_path)}
    with Run(tmp_path / "run", JOBS / "frameworks.py", kind, env=env) as run:
        recovered(run, 2)


def test_accelerate_launch(tmp_path):
    """Its script is the one that frameworks.py is without a launcher."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    config = tmp_path / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 2\n"
    )
    words = ["accelerate", "launch", "--config_file", config, JOBS / "frameworks.py", "accelerate"]
    env = {"JOB_DIR": str(tmp_path)}
    with Run(tmp_path / "run", *words, env=env, nproc=None) as run:
        recovered(run, 2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_launcher_and_engine(tmp_path, stage):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    words = ["deepspeed", "--num_gpus=2", "--no_local_rank", JOBS / "frameworks.py", "deepspeed"]
    env = {"JOB_DIR": str(tmp_path), "ZERO_STAGE": str(stage), "DS_ACCELERATOR": "cpu"}
    with Run(tmp_path / "run", *words, env=env, nproc=None) as run:
        recovered(run, 2, limit_s=900)  # the first one compiles


each_trainer = pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("huggingface", ["transformers"]),
        ("lightning", ["lightning", "torchdata"]),
        ("trl", ["trl", "datasets"]),
    ],
)


@pytest.mark.soak
@each_trainer
def test_trainers_with_our_callbacks(tmp_path, kind, modules):
    for module in modules:
        pytest.importorskip(module, reason=f"{module} is not installed")
    env = {"JOB_DIR": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    with Run(tmp_path / "run", JOBS / "trainers.py", kind, env=env) as run:
        recovered(run, 2)

    assert {p["step"] for p in run.payloads("checkpoint.restored")} == {DIES}


@pytest.mark.soak
@each_trainer
def test_a_drained_trainer_goes_on_after_its_last_step(tmp_path, kind, modules):
    """Nothing is saved but that step, and the script ends with 0, as if it were done."""
    for module in modules:
        pytest.importorskip(module, reason=f"{module} is not installed")
    env = {"JOB_DIR": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    words = (f"--ckpt-dir={tmp_path / 'states'}", "--drain-grace=120", JOBS / "trainers.py")
    with Run(tmp_path / "first", *words, kind, "drained", env=env) as first:
        for rank in (0, 1):
            first.wait_for_output(f"rank {rank} made step 3\n")
        first.signal(signal.SIGTERM)
        assert first.finish(240) == 85, first.said()
    made = [int(step) for step in re.findall(r"rank \d made step (\d+)", first.said())]
    (flushed,) = first.payloads("checkpoint.flushed")
    assert (flushed["fitted"], flushed["step"]) == (True, max(made)), first.said()
    assert made.count(max(made)) == 2
    assert {p["exit_code"] for p in first.payloads("worker.exited")} == {0}
    assert first.payloads("run.ended")[0]["outcome"] == "preempted"

    with Run(tmp_path / "second", *words, kind, "resumed", env=env) as second:
        assert second.finish(240) == 0, second.said()
    assert {p["step"] for p in second.payloads("checkpoint.restored")} == {max(made)}
    for rank in (0, 1):
        assert re.search(f"rank {rank} from step .*: same True", second.said()), second.said()


@pytest.mark.soak
def test_litgpts_own_training_on_one_device(tmp_path):
    """More devices are Lightning's FSDP, which wants GPUs."""
    pytest.importorskip("litgpt", reason="litgpt is not installed")
    sizes = {"block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16}
    sizes |= {"vocab_size": 64, "padded_vocab_size": 64}
    train = {"global_batch_size": 2, "micro_batch_size": 2, "max_tokens": 128, "max_seq_length": 8}
    train |= {"save_interval": 2, "lr_warmup_steps": 1}
    words = [
        *("litgpt", "pretrain", "pythia-14m", "--devices=1", "--precision=32-true"),
        *("--data=support.litgpt_tokens.Tokens", "--resume=auto", "--logger_name=csv"),
        *("--model_config.name=tiny", "--eval.interval=1000", "--eval.max_iters=1"),
        *("--eval.final_validation=false", *(f"--train.{k}={v}" for k, v in train.items())),
        *(f"--model_config.{name}={size}" for name, size in sizes.items()),
    ]
    env = {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": PYTHONPATH}
    weights = []
    for name, more in (("disturbed", {"DISTURBED": "1"}), ("whole", {})):
        out = tmp_path / name
        with Run(
            tmp_path / f"run-{name}", *words, f"--out_dir={out}", env=env | more, nproc=None
        ) as r:
            assert r.finish(240) == 0, r.said()
            assert len(r.incidents()) == len(more)
        weights.append(torch.load(out / "final" / "lit_model.pth", weights_only=False)["model"])

    one, other = weights
    assert all(torch.equal(one[name], other[name]) for name in other)
