"""What is asked of NVML, and what becomes of answers that make no sense."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest

from gpuops.host.nvml.caller import GpuLostError, NvmlCaller, NvmlRefused
from gpuops.host.nvml.calls import clocks
from gpuops.host.nvml.facts import (
    GPU_IS_LOST,
    NOT_SUPPORTED,
    SAMPLE_EVERY_S,
    UNREADABLE,
    CallError,
    Fabric,
    GpuMemory,
    NvmlGpu,
)
from gpuops.host.nvml.fields import IDS
from gpuops.host.nvml.plausible import BOUNDS, COUNT, why_not
from gpuops.host.nvml.session import NvmlSession, snapshot_from
from gpuops.host.nvml.snapshot import _PARTS, snapshot_of
from gpuops.host.process.probe import ProbeEnd, ProbeOutcome

SOON_S = 10.0


def nvml(**calls):
    """A pynvml with nothing in it but *calls*."""
    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        NVMLLibraryMismatchError=pynvml.NVMLLibraryMismatchError,
        **calls,
    )


def raising(error):
    def call(*_args):
        raise error

    return call


def finished(**found):
    asker = NvmlCaller(nvml())
    asker.found.update(found)
    asker.finished = True
    return asker


def test_our_numbers_of_fields_are_those_of_pynvml():
    assert {name: getattr(pynvml, name) for name in IDS} == IDS


def test_an_answer_is_put_in_its_place():
    asker = NvmlCaller(nvml(nvmlDeviceGetPowerUsage=lambda handle: handle * 1000), handle=7)
    asker.store("power.drawn_w", "nvmlDeviceGetPowerUsage", made=lambda watts: watts / 1000)

    assert asker.found == {"power.drawn_w": 7.0}
    assert (asker.errors, asker.unsupported) == ([], [])


def test_a_call_that_pynvml_is_too_old_for_is_not_supported():
    asker = NvmlCaller(nvml())
    asker.store("uuid", "nvmlDeviceGetUUID")

    assert (asker.found, asker.errors, asker.unsupported) == ({}, [], ["nvmlDeviceGetUUID"])


def test_what_the_driver_does_not_have_is_asked_in_another_way():
    asker = NvmlCaller(nvml(old=lambda _handle: 3, new=raising(pynvml.NVMLError(NOT_SUPPORTED))))
    asker.store("minor", "new", instead=lambda: asker.query("old"))

    assert (asker.found, asker.unsupported) == ({"minor": 3}, [])


def test_another_way_is_not_tried_after_an_error():
    asker = NvmlCaller(nvml(old=raising(AssertionError), new=raising(pynvml.NVMLError(999))))
    asker.store("minor", "new", instead=lambda: asker.query("old"))

    assert asker.errors == [CallError("new", 999, "Unknown Error")]


def test_a_string_that_cannot_be_read_is_an_error_of_its_call():
    garbled = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    asker = NvmlCaller(nvml(nvmlDeviceGetName=raising(garbled)))
    asker.store("name", "nvmlDeviceGetName")

    (error,) = asker.errors
    assert (error.call, error.code) == ("nvmlDeviceGetName", UNREADABLE)
    assert "invalid start byte" in error.text


def test_a_lost_gpu_is_noted_and_asked_no_more():
    asker = NvmlCaller(nvml(nvmlDeviceGetName=raising(pynvml.NVMLError(GPU_IS_LOST))))

    with pytest.raises(GpuLostError):
        asker.store("name", "nvmlDeviceGetName")
    assert [error.code for error in asker.errors] == [GPU_IS_LOST]


@pytest.mark.parametrize(
    ("number", "bounds", "code"),
    [
        (65535, BOUNDS["temperature.core_c"], NOT_SUPPORTED),
        (255, BOUNDS["temperature.core_c"], NOT_SUPPORTED),
        (255, COUNT, None),
        (-1, COUNT, NOT_SUPPORTED),
        (-1, BOUNDS["temperature.margin_c"], None),
        (2**64 - 1, None, NOT_SUPPORTED),
        (0, BOUNDS["pcie.width"], NOT_SUPPORTED),
        (0, COUNT, None),
        (float("nan"), COUNT, UNREADABLE),
        (float("inf"), COUNT, UNREADABLE),
        (200, BOUNDS["temperature.core_c"], None),
        (201, BOUNDS["temperature.core_c"], UNREADABLE),
    ],
)
def test_which_numbers_are_none(number, bounds, code):
    problem = why_not(number, bounds)

    assert (problem and problem[0]) == code


def test_the_bounds_name_fields_that_there_are():
    for place in BOUNDS:
        part, _, name = place.partition(".")
        kind = {**_PARTS, "fabric": Fabric, "memory": GpuMemory}.get(part, NvmlGpu)
        assert (name or part) in kind.__slots__


def test_what_is_not_supported_is_noted_once():
    asker = NvmlCaller(nvml())
    for _link in range(18):
        asker.note("NVML_FI_DEV_NVLINK_GET_STATE", NvmlRefused(NOT_SUPPORTED, "no"))

    assert asker.unsupported == ["NVML_FI_DEV_NVLINK_GET_STATE"]


@pytest.mark.parametrize(("left_s", "samples"), [(60.0, 3), (0.5, 1)])
def test_a_slowed_gpu_is_sampled_while_there_is_time(left_s, samples):
    """Without time another sample would look like a call that hangs."""
    pauses = []
    slowed = nvml(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlDeviceGetCurrentClocksEventReasons=lambda _gpu: 0x40
    )
    until_s = time.monotonic() + left_s
    caller = NvmlCaller(slowed, until_s=until_s, pause=pauses.append)
    clocks(caller)

    assert caller.found["clocks.samples"] == (0x40,) * samples
    assert pauses == [SAMPLE_EVERY_S] * (samples - 1)


def test_a_bug_in_one_reader_is_an_error_of_the_gpu_and_the_snapshot_is_made():
    """Without its constants and structures pynvml breaks every reader that wants one."""
    broken = nvml(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda _handle: "GPU-0",
    )
    snapshot = NvmlSession(broken).run(time.monotonic() + SOON_S)

    (gpu,) = snapshot.gpus
    assert (snapshot.status, gpu.uuid, gpu.hung_call) == ("ok", "GPU-0", None)
    assert UNREADABLE in {error.code for error in gpu.errors}
    assert any("AttributeError" in error.text for error in gpu.errors)


def test_an_asker_that_never_came_to_a_call_hangs_too():
    """On a machine that is that busy, a GPU that was not asked is not one that is missing."""
    waiting = NvmlCaller(nvml())
    snapshot = snapshot_of(finished(), finished(), [[waiting], [finished(uuid="GPU-1")]], 1e9)

    assert [gpu.hung_call for gpu in snapshot.gpus] == ["no call yet", None]
    assert snapshot.status == "ok"


@pytest.mark.parametrize(("told", "status"), [({}, "timeout"), ({"uuid": "GPU-0"}, "ok")])
def test_only_gpus_that_say_nothing_at_all_are_an_nvml_without_an_answer(told, status):
    hung = NvmlCaller(nvml())
    hung.call = "nvmlDeviceGetName"
    snapshot = snapshot_of(finished(), finished(), [[finished(**told), hung]], 1e9)

    assert (snapshot.status, snapshot.hung_call) == (status, "nvmlDeviceGetName")
    assert snapshot.hang == "nvmlDeviceGetName"


def outcome(ending, said, state=None):
    return ProbeOutcome(
        ending=ending, pid=71, elapsed_s=2.0, exit_code=0, output=said.encode(), state=state
    )


SAID = json.dumps(
    {"value": {"status": "ok", "hung_call": "nvmlDeviceGetName", "hung_s": 1.5, "state": "S"}}
)


@pytest.mark.parametrize("ending", [ProbeEnd.TIMEOUT, ProbeEnd.HUNG])
def test_a_child_that_could_not_end_has_told_what_it_could(ending, tmp_path):
    snapshot = snapshot_from(outcome(ending, SAID, "D"), tmp_path)

    assert (snapshot.status, snapshot.hung_call, snapshot.hung_s) == (
        "ok",
        "nvmlDeviceGetName",
        1.5,
    )
    assert snapshot.state == "D"
    assert snapshot_from(outcome(ProbeEnd.ENDED, SAID), tmp_path).state == "S"


@pytest.mark.parametrize(("exit_code", "crash"), [(-11, "SIGSEGV"), (-9, None), (1, None)])
def test_only_a_fault_in_the_process_is_a_crash_of_nvml(exit_code, crash, tmp_path):
    """SIGKILL is sent by a kernel that is out of memory; an exit code is Python's."""
    dead = replace(outcome(ProbeEnd.ENDED, ""), exit_code=exit_code)

    assert (snapshot_from(dead, tmp_path).status, snapshot_from(dead, tmp_path).crash) == (
        "crash",
        crash,
    )


def test_a_child_that_said_nothing_is_an_nvml_without_an_answer(tmp_path):
    snapshot = snapshot_from(outcome(ProbeEnd.HUNG, "", "D"), tmp_path)

    assert (snapshot.status, snapshot.hang, snapshot.state) == ("timeout", "NVML", "D")
    assert snapshot.hung_s == 2.0
    assert snapshot.error.startswith("NVML gave no answer in 2.0 s (pid 71, state D)")


@pytest.mark.parametrize("said", ["", '{"value": 7}', '{"value": {"status": "fine"}}'])
def test_a_child_that_ended_and_made_no_sense_has_crashed(said, tmp_path):
    assert snapshot_from(outcome(ProbeEnd.ENDED, said), tmp_path).status == "crash"
