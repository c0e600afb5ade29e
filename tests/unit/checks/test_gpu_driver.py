"""The verdicts on the GPU driver as a whole, and on calls into it that give no answer."""

from dataclasses import replace

import pytest
from support.checks import CASE, said

from gpuops.checks.core.check import NoParameters
from gpuops.checks.core.profile import NumberExpectation, Profile
from gpuops.checks.gpu.gpu_driver import judge
from gpuops.host.gpu_names import Gpus
from gpuops.host.node_state import DriverCrash, DriverHang
from gpuops.host.nvml.facts import NvmlGpu, NvmlSnapshot, NvmlStatus
from gpuops.host.sysfs import PciGpu

EIGHT = replace(
    CASE, profile=Profile(name="x", gpu_count=NumberExpectation(value=8, source="a test"))
)
NONE = replace(
    CASE, profile=Profile(name="x", gpu_count=NumberExpectation(value=0, source="a test"))
)
ABSENT = NvmlSnapshot(
    status=NvmlStatus.ABSENT, error="nvmlInit: NVML Shared Library Not Found", error_code=12
)


def bus(count, driver="nvidia"):
    return tuple(PciGpu(f"0000:{n:02x}:00.0", answers=True, driver=driver) for n in range(count))


def refused(code):
    return NvmlSnapshot(status=NvmlStatus.ERROR, error="nvmlInit: no", error_code=code)


def silent(call="nvmlInit", state="S"):
    return NvmlSnapshot(status=NvmlStatus.TIMEOUT, hung_call=call, hung_s=4.2, state=state)


def with_a_hung_gpu(state="S"):
    gpus = (
        NvmlGpu(index=0, uuid="GPU-0"),
        NvmlGpu(index=1, uuid="GPU-1", hung_call="nvmlDeviceGetPowerUsage", hung_s=4.2),
    )
    return NvmlSnapshot(
        status=NvmlStatus.OK,
        gpus=gpus,
        hung_call="nvmlDeviceGetPowerUsage",
        hung_s=4.2,
        state=state,
    )


def case(hangs=(), persistence=None):
    earlier = tuple(
        DriverHang(boot_id="b", t_us=n, call="nvmlInit", state=s) for n, s in enumerate(hangs)
    )
    return replace(CASE, hangs=earlier, persistence=persistence)


def findings(snapshot, *, on_bus=8, case=CASE, driver="nvidia"):
    return judge(Gpus(bus(on_bus, driver), snapshot), NoParameters(), case)


def verdict(*args, **kwargs):
    (finding,) = findings(*args, **kwargs)
    return finding.status.word, finding.unknown_reason or (
        finding.failure_class and finding.failure_class.value
    )


def test_a_driver_that_answers_passes_and_tells_its_versions():
    nvml = NvmlSnapshot(status=NvmlStatus.OK, driver="550.1", nvml_version="12.550.1")
    (finding,) = findings(nvml)

    assert finding.status.word == "pass"
    assert finding.message == "NVML answers about 0 GPUs (driver 550.1, NVML 12.550.1)"


def test_a_machine_that_needs_no_gpus_needs_no_driver():
    for nvml in (ABSENT, refused(9)):
        assert verdict(nvml, on_bus=0) == ("skip", None)
        assert verdict(nvml, on_bus=0, case=NONE) == ("skip", None)
        assert verdict(nvml, on_bus=8, case=NONE) == ("skip", None)


def given(*names, expected=None):
    number = None if expected is None else NumberExpectation(value=expected, source="flag")
    return replace(CASE, gpus=frozenset(names) or None, gpus_expected=number)


@pytest.mark.parametrize("case", [given(expected=8), given("slurm:0", "slurm:1"), given("0")])
def test_an_nvml_that_does_not_start_fails_where_gpus_are_asked_for(case):
    for on_bus in (0, 8):
        (finding,) = findings(refused(9), on_bus=on_bus, case=case, driver=None)

        assert said([finding]) == [("n1", "fail", "gpu_sw.driver")]
        assert f"expected: {len(case.gpus) if case.gpus else 8} GPUs (" in finding.message
    assert verdict(refused(4), case=case) == ("unknown", "no_permission")


