"""The verdicts on ECC, MIG, persistence and compute mode."""

from dataclasses import replace

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node, part

from gpuops.checks.core.check import NoParameters
from gpuops.checks.core.profile import NO_PROFILE, FlagExpectation, TextExpectation
from gpuops.checks.gpu.gpu_modes import judge
from gpuops.host.nvml.facts import Modes


def flag(value):
    return FlagExpectation(value=value, source="us")


def profiled(**expected):
    return replace(CASE, profile=replace(NO_PROFILE, **expected))


def findings(case=CASE, **modes):
    return judge(node(gpu(0), part(gpu(1), "modes", **modes)), NoParameters(), case)


def test_modes_without_a_profile_pass():
    (finding,) = findings()

    assert finding.status.word == "pass"
    assert finding.message == "2 GPUs: ECC on, MIG off, persistence on"


@pytest.mark.parametrize("mode", ["ecc", "mig", "persistence"])
@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_another_mode_than_the_profiles_fails(mode, now, wanted):
    facts = node(part(gpu(1), "modes", **{mode: now, "ecc_pending": None, "mig_pending": None}))
    (verdict,) = said(judge(facts, NoParameters(), profiled(**{mode: flag(wanted)})))

    assert verdict == (
        ("n1", "pass", None) if now == wanted else ("GPU-1", "fail", "gpu_sw.config")
    )


@pytest.mark.parametrize(
    ("compute", "status"), [(0, "pass"), (1, "fail"), (2, "fail"), (3, "pass"), (9, "fail")]
)
def test_the_compute_mode_must_be_one_of_the_profiles(compute, status):
    wanted = TextExpectation(value=("default", "exclusive_process"), source="us")
    (verdict,) = said(findings(profiled(compute_mode=wanted), compute=compute))

    assert verdict[1] == status


@pytest.mark.parametrize("mode", ["ecc", "mig"])
def test_a_mode_that_waits_for_a_reset_warns(mode):
    (verdict,) = said(findings(**{mode: True, f"{mode}_pending": False}))

    assert verdict == ("GPU-1", "warn", "gpu_sw.config")


def test_persistence_that_is_off_warns():
    assert said(findings(persistence=False)) == [("GPU-1", "warn", "gpu_sw.config")]
    wanted_off = profiled(persistence=flag(value=False))
    assert said(findings(wanted_off, persistence=False)) == [("GPU-0", "fail", "gpu_sw.config")]


def test_mig_that_is_on_is_no_fault_of_its_own():
    (finding,) = findings(mig=True, mig_pending=True)

    assert finding.message == "2 GPUs: ECC on, MIG off or on, persistence on"


def test_modes_that_are_not_told_are_skipped():
    facts = node(gpu(0, modes=Modes()))

    assert said(judge(facts, NoParameters(), profiled(ecc=flag(True)))) == [("n1", "skip", None)]
