"""Processors out of a recorded tree."""

import pytest
from support.fake_root import FakeRoot

from gpuops.host.kernel_state import Cpu, count_cpus, read_cpu


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0-223", 224),
        ("0", 1),
        ("0-3,8,10-11", 7),
        ("", None),
        (None, None),
        ("a-b", None),
        ("0-", None),
    ],
)
def test_lists_of_processors_are_counted(text, count):
    assert count_cpus(text) == count


def test_all_is_read_from_its_files(tmp_path):
    root, cpu = FakeRoot(tmp_path), "sys/devices/system/cpu"
    clock = "sys/devices/system/clocksource/clocksource0"
    root.write(f"{cpu}/online", "0-1\n").write(f"{cpu}/present", "0-3\n")
    for n, governor in enumerate(["performance", "powersave", "performance"]):
        root.write(f"{cpu}/cpufreq/policy{n}/scaling_governor", f"{governor}\n")
    (root.path / cpu / "cpufreq/policy9").mkdir()
    root.write(f"{clock}/current_clocksource", "tsc\n")
    root.write(f"{clock}/available_clocksource", "tsc hpet acpi_pm \n")

    assert read_cpu(root.path) == Cpu(
        online=2,
        present=4,
        governors={"performance": 2, "powersave": 1},
        clock_source="tsc",
        clock_sources=("tsc", "hpet", "acpi_pm"),
    )


def test_a_machine_that_tells_nothing_tells_nothing(tmp_path):
    assert read_cpu(tmp_path) == Cpu()
