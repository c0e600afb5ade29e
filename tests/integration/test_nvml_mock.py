"""NVML through the real pynvml, over a libnvidia-ml in C that a scenario drives."""

import json
import os
import subprocess
import sys
import time

import pytest
from support import mock_nvml
from support.mock_nvml import UUIDS, addresses

pytestmark = pytest.mark.cc

ASK = """
import json, sys
from gpuops.host.nvml import read_nvml
from gpuops.host.records import to_json
print(json.dumps(to_json(read_nvml(float(sys.argv[1])))))
"""


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


def ask(mock, scenario, deadline_s=20.0):
    run = subprocess.run(
        [sys.executable, "-c", ASK, str(deadline_s)],
        env={**os.environ, **mock.env(scenario)},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return json.loads(run.stdout)


def test_every_gpu_is_listed_with_uuid_address_and_name(mock):
    snapshot = ask(mock, mock_nvml.gpus(8))

    assert snapshot["status"] == "ok"
    assert snapshot["driver"] == "999.1"
    assert [gpu["uuid"] for gpu in snapshot["gpus"]] == list(UUIDS)
    assert [gpu["address"] for gpu in snapshot["gpus"]] == addresses(8)
    assert {gpu["name"] for gpu in snapshot["gpus"]} == {"Mock GPU 80GB"}
    assert {gpu["error"] for gpu in snapshot["gpus"]} == {None}


def test_a_lost_gpu_keeps_its_error_and_the_others_are_listed(mock):
    gpus = ask(mock, mock_nvml.gpus(4, broken={2: 15}))["gpus"]

    assert [gpu["error_code"] for gpu in gpus] == [None, None, 15, None]
    assert gpus[2]["error"] == "nvmlDeviceGetHandleByIndex: GPU is lost"
    assert gpus[2]["uuid"] is None


@pytest.mark.parametrize(
    ("scenario", "status", "code"),
    [
        ("init 12", "absent", 12),
        ("init 18", "error", 18),
        ("init 9", "error", 9),
        ("count 999", "error", 999),
    ],
    ids=["no library", "driver and library differ", "driver not loaded", "cannot count"],
)
def test_an_nvml_that_does_not_start_says_why(mock, scenario, status, code):
    snapshot = ask(mock, scenario)

    assert (snapshot["status"], snapshot["error_code"]) == (status, code)
    assert snapshot["gpus"] == []


@pytest.mark.parametrize("manner", ["", "deaf\n"], ids=["", "and ignores SIGTERM"])
def test_an_nvml_that_hangs_is_left_in_time(mock, manner):
    started = time.monotonic()
    snapshot = ask(mock, f"{manner}delay_ms 60000", deadline_s=0.5)

    assert snapshot["status"] == "timeout"
    assert "gave no answer" in snapshot["error"]
    assert snapshot["state"] in {"R", "S"}
    assert time.monotonic() - started < 10


def test_an_nvml_that_crashes_takes_only_its_own_process(mock):
    snapshot = ask(mock, "segfault")

    assert snapshot["status"] == "crash"
    assert "SIGSEGV" in snapshot["error"]
