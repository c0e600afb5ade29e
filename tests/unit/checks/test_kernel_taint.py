"""The kernel's taint."""

import pytest
from support.checks import CASE, said

from gpuops.checks.host.kernel_taint import MEANINGS, Parameters, judge
from gpuops.host.kernel_state import Taint

LIMITS = Parameters(source="a test", warn_bits=(4, 5, 7, 14), fail_bits=(3,))


def test_a_clean_kernel_passes():
    (finding,) = judge(Taint(0), LIMITS, CASE)

    assert (finding.status.word, finding.message) == ("pass", "not tainted")


def test_what_the_drivers_of_a_healthy_node_set_is_told_and_passes():
    (finding,) = judge(Taint(1 << 0 | 1 << 12 | 1 << 13), LIMITS, CASE)

    assert finding.status.word == "pass"
    assert "P proprietary module" in finding.message


@pytest.mark.parametrize("bit", range(20))
def test_each_bit_is_what_the_suite_makes_of_it(bit):
    (finding,) = judge(Taint(1 << bit), LIMITS, CASE)
    wanted = "fail" if bit == 3 else "warn" if bit in LIMITS.warn_bits else "pass"

    assert said([finding]) == [("n1", wanted, None if wanted == "pass" else "kernel.fault")]
    assert MEANINGS.get(bit, f"bit {bit}") in finding.message


def test_the_worst_bit_decides():
    assert judge(Taint(1 << 3 | 1 << 4), LIMITS, CASE)[0].status.word == "fail"
