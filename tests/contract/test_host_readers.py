"""The readers of the host keep one contract on this machine and on one made of files."""

import json
import math
from pathlib import Path

import pytest
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.clock_state import read_clock_state
from gpuops.host.kmsg import kernel_records
from gpuops.host.procfs import boot_us, processes, read_load, read_memory
from gpuops.host.records import from_json, to_json
from gpuops.host.storage.mounts import read_filesystems
from gpuops.host.sysfs import read_pci_gpus

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(params=["this machine", "files"])
def root(request, tmp_path):
    if request.param == "this machine":
        return Path("/")
    return FakeRoot(tmp_path).process(1, "init", "S").gpu("0000:1b:00.0").path


def test_memory_available_is_within_all_memory(root):
    memory = read_memory(root)

    assert 0 <= memory.available_bytes <= memory.total_bytes
    assert memory.total_bytes > 2**20


def test_load_is_finite_and_there_is_a_cpu(root):
    load = read_load(root)

    assert load.cpus >= 1
    assert all(math.isfinite(value) and value >= 0 for value in (load.load1, load.load15))


def test_there_is_a_process(root):
    assert processes(root)


def test_the_boot_lies_in_the_past(root):
    assert 0 < boot_us(root) < 4_000_000_000_000_000


def test_the_clock_has_a_verdict(root):
    try:
        clock = read_clock_state(root)
    except ProbeError as exc:
        pytest.skip(f"adjtimex is refused here: {exc}")

    assert isinstance(clock.synchronised, bool)
    assert clock.error_max_s >= 0
    assert abs(clock.offset_s) < 1


def test_the_kernel_log_has_rising_numbers(root):
    try:
        records = list(kernel_records(root))
    except ProbeError as exc:
        pytest.skip(f"the kernel log may not be read here: {exc}")

    numbers = [record.sequence for record in records]
    assert numbers == sorted(numbers)


def test_every_file_system_answers_or_says_why(root):
    found = read_filesystems(root, 10.0)

    assert found.answers
    for answer in found.answers:
        said = [answer.space, answer.error, answer.silent]
        assert sum(item is not None for item in said) == 1


@pytest.mark.parametrize(
    "read",
    [read_memory, read_load, read_clock_state, lambda root: read_filesystems(root, 10.0)],
    ids=["memory", "load", "clock", "filesystems"],
)
def test_facts_survive_json(root, read):
    facts = read(root)

    assert from_json(type(facts), json.loads(json.dumps(to_json(facts))), "facts") == facts


def test_gpus_have_addresses_of_sysfs(root):
    gpus = read_pci_gpus(root)
    assert gpus or root == Path("/")
    for gpu in gpus:
        assert len(gpu.address.split(":")) == 3
