"""The verdicts on driver, library and VBIOS versions."""

from dataclasses import replace

import pytest
from support.checks import CASE, said
from support.gpus import DRIVER, gpu, node

from gpuops.checks.core.check import NoParameters
from gpuops.checks.core.profile import NO_PROFILE, TextExpectation
from gpuops.checks.gpu.gpu_versions import judge


def profiled(**expected):
    words = {key: TextExpectation(value=value, source="us") for key, value in expected.items()}
    return replace(CASE, profile=replace(NO_PROFILE, **words))


def findings(facts, case=CASE):
    return judge(facts, NoParameters(), case)


def test_equal_versions_pass_and_are_shown():
    (finding,) = findings(node(gpu(0), gpu(1)))

    assert finding.status.word == "pass"
    assert finding.message == (
        "2 GPUs: driver 550.163.01, NVML 12.550.163.01, VBIOS 96.00.74.00.01"
    )


@pytest.mark.parametrize(
    ("driver", "status"), [("550.163.01", "pass"), ("550.163.02", "fail"), (None, "skip")]
)
def test_the_driver_must_be_one_of_the_profiles(driver, status):
    facts = node(gpu(0), driver=driver, nvml_version=None)
    (verdict,) = said(findings(facts, profiled(driver=(DRIVER, "580.65.06"))))

    assert verdict == ("n1", status, "gpu_sw.config" if status == "fail" else None)


@pytest.mark.parametrize(
    ("library", "status"),
    [(f"12.{DRIVER}", "pass"), (DRIVER, "pass"), (None, "pass"), ("12.535.129.03", "warn")],
)
def test_the_library_must_be_the_drivers(library, status):
    (verdict,) = said(findings(node(gpu(0), nvml_version=library)))

    assert verdict == ("n1", status, "gpu_sw.driver" if status == "warn" else None)


def test_a_vbios_unlike_most_warns_and_unlike_the_profiles_fails():
    facts = node(gpu(0), gpu(1), gpu(2, vbios="96.00.30.00.01"))

    assert said(findings(facts)) == [("GPU-2", "warn", "gpu_sw.config")]
    assert said(findings(facts, profiled(vbios=("96.00.74.00.01",)))) == [
        ("GPU-2", "fail", "gpu_sw.config")
    ]
    assert said(findings(facts, profiled(vbios=("96.00.74.00.01", "96.00.30.00.01")))) == [
        ("n1", "pass", None)
    ]


def test_a_tie_of_vbios_versions_names_both():
    facts = node(gpu(0), gpu(1, vbios="96.00.30.00.01"))

    assert [item[0] for item in said(findings(facts))] == ["GPU-0", "GPU-1"]


def test_different_models_warn_and_their_vbios_are_not_compared():
    facts = node(gpu(0), gpu(1, "a100-sxm-80gb", vbios="92.00.9E.00.01"))
    (finding,) = findings(facts)

    assert finding.status.word == "warn"
    assert finding.message == (
        "different models in one node: 1 x NVIDIA A100-SXM4-80GB, 1 x NVIDIA H100 80GB HBM3"
    )


def test_a_vbios_that_is_not_told_is_skipped():
    assert said(findings(node(gpu(0, vbios=None)))) == [("n1", "skip", None)]
