"""The verdicts on the NVSwitch fabric."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said
from support.gpus import HEALTHY_MASK, gpu, node, shipped_profile

from gpuops.checks.gpu.gpu_fabric import Parameters, judge
from gpuops.host.node_state import Counters
from gpuops.host.nvml.facts import Fabric

LIMITS = Parameters(joining_s=limit(fail=300))
BOOTED = replace(CASE, counters=Counters(since_boot_s=3600.0))
PROFILED = replace(BOOTED, profile=shipped_profile())


def findings(fabric, case=PROFILED, *, count=8, **changes):
    return judge(node(gpu(0), gpu(1, fabric=fabric, **changes), on_bus=count), LIMITS, case)


def test_a_completed_fabric_passes():
    assert said(findings(Fabric(state=3, status=0, health_mask=HEALTHY_MASK))) == [
        ("n1", "pass", None)
    ]


@pytest.mark.parametrize("state", [1, 2])
def test_a_gpu_outside_the_fabric_fails_where_there_must_be_one(state):
    outside = Fabric(state=state, status=0)

    assert said(findings(outside)) == [("GPU-1", "fail", "gpu_sw.fabric")]
    assert said(findings(outside, BOOTED)) == [("GPU-1", "warn", "gpu_sw.fabric")]


@pytest.mark.parametrize(
    ("since_boot_s", "status"), [(0, "warn"), (299, "warn"), (300, "fail"), (301, "fail")]
)
def test_a_node_that_has_only_just_booted_is_given_time(since_boot_s, status):
    case = replace(PROFILED, counters=Counters(since_boot_s=float(since_boot_s)))

    assert [item[1] for item in said(findings(Fabric(state=2, status=0), case))] == [status]


def test_a_board_without_a_fabric_is_skipped_or_warns_where_one_is_expected():
    none = Fabric(state=0, status=0)

    assert said(findings(none, BOOTED))[1:] == [("n1", "skip", None)]
    assert said(findings(none)) == [("GPU-1", "warn", "gpu_sw.fabric")]


@pytest.mark.parametrize(
    ("count", "joining", "none"), [(4, "warn", "skip"), (5, "fail", "warn"), (8, "fail", "warn")]
)
def test_a_board_of_four_gpus_has_no_switch_to_join(count, joining, none):
    assert said(findings(Fabric(state=2, status=0), count=count))[0][1] == joining
    assert said(findings(Fabric(state=0, status=0), count=count))[-1][1] == none


def test_a_state_that_only_a_newer_driver_knows_warns():
    assert said(findings(Fabric(state=4, status=0)))[0][1] == "warn"


def test_a_divided_gpu_needs_no_fabric():
    divided = replace(gpu(1).modes, mig=True)
    found = findings(Fabric(state=1, status=0), modes=divided)

    assert [item[1] for item in said(found)] == ["pass", "skip"]
    assert (
        found[1].message
        == "not judged on GPU 1: MIG is on, it needs no fabric (state: not started)"
    )


def test_a_failed_registration_fails():
    assert said(findings(Fabric(state=3, status=999), BOOTED)) == [
        ("GPU-1", "fail", "gpu_sw.fabric")
    ]


@pytest.mark.parametrize(
    ("mask", "status"),
    [
        (0, "pass"),
        (HEALTHY_MASK, "pass"),
        (0b01, "fail"),
        (0b10, "pass"),
        (0b01 << 2, "warn"),
        (0b10 << 2, "pass"),
        (0b01 << 4, "fail"),
        (0b10 << 4, "pass"),
        (0b01 << 6, "warn"),
        (0b10 << 6, "pass"),
        (1 << 8, "pass"),
        (2 << 8, "fail"),
        (5 << 8, "fail"),
        (15 << 8, "fail"),
        (0xFFFF, "pass"),
        (2**32 - 2, "pass"),
    ],
)
def test_the_health_mask_is_read_bit_by_bit(mask, status):
    (verdict,) = said(findings(Fabric(state=3, status=0, health_mask=mask)))

    assert verdict[1] == status


@pytest.mark.parametrize(
    ("summary", "status"), [(None, "pass"), (0, "pass"), (1, "pass"), (2, "fail"), (3, "warn")]
)
def test_the_summary_counts_where_the_mask_says_nothing(summary, status):
    fabric = Fabric(state=3, status=0, health_mask=0, health_summary=summary)

    assert [item[1] for item in said(findings(fabric))] == [status]


def test_a_fabric_without_a_health_mask_is_said():
    (finding,) = findings(Fabric(state=3, status=0))

    assert finding.message == "2 GPUs in the fabric; 1 do not report the fabric's health"


def test_a_gpu_that_is_alone_needs_no_fabric():
    (finding,) = judge(node(gpu(0, fabric=Fabric(state=1, status=0))), LIMITS, PROFILED)

    assert finding.status.word == "skip"


def test_a_fabric_that_is_not_told_is_skipped():
    assert said(findings(None))[1:] == [("n1", "skip", None)]


def test_four_gpus_of_a_rack_fail_where_the_sites_own_profile_expects_the_fabric():
    fabric = replace(PROFILED.profile.fabric, is_shipped=False)
    case = replace(PROFILED, profile=replace(PROFILED.profile, fabric=fabric))

    assert said(findings(Fabric(state=2, status=0), case, count=4)) == [
        ("GPU-1", "fail", "gpu_sw.fabric")
    ]
