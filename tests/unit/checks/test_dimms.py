"""Memory modules against the profile."""

import pytest
from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.profile import NumberExpectation, Profile
from gpuops.checks.host.dimms import judge
from gpuops.host.memory_modules import Dimm, Dimms

GIB = 2**30


def case(count=None, size_bytes=None):
    return JudgeContext(
        node=NODE,
        profile=Profile(
            name="p",
            dimm_count=count and NumberExpectation(value=count, source="order 7"),
            dimm_bytes=size_bytes and NumberExpectation(value=size_bytes, source="order 7"),
        ),
    )


def slots(*sizes):
    return Dimms(tuple(Dimm(f"DIMM_{n}", size) for n, size in enumerate(sizes)))


@pytest.mark.parametrize(("fitted", "status"), [(31, "fail"), (32, "pass"), (33, "warn")])
def test_modules_are_counted(fitted, status):
    facts = slots(*[64 * GIB] * fitted, 0, 0)
    (finding,) = judge(facts, NoParameters(), case(32))

    assert (finding.status.word, finding.value) == (status, fitted)
    assert finding.message == f"{fitted} x 68.7 GB in {fitted + 2} slots"


@pytest.mark.parametrize(
    ("size_bytes", "bad"), [(64 * GIB - 1, True), (64 * GIB, False), (64 * GIB + 1, False)]
)
def test_a_module_that_is_too_small_fails_by_its_slot(size_bytes, bad):
    findings = judge(slots(64 * GIB, size_bytes), NoParameters(), case(2, 64 * GIB))

    assert said(findings)[1:] == ([("n1", "fail", "host_hw.dimm")] if bad else [])
    assert not bad or findings[1].message.startswith("DIMM_1 has 68.7 GB")


def test_without_a_profile_or_without_firmware_it_is_skipped():
    assert said(judge(slots(GIB, 0), NoParameters(), CASE)) == [("n1", "skip", None)]
    assert said(judge(Dimms(), NoParameters(), case(32))) == [("n1", "skip", None)]


def test_a_size_that_is_not_told_is_no_module():
    assert said(judge(slots(None, None), NoParameters(), case(2))) == [("n1", "skip", None)]
