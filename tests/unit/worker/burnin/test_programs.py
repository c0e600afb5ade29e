"""The programs of the burn-in on processors: what they measure, and what is planted is found."""

import os
import time

import pytest
import torch

from gpuops.burnin.measurement import Measurement
from gpuops.burnin.results import (
    NotMeasured,
    ProgramNote,
    ResultDigest,
    WrongResult,
)
from gpuops.checks.gpu.gpu_throttle import REASONS
from gpuops.host.nvml.facts import Clocks, NvmlGpu, Power, Temperatures
from gpuops.model import Entity, EntityKind
from gpuops.worker.burnin import links
from gpuops.worker.burnin.gemm import digest_of, fixed_matrix, measure_gemm, multiply
from gpuops.worker.burnin.host import measure_disk, measure_processors
from gpuops.worker.burnin.links import NumaNodes, measure_links
from gpuops.worker.burnin.memory import (
    MemoryPieces,
    measure_bandwidth,
    measure_patterns,
)
from gpuops.worker.burnin.program import DeviceUnderTest, parse_cpus, rates
from gpuops.worker.burnin.soak import measure_soak, samples_text

PART = Entity(EntityKind.CPU, "0")
CPU = DeviceUnderTest(
    torch.device("cpu"), PART, "this one", tuple(sorted(os.sched_getaffinity(0)))[:1]
)
SECONDS = 0.02
MIB = 2**20


@pytest.fixture
def records():
    return []


@pytest.fixture(autouse=True)
def _processors():
    """Leave the test's process as it was: programs bind theirs."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    yield
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def of(records, kind):
    return [record for record in records if isinstance(record, kind)]


def test_a_rate_is_measured_at_least_three_times_however_short_the_time():
    calls = []
    values = rates(lambda: calls.append(1), CPU, 1e-6, 10.0)

    assert len(values) >= 3
    assert min(values) > 0
    assert len(calls) >= 5  # with the two that warm up


def test_products_are_measured_and_their_digest_is_the_same_again(records):
    again = []
    measure_gemm(CPU, SECONDS, records.append)
    measure_gemm(CPU, SECONDS, again.append)

    assert {item.parameters_text for item in of(records, Measurement)} == {
        "dtype=fp32 size=1024",
        "dtype=bf16 size=256",
    }
    assert all(item.is_measured for item in of(records, Measurement))
    assert of(records, WrongResult) == []
    assert of(records, ResultDigest) == of(again, ResultDigest)
    assert len({item.digest for item in of(records, ResultDigest)}) == 2


def test_a_product_that_changes_a_single_bit_once_is_found(records):
    calls = []

    def flips_a_bit(a, b, out):
        torch.matmul(a, b, out=out)
        calls.append(1)
        # The first is what the others are compared with; then comes one that warms up, at least.
        if a.dtype == torch.float32 and len(calls) > 3:
            out.view(torch.int32)[7, 9] ^= 1

    measure_gemm(CPU, SECONDS, records.append, flips_a_bit)

    (wrong,) = of(records, WrongResult)
    assert wrong.part == PART
    assert wrong.parameters == "dtype=fp32 size=1024"
    assert "differed in 1 of 1048576 elements" in wrong.message
    assert "row 7, column 9" in wrong.message


def test_nan_is_the_same_as_itself(records):
    measure_gemm(CPU, SECONDS, records.append, lambda _a, _b, out: out.fill_(float("nan")))

    assert of(records, WrongResult) == []


def test_fp8_is_multiplied_with_the_second_matrix_transposed():
    a, b = (fixed_matrix(64, seed, torch.float8_e4m3fn, CPU.torch_device) for seed in (1, 2))
    out = torch.empty(64, 64, dtype=torch.bfloat16)
    multiply(a, b, out)

    assert torch.equal(out, (a.float() @ b.float().t()).to(torch.bfloat16))


def test_fixed_inputs_are_the_same_wherever_they_are_made():
    matrix = fixed_matrix(64, 12345, torch.float32, torch.device("cpu"))

    # By hand: ((0 x 1103515245 + 12345) >> 8) & 1023 = 48, and (48 - 512) / 512.
    assert matrix[0, 0].item() == -0.90625
    assert -1 <= matrix.min().item() < matrix.max().item() < 1
    assert digest_of(matrix).startswith("38248aa1458fca6a")


def test_memory_bandwidth_counts_the_operands_of_each_kernel(records):
    measure_bandwidth(CPU, SECONDS, MIB, records.append)

    copy, triad = of(records, Measurement)
    assert copy.parameters_text == "kernel=copy size=1MiB"
    assert triad.parameters_text == "kernel=triad size=1MiB"
    assert copy.is_measured
    assert triad.is_measured
    assert of(records, WrongResult) == []


def test_memory_that_keeps_its_words_passes_all_patterns(records):
    memory = MemoryPieces.allocate(CPU, 3 * MIB + 8)
    measure_patterns(CPU, SECONDS, memory, records.append)

    assert memory.words * 8 == 3 * MIB + 8

    (rate,), (note,) = of(records, Measurement), of(records, ProgramNote)
    assert rate.is_measured
    assert "times all patterns" in note.message
    assert of(records, WrongResult) == []


class _StuckBit(torch.Tensor):
    """Memory whose word 1000 has bit 5 stuck at one, as a failed cell has."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") in {"copy_", "fill_"}:
            args[0].as_subclass(torch.Tensor)[1000] |= 32
        return result


