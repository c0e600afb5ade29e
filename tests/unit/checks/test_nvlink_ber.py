"""The verdicts on the bit error rates of NVLinks."""

from dataclasses import replace

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node, shipped

from gpuops.checks.fabric.nvlink_ber import judge
from gpuops.host.nvml.facts import CallError, NvLink

LIMITS = shipped("nvlink_ber")["nvlink_ber"]
# The smallest number that NVML can tell: no error was counted.
NONE = 15e-255


def linked(n_links=4, **worst):
    """Return a GPU whose third link differs by *worst*; the others have no errors."""
    healthy = {"active": True, "effective_ber": NONE, "symbol_ber": NONE}
    links = [NvLink(link=number, **healthy) for number in range(n_links)]
    links[2] = replace(links[2], **worst)
    return gpu(0, "b200-sxm", nvlinks=tuple(links))


def findings(*gpus):
    return judge(node(*gpus), LIMITS, CASE)


@pytest.mark.parametrize(
    ("rates", "status"),
    [
        ({}, "pass"),
        ({"effective_ber": 0.0}, "pass"),
        ({"effective_ber": 9e-13}, "pass"),
        ({"effective_ber": 1e-12}, "pass"),
        ({"effective_ber": 11e-13}, "warn"),
        ({"effective_ber": 2e-12}, "warn"),
        ({"effective_ber": 0.9}, "warn"),
        ({"symbol_ber": 1e-25}, "pass"),
        ({"symbol_ber": 2e-25}, "warn"),
        ({"symbol_ber": 3e-16}, "warn"),
    ],
)
def test_a_rate_above_the_limit_warns_and_never_fails(rates, status):
    (verdict,) = said(findings(linked(**rates)))

    bad = ("GPU-0", "warn", "gpu_hw.nvlink")
    assert verdict == (bad if status == "warn" else ("n1", "pass", None))


def test_the_worst_link_is_named_with_its_rate_and_how_many_are_bad():
    (finding,) = findings(linked(effective_ber=2e-11))

    assert finding.message == (
        "GPU 0: NVLink 2: effective bit error rate 2e-11; 1 of 4 links are at the limit or above"
    )
    assert (finding.value, finding.unit, finding.source) == (
        2e-11,
        "errors/bit",
        "DCGM: more than 1e-12",
    )


def test_each_kind_is_a_finding_of_its_own():
    assert len(findings(linked(effective_ber=2e-9, symbol_ber=3e-15))) == 2


def test_a_link_that_is_down_tells_nothing_of_now():
    assert said(findings(linked(active=False, effective_ber=0.1))) == [("n1", "pass", None)]
    assert said(findings(linked(active=None, effective_ber=0.1)))[0][1] == "warn"


def test_a_pass_keeps_the_worst_rate_for_trends():
    (finding,) = findings(linked(effective_ber=3e-14))

    assert (finding.status.word, finding.value) == ("pass", 3e-14)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (gpu(0), "it has no NVLink that reports bit error rates (NVLink 5 and later do)"),
        (
            gpu(0, nvlinks=()),
            "it has no NVLink that reports bit error rates (NVLink 5 and later do)",
        ),
        (gpu(0, nvlinks=None), "no answer"),
        (
            replace(gpu(0), unsupported=("NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER",)),
            "not supported by the GPU or its driver",
        ),
        (
            replace(
                gpu(0), errors=(CallError("NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER", -1, "garbage"),)
            ),
            "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER: garbage",
        ),
    ],
)
def test_a_gpu_that_tells_no_rate_is_skipped_and_says_why(one, why):
    (finding,) = findings(one)

    assert (finding.status.word, finding.message) == ("skip", f"not judged on GPU 0: {why}")


def test_a_gpu_that_hangs_is_not_one_without_rates():
    (finding,) = findings(replace(gpu(0), hung_call="nvmlDeviceGetFieldValues"))

    assert (finding.status.word, finding.message) == (
        "unknown",
        "not judged on GPU 0: no answer in nvmlDeviceGetFieldValues",
    )
