"""What ``/proc`` says, from text that a kernel wrote and from text that none would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host import procfs
from gpuops.host.procfs import Memory, Process

names = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20)


@given(total=st.integers(1, 2**40), available=st.integers(0, 2**40), other=st.integers(0, 2**40))
def test_memory_is_found_wherever_its_lines_stand(total, available, other):
    lines = [f"MemAvailable:   {available} kB", f"Hugetlb: {other} kB", f"MemTotal: {total} kB"]

    assert procfs.parse_meminfo("\n".join(lines)) == Memory(total * 1024, available * 1024)


@given(st.text())
def test_any_text_is_memory_or_an_error_that_says_so(text):
    try:
        memory = procfs.parse_meminfo(text)
    except ProbeError:
        return
    assert memory.total_bytes > 0


@given(
    pid=st.integers(1, 2**22),
    name=names,
    state=st.sampled_from("RSDTZtXI"),
    start=st.integers(0, 2**60),
)
def test_a_process_name_may_hold_spaces_and_parentheses(pid, name, state, start):
    stat = f"{pid} ({name}) {state} " + "0 " * 18 + f"{start} 0 0\n"

    assert procfs.parse_stat(stat) == Process(pid, name, state, start)


@given(st.text())
def test_any_text_is_a_process_or_none(text):
    process = procfs.parse_stat(text)

    assert process is None or process.pid >= 0


@given(st.lists(st.floats(0, 1e6).map(lambda x: round(x, 2)), min_size=3, max_size=3))
def test_load_averages_are_read_back(loads):
    text = " ".join(f"{load:.2f}" for load in loads) + " 1/300 77"

    assert procfs.parse_loadavg(text) == pytest.approx(tuple(loads))


@pytest.mark.parametrize("text", ["", "1.0 2.0", "a b c", "\0"])
def test_a_load_average_of_another_form_is_an_error(text):
    with pytest.raises(ProbeError, match="/proc/loadavg"):
        procfs.parse_loadavg(text)


def test_one_process_is_found_by_its_id_and_none_where_it_is_gone(tmp_path):
    root = FakeRoot(tmp_path).process(10, "a (b) c", "S", start_ticks=70)

    assert procfs.process(10, root.path) == Process(10, "a (b) c", "S", 70)
    assert procfs.process(11, root.path) is None


def test_only_processes_that_stay_in_state_d_are_blocked(tmp_path):
    root = FakeRoot(tmp_path).process(10, "nfsd client", "D").process(11, "python", "R")

    load = procfs.read_load(root.path, confirm_s=0)

    assert [(item.pid, item.name) for item in load.blocked] == [(10, "nfsd client")]
    assert (load.load1, load.cpus) == (0.1, 2)


@pytest.mark.parametrize(
    ("name", "text", "on_network"),
    [
        ("wchan", "rpc_wait_bit_killable", 1),
        ("stack", "[<0>] folio_wait_bit+0x1/0x2\n[<0>] nfs_wb_folio+0x1/0x2 [nfs]\n", 1),
        ("stack", "[<0>] cl_sync_io_wait+0x1/0x2 [obdclass]\n", 1),
        ("stack", "[<0>] request_wait_answer+0x1/0x2\n", 1),
        ("wchan", "0", 0),
        ("stack", "[<0>] io_schedule+0x1/0x2\n[<0>] xfs_buf_iowait+0x1/0x2 [xfs]\n", 0),
        ("stack", "[<0>] xfs_log_force+0x1/0x2 [xfs]\n[<0>] nfsd_commit+0x1/0x2 [nfsd]\n", 0),
        ("stack", "[<0>] nv_open_device+0x1/0x2 [nvidia]\n", 0),
    ],
)
def test_processes_that_wait_for_a_file_server_are_counted_apart(tmp_path, name, text, on_network):
    root = FakeRoot(tmp_path).process(10, "python", "D").write(f"proc/10/{name}", text)

    load = procfs.read_load(root.path, confirm_s=0)

    assert (load.on_network, len(load.blocked)) == (on_network, 1 - on_network)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ProbeError, match="proc/meminfo: No such file") as caught:
        procfs.read_memory(tmp_path)

    assert caught.value.reason == "missing_tool"


def test_the_boot_time_is_the_kernels(tmp_path):
    assert procfs.boot_us(FakeRoot(tmp_path).path) == 1_700_000_000_000_000
    assert procfs.boot_us(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("nvidia-cuda-mps", True),
        ("nvidia-cuda-mps-server", True),
        ("nvidia-cuda-mp", False),
        ("nvidia-cuda-xyz", False),
        ("Xorg", True),
        ("python3", False),
    ],
)
def test_a_name_that_the_kernel_cut_is_known_by_the_whole_pattern(name, known):
    assert procfs.is_named(name, ("Xorg", "nvidia-cuda-mps-server")) == known
