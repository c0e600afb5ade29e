"""Two nodes whose ranks hold alike what they train: the directory has it once."""

import os
import re
import subprocess
from contextlib import ExitStack
from functools import partial

import pytest
from support.ports import free_port
from support.runs import JOBS, Run

from gpuops.checkpoint.placement.estimate import RamNeed

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
WIDTH = 20_000  # 1.46 million parameters: with AdamW's state 17.5 MB
STATE_BYTES = 3 * 4 * (64 * WIDTH + WIDTH + 8 * WIDTH + 8)
MB = 10**6


def popen_on(n_cpus, words, **more):
    """Start *words* on so many processors."""
    cpus = sorted(os.sched_getaffinity(0))[:n_cpus]
    return subprocess.Popen(["taskset", "-c", ",".join(map(str, cpus)), *words], **more)


def run_two_nodes(folder, directory, kind, nproc):
    """Return the digest of each rank's state at the end, and the tiers that they loaded from."""
    (folder / "r").mkdir(parents=True, mode=0o700)
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--local-addr=127.0.0.1"),
        *(f"--rdzv-endpoint=127.0.0.1:{free_port('127.0.0.1')}", "--health-gate=off"),
    )
    job = (JOBS / "resumes.py", "--diary", folder / "diary", "--steps", 3, "--width", WIDTH)
    job = (*job, "--kind", kind, "--directory", directory)
    env = {"GPUOPS_STATE": str(folder / "home"), "XDG_RUNTIME_DIR": str(folder / "r")}
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                Run(
                    folder / node,
                    *(*flags, *job),
                    nproc="cpu",
                    env=env | {"SLURMD_NODENAME": node},
                    popen=partial(popen_on, n_ranks),
                )
            )
            for node, n_ranks in zip(("nodea", "nodeb"), nproc, strict=True)
        ]
        assert [run.finish(120) for run in runs] == [0, 0], "".join(run.said() for run in runs)
        said = "".join(run.said() for run in runs)
        loads = [load for run in runs for load in run.payloads("checkpoint.restored")]
    return dict(re.findall(r"rank (\d) weights (\w+) after", said)), loads


@pytest.mark.parametrize(
    ("kind", "nproc"),
    [("ddp", (2, 1)), ("hsdp", (2, 2)), pytest.param("ddp", (1, 1), marks=pytest.mark.soak)],
)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a node has as many ranks as cores")
def test_the_directory_has_each_byte_once_and_gives_every_rank_its_state(tmp_path, kind, nproc):
    saved, _ = run_two_nodes(tmp_path / "first", tmp_path / "states", kind, nproc)
    files = list((tmp_path / "states").glob("step-000000000003.*/shard-*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)

    assert len(files) == sum(nproc)
    own_bytes = MB // 4
    need = RamNeed(max(nproc), STATE_BYTES + own_bytes, replicas=1, shared_bytes=STATE_BYTES)
    assert STATE_BYTES <= nbytes <= 2 * need.persisted_bytes(2), "what `gpuops ckpt plan` says"
    loaded, loads = run_two_nodes(tmp_path / "second", tmp_path / "states", kind, nproc)
    assert {(load["step"], load["tier"]) for load in loads} == {(3, "persistent")}
    assert loaded == saved
    assert len(set(saved.values())) == len(saved) == sum(nproc)