def test_a_stuck_bit_is_found_with_its_word(records):
    memory = torch.zeros(4096, dtype=torch.int64).as_subclass(_StuckBit)

    measure_patterns(CPU, SECONDS, MemoryPieces([memory], 4096), records.append)

    wrong = of(records, WrongResult)
    assert wrong
    assert "word 1000 read" in wrong[0].message
    assert "(1 wrong words in 4096)" in wrong[0].message


def test_processors_are_measured_on_one_core_and_on_all(records):
    both = DeviceUnderTest(
        torch.device("cpu"), PART, "this one", tuple(sorted(os.sched_getaffinity(0)))[:2]
    )
    measure_processors(both, SECONDS, records.append)

    found = {item.parameters_text for item in of(records, Measurement)}
    cores = ("one", "all") if len(both.cpus) > 1 else ("one",)
    works = ("copy", "float", "integer")
    assert found == {f"cores={name} work={work}" for name in cores for work in works}
    assert all(item.is_measured for item in of(records, Measurement))
    assert of(records, WrongResult) == []


def test_a_disk_is_written_synced_and_read_back(records, tmp_path):
    measure_disk(tmp_path, SECONDS, records.append)

    if of(records, NotMeasured):
        pytest.skip(of(records, NotMeasured)[0].message)
    works = [item.parameters_text for item in of(records, Measurement)]
    assert works == ["work=write", "work=read", "work=fsync"]
    assert of(records, WrongResult) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_says_why(records, tmp_path):
    measure_disk(tmp_path / "missing", SECONDS, records.append)

    (item,) = records
    assert item.part == Entity(EntityKind.MOUNT, str(tmp_path / "missing"))
    assert "No such file" in item.message


def test_lists_of_processors():
    assert parse_cpus("0-2,8") == (0, 1, 2, 8)
    with pytest.raises(ValueError, match="a-b"):
        parse_cpus("a-b")


def test_a_soak_compares_its_end_with_its_beginning(records):
    measure_soak(CPU, SECONDS, records.append)

    rate, held = of(records, Measurement)
    assert (rate.test, rate.parameters_text) == ("soak", "dtype=fp32 size=1024")
    assert (held.parameters_text, held.unit) == ("kind=last-to-first", "%")
    assert held.is_measured
    assert of(records, WrongResult) == []


