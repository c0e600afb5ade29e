"""What each Xid of the shipped catalogue is to a run."""

import pytest

from gpuops.agent.monitors.gpu_events import judge_xid
from gpuops.checks.core.xid_catalogue import XidClass, XidKind, load_xids
from gpuops.host.xid import NVLINK5
from gpuops.host.xid_watch import LOST, XidEvent, XidSource
from gpuops.model import FailureClass, Side
from gpuops.resources import data_dir

CATALOGUE = load_xids([data_dir("checks") / "xid"])
CODES = sorted(CATALOGUE)
SOURCES = list(XidSource)


def judged(code, source=XidSource.KERNEL, catalogue=CATALOGUE, **told):
    return judge_xid(XidEvent(source=source, code=code, mono_ns=1, now_us=1, **told), catalogue)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("code", CODES)
def test_only_hardware_ends_a_run_and_what_applications_cause_blames_nobody(code, source):
    fault, kind = judged(code, source), CATALOGUE[code]

    known_from_the_log_alone = code in NVLINK5 and source is XidSource.NVML
    ends = kind.xid_class is XidClass.HARDWARE and not known_from_the_log_alone
    assert (fault.ends, fault.blames_node) == (ends, ends)
    assert str(code) in fault.text
    assert kind.name in fault.text
    if kind.xid_class is XidClass.APPLICATION:
        assert fault.suggests is FailureClass.GPU_ILLEGAL_ACCESS
        assert fault.side is Side.USER
    if ends:
        assert fault.suggests is kind.failure_class
        assert fault.side is Side.INFRA
        assert fault.suggests.category in {"gpu_hw", "gpu_sw", "host_hw"}


@pytest.mark.parametrize("code", [48, 62, 64, 74, 79, 95, 119, 120])
def test_memory_links_the_bus_and_the_gsp_exclude_the_node(code):
    assert judged(code, XidSource.NVML).blames_node


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 94])
def test_these_restart_only(code):
    assert not judged(code).ends


def test_an_nvlink_error_that_calls_itself_nonfatal_is_evidence():
    assert judged(145, fatal=True).ends
    assert judged(145).ends
    fault = judged(145, fatal=False)
    assert (fault.ends, fault.suggests) == (False, FailureClass.GPU_NVLINK)


@pytest.mark.parametrize(
    ("wanted", "ends", "blames"),
    [
        ("GPU Reset Required", True, True),
        ("Node Reboot Required", True, True),
        ("Drain P2P", False, True),
        ("Drain and Reset", False, True),
        ("None", False, False),
        (None, False, False),
    ],
)
def test_the_driver_decides_with_xid_154(wanted, ends, blames):
    fault = judged(154, recovery=wanted)

    assert (fault.ends, fault.blames_node) == (ends, blames)


def test_a_wish_about_an_nvlink_domain_is_evidence_and_blames_no_node():
    fault = judged(154, recovery="Recover IMEX Domain")

    assert (fault.ends, fault.blames_node) == (False, False)
    assert fault.suggests is FailureClass.GPU_FABRIC


def test_a_gpu_that_nvml_calls_lost_is_off_the_bus():
    fault = judged(LOST, XidSource.NVML)

    assert (fault.ends, fault.suggests) == (True, FailureClass.GPU_FELL_OFF_BUS)


def test_a_code_that_nobody_lists_is_evidence():
    fault = judged(999)

    assert (fault.ends, fault.blames_node, fault.suggests) == (False, False, None)


@pytest.mark.parametrize(("action", "blames"), [("RESTART_APP", False), ("RESET_GPU", True)])
def test_a_site_can_have_hardware_that_a_restart_cures(action, blames):
    kind = XidKind(
        code=7,
        name="a site's own",
        xid_class=XidClass.HARDWARE,
        source="site",
        action=action,
        failure_class=FailureClass.GPU_DRIVER,
    )
    fault = judged(7, catalogue={7: kind})

    assert (fault.ends, fault.blames_node) == (True, blames)
