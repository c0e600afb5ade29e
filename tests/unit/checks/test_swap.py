"""Swap against the profile."""

import pytest
from support.checks import CASE, NODE

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.profile import FlagExpectation, Profile
from gpuops.checks.host.swap import judge
from gpuops.host.kernel_state import Swap, SwapArea

AREA = SwapArea("/dev/dm-1", 8_000_000_000, 1_000_000)


@pytest.mark.parametrize(
    ("wanted", "areas", "status"),
    [(False, (), "pass"), (False, (AREA,), "warn"), (True, (AREA,), "pass"), (True, (), "warn")],
)
def test_swap_that_is_not_as_wanted_warns(wanted, areas, status):
    case = JudgeContext(
        node=NODE, profile=Profile(name="p", swap=FlagExpectation(value=wanted, source="site"))
    )
    (finding,) = judge(Swap(areas), NoParameters(), case)

    assert finding.status.word == status
    assert (finding.threshold, finding.source) == ("on" if wanted else "off", "site")


def test_without_a_profile_it_is_told_and_skipped():
    (finding,) = judge(Swap((AREA,)), NoParameters(), CASE)

    assert finding.status.word == "skip"
    assert finding.message.startswith("8.0 GB of swap, 1.0 MB in use")