def test_without_the_library_what_slurm_gave_counts_where_the_bus_shows_nvidia_gpus():
    """Slurm numbers the GPUs of other makers too, and a container may lack the library."""
    assert verdict(ABSENT, case=given("slurm:0")) == ("fail", "gpu_sw.driver")
    assert verdict(ABSENT, on_bus=0, case=given("slurm:0")) == ("skip", None)
    assert verdict(ABSENT, case=given("0")) == ("unknown", "missing_tool")
    assert verdict(ABSENT, on_bus=0, case=given(expected=8)) == ("fail", "gpu_sw.driver")


def test_a_flag_that_expects_no_gpu_goes_before_slurm_and_profile():
    none = given("slurm:0", expected=0)

    for case in (none, replace(none, profile=EIGHT.profile)):
        assert verdict(refused(9), case=case) == ("skip", None)


def test_a_missing_library_fails_only_where_the_profile_expects_gpus():
    assert verdict(ABSENT) == ("unknown", "missing_tool")
    assert verdict(ABSENT, case=EIGHT) == ("fail", "gpu_sw.driver")
    assert verdict(ABSENT, on_bus=0, case=EIGHT) == ("fail", "gpu_sw.driver")


@pytest.mark.parametrize("code", [1, 2, 3, 9, 10, 11, 14, 15, 16, 18, 20, 999, 12345])
def test_an_nvml_that_does_not_start_fails_only_where_the_profile_expects_gpus(code):
    assert verdict(refused(code), driver=None) == ("warn", "gpu_sw.driver")
    assert verdict(refused(code), driver=None, case=EIGHT) == ("fail", "gpu_sw.driver")


@pytest.mark.parametrize("code", [15, 16, 18], ids=["lost", "reset required", "mismatch"])
def test_what_the_loaded_module_says_itself_is_its_own_verdict(code):
    assert verdict(refused(code)) == ("fail", "gpu_sw.driver")
    assert verdict(refused(code), driver="vfio-pci") == ("warn", "gpu_sw.driver")
    assert verdict(refused(9)) == ("warn", "gpu_sw.driver")


@pytest.mark.parametrize("code", [4, 17], ids=["no permission", "kept out by a cgroup"])
def test_who_may_not_ask_convicts_nobody(code):
    for on_bus in (0, 8):
        assert verdict(refused(code), on_bus=on_bus, case=EIGHT) == ("unknown", "no_permission")


CRASHED = NvmlSnapshot(status=NvmlStatus.CRASH, error="its process ended by SIGSEGV")


def crashed(count):
    return tuple(DriverCrash(boot_id="b", t_us=n, signal="SIGSEGV") for n in range(count))


@pytest.mark.parametrize(
    ("nvml", "earlier", "status"),
    [
        (CRASHED, 5, ("unknown", "crash")),
        (replace(CRASHED, crash="SIGSEGV"), 0, ("unknown", "crash")),
        (replace(CRASHED, crash="SIGSEGV"), 1, ("fail", "gpu_sw.driver")),
    ],
    ids=["a failure of gpuops", "first crash", "second crash"],
)
def test_an_nvml_that_crashes_fails_from_the_second_time_in_a_boot_on(nvml, earlier, status):
    assert verdict(nvml, case=replace(EIGHT, crashes=crashed(earlier))) == status


def test_a_gpu_that_crashes_its_process_alone_is_named():
    gpus = (NvmlGpu(index=0, uuid="GPU-0"), NvmlGpu(index=1, uuid="GPU-1", crash="SIGSEGV"))
    nvml = NvmlSnapshot(status=NvmlStatus.OK, gpus=gpus, crash="SIGSEGV")
    (first,) = findings(nvml)
    (third,) = findings(nvml, case=replace(CASE, crashes=crashed(2)))

    assert said([first]) == [("GPU-1", "unknown", None)]
    assert first.message.endswith("crash 1 of this boot, so the next check decides")
    assert said([third]) == [("GPU-1", "fail", "gpu_sw.driver")]
    assert third.message == (
        "GPU 1: asked alone, its calls end their process by SIGSEGV; crash 3 of this boot"
    )