def gpu(mhz, reasons=0, core_c=60.0, drawn_w=400.0):
    return NvmlGpu(
        index=0,
        clocks=Clocks(sm_mhz=mhz, reasons=reasons),
        temperature=Temperatures(core_c=core_c),
        power=Power(drawn_w=drawn_w),
    )


def test_a_soak_of_a_gpu_samples_its_clocks_as_long_as_it_runs(records, monkeypatch):
    asked = []

    def read_gpu():
        asked.append(1)
        return gpu(1900)

    monkeypatch.setattr("gpuops.worker.burnin.soak.EVERY_S", 0.001)

    def multiply_until_sampled(a, b, out):
        torch.matmul(a, b, out=out)
        while len(asked) < 3:
            time.sleep(0.001)

    measure_soak(CPU, SECONDS, records.append, read_gpu, multiply_until_sampled)

    clock = next(x for x in of(records, Measurement) if x.parameters_text == "kind=clock")
    assert (clock.unit, clock.median) == ("MHz", 1900)
    assert len(clock.values) >= 3
    (note,) = of(records, ProgramNote)
    assert "at most 60 C, at most 400 W" in note.message


def test_samples_name_what_reduced_the_clocks_and_how_often():
    hot = gpu(1400, REASONS["hw_thermal"] | REASONS["sw_power_cap"], core_c=88.0, drawn_w=690.0)

    assert samples_text([gpu(1980), hot, hot]) == (
        "3 samples: at most 88 C, at most 690 W, clocks reduced by its power limit in 2 of 3,"
        " clocks reduced by the hardware, for heat in 2 of 3"
    )
    assert samples_text([]) == "NVML gave no clocks, power or temperature"


@pytest.fixture
def two_nodes(tmp_path):
    """Return the root of a machine with two NUMA nodes of processors and one of memory alone."""
    for node, (cpus, distance) in enumerate((("0-3", "10 21 30"), ("4-7", "21 10 12"), ("", "9"))):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "distance").write_text(f"{distance}\n")
    return tmp_path


def test_the_far_processors_are_those_of_the_farthest_node_with_any(two_nodes):
    nodes = NumaNodes.read(two_nodes, (0, 1, 4, 5))

    assert nodes.places(0) == {"near": [0, 1], "far": [4, 5]}
    assert nodes.places(1) == {"near": [4, 5], "far": [0, 1]}
    assert nodes.places(2) == {"unknown": [0, 1, 4, 5]}
    assert nodes.places(None) == {"unknown": [0, 1, 4, 5]}
    assert NumaNodes.read(two_nodes, (0,)).places(0) == {"near": [0]}


def test_copies_of_the_host_are_measured_from_near_and_far(records):
    measure_links([(CPU, {"near": CPU.cpus, "far": CPU.cpus})], SECONDS, records.append)

    assert [item.parameters_text for item in of(records, Measurement)] == [
        f"kind={kind} numa={numa} size=64MiB"
        for numa in ("near", "far")
        for kind in ("write", "read")
    ]
    assert all(item.is_measured for item in of(records, Measurement))
    assert of(records, WrongResult) == []


class _Loses(torch.Tensor):
    """Memory in which byte 1000 of what is copied into it loses a bit, as over a bad link."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") == "copy_":
            args[0].as_subclass(torch.Tensor)[1000] ^= 4
        return result


def test_a_byte_that_changes_on_the_way_is_a_wrong_result(records, monkeypatch):
    buffers = links._host_buffers

    def losing(device):
        sent, back = buffers(device)
        return sent, back.as_subclass(_Loses)

    monkeypatch.setattr(links, "_host_buffers", losing)
    measure_links([(CPU, {"near": CPU.cpus})], SECONDS, records.append)

    (wrong,) = of(records, WrongResult)
    assert (wrong.part, wrong.parameters) == (PART, "kind=read numa=near")
    assert wrong.message.endswith("1 of 67108864 bytes changed on the way, the first is 1000")
