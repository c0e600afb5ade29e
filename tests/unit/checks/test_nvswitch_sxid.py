"""What SXids make of an NVSwitch: a line says itself whether it is fatal."""

import pytest
from support import kernel_log as log
from support.checks import CASE, NODE, limit, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.xid_catalogue import SxidClass, load_sxids
from gpuops.checks.fabric.nvswitch_sxid import Parameters, judge
from gpuops.host.node_state import Repair

CATALOGUE = load_sxids(log.XID_DIRS)
SWITCH = "PCI:0000:c1:00.0"
SECOND_US = log.SECOND_US
BOOT_US = 1_700_000_000 * SECOND_US
LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15"


def sxid(code, word="Non-fatal", switch="c1"):
    return f"nvidia-nvswitch3: SXid (PCI:0000:{switch}:00.0): {code}, {word}, Link 30 a fault"


@pytest.fixture
def read_log(tmp_path):
    return lambda *lines, **times: log.facts(tmp_path, *lines, **times)


def findings(facts, case=CASE, **parameters):
    """Return what is said of switches, or of the node where nothing is said of any."""
    found = judge(facts, Parameters(**parameters), case)
    return [item for item in found if item.entity != NODE] or found


VERDICTS = {
    SxidClass.ALWAYS_FATAL: "fail",
    SxidClass.POTENTIALLY_FATAL: "warn",
    SxidClass.RESET: "warn",
    SxidClass.CORRECTED: "pass",
    SxidClass.INFORMATIONAL: "pass",
}


@pytest.mark.parametrize("kind", CATALOGUE.values(), ids=lambda kind: kind.code)
def test_each_code_that_is_not_fatal_is_judged_by_its_class(read_log, kind):
    (finding,) = findings(read_log(sxid(kind.code)))
    status = VERDICTS[kind.sxid_class]

    assert said([finding]) == [(SWITCH, status, None if status == "pass" else "gpu_hw.nvswitch")]
    assert (finding.value, finding.unit) == (kind.code, "SXid")


@pytest.mark.parametrize("code", [*CATALOGUE, 99999])
def test_a_line_that_says_fatal_fails_whatever_its_code(read_log, code):
    assert said(findings(read_log(sxid(code, "Fatal")))) == [(SWITCH, "fail", "gpu_hw.nvswitch")]


def test_a_code_that_no_catalogue_lists_warns(read_log):
    assert said(findings(read_log(sxid(99999)))) == [(SWITCH, "warn", "gpu_hw.nvswitch")]


@pytest.mark.parametrize(
    ("codes", "sxid_class"),
    [
        ((12020, 22003, 22011, *range(23001, 23018)), SxidClass.ALWAYS_FATAL),
        ((11001, 11009, 11013, 11018, 12001, 14017, 20034, 24004), SxidClass.POTENTIALLY_FATAL),
        ((11012, 11021, 12021, 15008, 19049, 20001, 24001), SxidClass.CORRECTED),
    ],
)
def test_the_catalogue_says_what_nvidia_published(codes, sxid_class):
    assert {CATALOGUE[code].sxid_class for code in codes} == {sxid_class}


def test_no_sxid_passes(read_log):
    assert said(findings(read_log("Linux version 6.1.0"))) == [("n1", "pass", None)]


@pytest.mark.parametrize(
    ("line", "statuses"),
    [
        (sxid(12028), ["warn", "pass"]),
        (sxid(20034, "Fatal"), ["fail"]),
        (sxid(20001), ["pass"]),
    ],
)
def test_a_node_of_which_no_switch_fails_has_a_pass(read_log, line, statuses):
    """A warning alone could also mean that the log was not read, and ends no drain."""
    found = judge(read_log(line), Parameters(), CASE)

    assert [finding.status.word for finding in found] == statuses


def test_the_further_lines_of_an_sxid_are_not_counted(read_log):
    more = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Severity 1 Engine instance 30"
    facts = read_log(sxid(20034, "Fatal"), more)

    assert sum(burst.count for burst in facts.driver.sxids) == 1


@pytest.mark.parametrize(("lines", "status"), [(9, "pass"), (10, "warn"), (11, "warn")])
def test_many_corrected_errors_within_an_hour_warn(read_log, lines, status):
    facts = read_log(*[sxid(20001)] * lines)

    assert findings(facts, corrected_per_hour=limit(warn=10))[0].status.word == status


@pytest.mark.parametrize(("age_s", "status"), [(3600, "warn"), (3601, "pass")])
def test_corrected_errors_of_more_than_an_hour_ago_are_no_rate(tmp_path, read_log, age_s, status):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text(f"{age_s}.00 1.00\n")
    facts = read_log(*[sxid(20001)] * 10, step_us=0)

    assert findings(facts, corrected_per_hour=limit(warn=10))[0].status.word == status


@pytest.mark.parametrize(("after_us", "status"), [(-1, "fail"), (0, "pass"), (1, "pass")])
@pytest.mark.parametrize(("kind", "name"), [("node", "n1"), ("switch", SWITCH)])
def test_an_acknowledged_repair_ends_what_was_before_it(read_log, after_us, status, kind, name):
    facts = read_log(sxid(20034, "Fatal"), start_us=60 * SECOND_US)
    at_us = BOOT_US + 60 * SECOND_US + after_us
    repair = Repair(entity_kind=kind, entity_id=name, t_us=at_us, by="ann", what="tray")
    (finding,) = findings(facts, JudgeContext(node=NODE, repairs=(repair,), boot_us=BOOT_US))

    assert finding.status.word == status


def test_the_drivers_loading_ends_what_was_before_it(read_log):
    assert said(findings(read_log(sxid(20034, "Fatal"), LOADED))) == [("n1", "pass", None)]


def test_a_fatal_sxid_counts_for_every_job_and_says_how_to_end_it(read_log):
    case = JudgeContext(node=NODE, gpus=frozenset({"GPU-of-one-job"}))
    (finding,) = findings(read_log(sxid(20034, "Fatal")), case)

    assert finding.status.word == "fail"
    assert "link 30, fatal" in finding.message
    assert "`gpuops repair n1 --what TEXT`" in finding.message


def test_each_switch_is_a_finding_and_the_worst_comes_first(read_log):
    facts = read_log(sxid(20001), sxid(20034, "Fatal", switch="c4"))

    assert said(findings(facts)) == [
        ("PCI:0000:c4:00.0", "fail", "gpu_hw.nvswitch"),
        (SWITCH, "pass", None),
    ]
