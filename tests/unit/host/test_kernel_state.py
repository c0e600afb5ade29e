"""Taint, modules and swap out of a recorded tree."""

import pytest
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.kernel_state import Modules, Swap, SwapArea, read_modules, read_swap, read_taint

SWAPS = """Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority
/dev/dm-1                               partition\t8388604\t1024\t\t-2
/swapfile                               file\t\t1024\t0\t\t-3
something else
"""


def test_taint_is_a_mask(tmp_path):
    root = FakeRoot(tmp_path).write("proc/sys/kernel/tainted", "12289\n")

    assert read_taint(root.path).mask == 1 | 1 << 12 | 1 << 13


@pytest.mark.parametrize("text", ["", "x\n", "-1\n"])
def test_a_taint_that_is_no_mask_is_not_read_as_clean(tmp_path, text):
    root = FakeRoot(tmp_path).write("proc/sys/kernel/tainted", text)

    with pytest.raises(ProbeError) as caught:
        read_taint(root.path)
    assert caught.value.reason == "not_supported"


def test_modules_are_found_loaded_or_built_in_under_either_spelling(tmp_path):
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)

    assert read_modules(tmp_path, ("nvidia-peermem", "mlx5_ib")) == Modules(
        present=("nvidia-peermem",), absent=("mlx5_ib",)
    )


def test_without_a_view_of_modules_none_is_called_absent(tmp_path):
    with pytest.raises(ProbeError):
        read_modules(tmp_path, ("nvidia",))
    assert read_modules(tmp_path, ()) == Modules()


def test_swap_areas_are_read_in_bytes(tmp_path):
    root = FakeRoot(tmp_path).write("proc/swaps", SWAPS)

    assert read_swap(root.path) == Swap(
        (
            SwapArea("/dev/dm-1", 8388604 * 1024, 1024 * 1024),
            SwapArea("/swapfile", 1024 * 1024, 0),
        )
    )
    assert read_swap(tmp_path / "none") == Swap()
