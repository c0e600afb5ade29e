"""Where each rank's output goes, for every form that torch gives its destinations."""

from dataclasses import dataclass, field

import pytest

pytestmark = pytest.mark.torch


@dataclass
class FiveFields:
    """The destinations of torch 2.8."""

    stdouts: dict = field(default_factory=dict)
    stderrs: dict = field(default_factory=dict)
    tee_stdouts: dict = field(default_factory=dict)
    tee_stderrs: dict = field(default_factory=dict)
    error_files: dict = field(default_factory=dict)


@pytest.fixture
def reify(tmp_path):
    from torch.distributed.elastic.multiprocessing.api import Std

    from gpuops.agent.elastic.logs import GenerationLogs, RankLogFiles

    def run(log_dir=None, kind=FiveFields):
        logs = GenerationLogs(Std.NONE, Std.ALL, None, log_dir=log_dir, kind=kind)
        logs.prepare(RankLogFiles(tmp_path, {0: 4}, {0: {"GPUOPS_RING": "r"}}))
        envs = {0: {}}
        return logs.reify(envs), envs[0]

    return run


def test_torch_2_8_gets_the_five_fields_that_it_has(reify, tmp_path):
    dest, env = reify()

    assert dest.stdouts == dest.tee_stdouts == {0: str(tmp_path / "rank4" / "stdout.log")}
    assert dest.stderrs == dest.tee_stderrs == {0: str(tmp_path / "rank4" / "stderr.log")}
    assert dest.error_files == {0: env["TORCHELASTIC_ERROR_FILE"]}
    assert env["GPUOPS_RING"] == "r"


def test_without_a_log_directory_the_console_gets_all(reify):
    from pathlib import Path

    dest, env = reify(log_dir=Path("/dev/null"))

    assert (dest.stdouts, dest.tee_stdouts) == ({0: ""}, {})
    assert env["TORCHELASTIC_ERROR_FILE"] == ""


def test_the_installed_torch_gets_every_field_that_it_has(reify):
    from torch.distributed.elastic.multiprocessing.api import LogsDest

    dest, _env = reify(kind=LogsDest)

    assert dest.stdouts[0].endswith("stdout.log")
    filtered = {name: value for name, value in vars(dest).items() if name.startswith("filtered")}
    assert all(filtered.values())
