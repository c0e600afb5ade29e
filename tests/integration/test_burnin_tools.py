"""The test `tools` of a burn-in: the real program, and tools that are played by scripts on PATH."""

import os
import subprocess
from pathlib import Path

import pytest

from gpuops.burnin.measurement import Measurement
from gpuops.burnin.results import NotMeasured, ProgramOutput, SoftwareVersions
from gpuops.host.process.command import module_command
from gpuops.model import Entity, EntityKind, UnknownReason

RECORDED = Path(__file__).parents[1] / "fixtures" / "tools"
NODE = Entity(EntityKind.NODE, "n1")
FIO = f"""#!/bin/sh
for word; do case $word in --output=*) out=${{word#*=}};; esac; done
cp {RECORDED}/fio.json $out
"""


@pytest.mark.torch
def test_each_installed_tool_is_told_with_its_version_and_what_failed(tmp_path):
    scripts = {
        "fio": FIO,
        "nvbandwidth": f"#!/bin/sh\ncat {RECORDED}/nvbandwidth.json\n",
        "all_reduce_perf": "#!/bin/sh\necho NCCL failure; exit 3\n",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    words = ("--device", "cpu", "--part", "node:n1", "--seconds", "2", "--folder", str(tmp_path))
    argv = module_command(
        "gpuops.worker.burnin", "tools", *words, "--gpu", "GPU-a", "--gpu", "GPU-b"
    )
    env = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        told = program.stdout.read()

    output = ProgramOutput(NODE)
    for line in told.splitlines():
        output.add_line(line)
    assert (output.has_ended, output.garbage) == (True, 0)
    measured = [
        (item.part.id, item.parameters["tool"], item.unit) for item in output.of(Measurement)
    ]
    assert measured == [
        *([("GPU-a", "nvbandwidth", "GB/s"), ("GPU-b", "nvbandwidth", "GB/s")] * 2),
        *([(str(tmp_path), "fio", "GB/s")] * 2),
    ]
    versions = {k: v for item in output.of(SoftwareVersions) for k, v in item.versions.items()}
    assert (versions["fio"], versions["nvbandwidth"]) == ("fio-3.33", "v0.8")
    absent, failed = output.of(NotMeasured)
    assert absent.reason is UnknownReason.NOT_SUPPORTED
    assert absent.message.startswith("ib_write_bw: not installed")
    assert (failed.part, failed.reason) == (NODE, UnknownReason.CRASH)
    assert failed.message == "all_reduce_perf: it exited with 3: NCCL failure"
