"""A recorded clock is read as the system call is; one of another form is no verdict."""

import pytest
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.clock_state import KernelClockState, read_clock_state


def test_a_recorded_clock_is_read(tmp_path):
    root = FakeRoot(tmp_path).clock(synchronised=False, error_max_s=16.0)

    expected = KernelClockState(synchronised=False, offset_s=0.0, error_max_s=16.0)
    assert read_clock_state(root.path) == expected


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"synchronised": 1}'])
def test_a_recording_of_another_form_is_not_supported(tmp_path, text):
    FakeRoot(tmp_path).write("syscall/adjtimex.json", text)

    with pytest.raises(ProbeError) as caught:
        read_clock_state(tmp_path)

    assert caught.value.reason == "not_supported"
