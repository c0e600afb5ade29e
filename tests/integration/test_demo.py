"""``gpuops demo`` as a newcomer types it: a rank dies, and the job goes on out of memory."""

import os
import re
import subprocess
import sys

import pytest

from gpuops.demo.scenario import make_plan

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
STEPS, SEED = 40, 7  # the losses of each 40th step are printed


def output_of(*command, cwd=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def plant(folder):
    """Return *folder* with modules that Python finds there before those of the same name."""
    for module in ("argparse", "json", "torch", "logging"):
        (folder / f"{module}.py").write_text("raise SystemExit('planted')")
    return folder


def last_loss(output):
    return re.findall(rf"rank 0  step +{STEPS}  loss (\S+)", output)


def test_the_demo_goes_on_from_memory_to_the_loss_of_an_undisturbed_run(tmp_path):
    plan = make_plan(SEED, STEPS)
    words = ("gpuops", "demo", f"--dir={tmp_path / 'demo'}", f"--steps={STEPS}")
    shown = output_of(*words, cwd=plant(tmp_path))
    train = ("gpuops.demo.train", f"--steps={STEPS}", f"--seed={SEED}")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    undisturbed = output_of(*torchrun, *train)

    (resumed,) = re.findall(r"gpuops: resumed from step (\d+): ranks 0-1 from memory", shown)
    assert 0 < int(resumed) < STEPS
    assert f"rank 0  resumes after step {resumed}" in shown
    assert re.search(rf"^blame +rank {plan.victim_rank} on ", shown, re.MULTILINE)
    assert last_loss(shown) == last_loss(undisturbed) != []
    assert not list(tmp_path.rglob("*.safetensors"))