def test_an_nvml_that_crashes_only_if_asked_in_parallel_warns():
    nvml = NvmlSnapshot(status=NvmlStatus.OK, gpus=(NvmlGpu(index=0),), crash="SIGSEGV")

    assert verdict(nvml, case=replace(CASE, crashes=crashed(2))) == ("warn", "gpu_sw.driver")


@pytest.mark.parametrize("nvml", [silent(), silent(state="D"), with_a_hung_gpu("D")])
@pytest.mark.parametrize("persistence", [None, False, True])
def test_a_first_hang_is_not_known_to_be_a_fault(nvml, persistence):
    assert verdict(nvml, case=case((), persistence)) == ("unknown", "timeout")


@pytest.mark.parametrize(
    ("then", "persistence", "now", "status"),
    [
        ("S", None, "S", "unknown"),
        ("S", False, "S", "unknown"),
        (None, None, None, "unknown"),
        ("S", True, "S", "fail"),
        (None, True, None, "fail"),
        ("S", None, "D", "fail"),
        ("D", None, "S", "fail"),
        ("S", False, "D", "fail"),
        ("D", True, "D", "fail"),
    ],
)
def test_a_second_hang_fails_with_persistence_mode_or_a_call_inside_the_kernel(
    then, persistence, now, status
):
    for nvml in (silent(state=now), with_a_hung_gpu(now)):
        word, why = verdict(nvml, case=case([then], persistence))

        assert word == status
        assert why == ("gpu_sw.driver_hang" if status == "fail" else "timeout")


def test_a_hang_says_which_call_how_long_and_which_try():
    (first,) = findings(silent(state="D"))
    (third,) = findings(silent(), case=case(["S", "S"], persistence=True))
    (cold,) = findings(silent(), case=case(["S"], persistence=False))

    assert first.message == (
        "nvmlInit gave no answer in 4.2 s, inside the kernel (state D); try 1 of this boot:"
        " a cold driver takes 10 to 20 s to initialise, so the next check decides"
    )
    assert third.message == (
        "nvmlInit gave no answer in 4.2 s; try 3 of this boot;"
        " the driver is not cold: persistence mode keeps it loaded"
    )
    assert (third.value, third.threshold) == (3, "< 2")
    assert "persistence mode is off" in cold.message


@pytest.mark.parametrize(("waited_s", "status"), [(0.9, "unknown"), (1.0, "fail"), (1.1, "fail")])
def test_a_call_that_was_not_waited_for_is_only_slow(waited_s, status):
    nvml = replace(silent(state="D"), hung_s=waited_s)

    assert verdict(nvml, case=case(["D"], persistence=True))[0] == status


@pytest.mark.parametrize("nvml", [silent(), silent(state="D"), with_a_hung_gpu("D")])
def test_a_hang_is_not_judged_where_the_pci_bus_shows_no_nvidia_device(nvml):
    (finding,) = findings(nvml, on_bus=0, case=case(["D"], persistence=True))

    assert said([finding]) == [("n1", "skip", None)]
    assert finding.message == (
        f"no NVIDIA device is on the PCI bus; {nvml.hung_call} gave no answer, which is not judged"
    )


def test_a_gpu_that_hangs_is_named_and_the_others_are_not():
    nvml = with_a_hung_gpu()
    (finding,) = findings(nvml, case=case(["S"], persistence=True))

    assert said([finding]) == [("GPU-1", "fail", "gpu_sw.driver_hang")]
    assert finding.message.startswith("GPU 1: nvmlDeviceGetPowerUsage gave no answer in 4.2 s")


def test_a_child_that_could_not_even_say_its_call_is_judged_as_well():
    nvml = NvmlSnapshot(status=NvmlStatus.TIMEOUT, error="NVML gave no answer", state="D")
    (finding,) = findings(nvml, case=case(["S"]))

    assert finding.status.word == "fail"
    assert finding.message.startswith("NVML gave no answer, inside the kernel (state D); try 2")
