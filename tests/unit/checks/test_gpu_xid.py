"""What Xids make of a GPU: by the driver's own wish, by the catalogue, and for how long."""

import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import kernel_log as log
from support.checks import CASE, NODE, limit, said

from gpuops.checks.core.check import JudgeContext, ProbeContext
from gpuops.checks.core.kernel_rules import KernelFacts
from gpuops.checks.core.xid_catalogue import XidClass, load_xids
from gpuops.checks.gpu.gpu_xid import CHECK, Parameters, judge
from gpuops.errors import ConfigError
from gpuops.host.node_state import Repair
from gpuops.host.records import from_json, to_json
from gpuops.rules import LogSource, first_match

ADDRESS = "0000:3b:00.0"
UUID = "GPU-1c7a5e38-0c43-1d5b-6ab1-4f3a2b1c0d9e"
SECOND_US = log.SECOND_US
BOOT_US = 1_700_000_000 * SECOND_US
CATALOGUE = load_xids(log.XID_DIRS)
GPU = f"PCI:{ADDRESS}"
RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
WELL = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
OFF_BUS = [
    "NVRM: The NVIDIA GPU 0000:3b:00.0",
    "NVRM: (PCI ID: 10de:2330) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
]
LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


def xid(code, tail="pid=7, name=python, Ch 00000010", gpu="3b"):
    return f"NVRM: Xid (PCI:0000:{gpu}:00): {code}, {tail}"


@pytest.fixture
def read_log(tmp_path):
    return lambda *lines, **times: log.facts(tmp_path, *lines, **times)


def findings(facts, case=CASE, **parameters):
    """Return what is said of GPUs, or of the node where nothing is said of any."""
    found = judge(facts, Parameters(**parameters), case)
    return [item for item in found if item.entity != NODE] or found


def repaired(since_boot_us, kind="node", name="n1"):
    repair = Repair(
        entity_kind=kind, entity_id=name, t_us=BOOT_US + since_boot_us, by="ann", what="reset"
    )
    return JudgeContext(node=NODE, repairs=(repair,), boot_us=BOOT_US)


VERDICTS = {
    XidClass.HARDWARE: "fail",
    XidClass.MIXED: "warn",
    XidClass.APPLICATION: "pass",
    XidClass.INFORMATIONAL: "pass",
    XidClass.RECOVERY: "warn",
}


@pytest.mark.parametrize("kind", CATALOGUE.values(), ids=lambda kind: kind.code)
def test_each_code_of_the_catalogue_is_judged_by_its_class(read_log, kind):
    """Xid 154 without an action that can be read is all that is left of its class: a warning."""
    (finding,) = findings(read_log(xid(kind.code)))
    status = VERDICTS[kind.xid_class]
    named = kind.failure_class and kind.failure_class.value

    assert said([finding]) == [(GPU, status, None if status == "pass" else named)]
    assert (finding.value, finding.unit) == (kind.code, "Xid")
    assert finding.source == "NVIDIA Xid catalog, 2025-10-29"
    assert kind.name in finding.message


@pytest.mark.parametrize(
    ("codes", "xid_class"),
    [
        ((46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143), XidClass.HARDWARE),
        ((*range(144, 151), 155, 156, 158, 167, 168, 169, 171, 172), XidClass.HARDWARE),
        ((8, 11, 13, 31, 32, 39, 43, 45, 60, 68, 69, 80, 86, 88, 139), XidClass.APPLICATION),
        ((37, 38, 44, 63, 66, 67, 93, 137, 141, 152, 160, 162, 166, 170), XidClass.INFORMATIONAL),
        ((56, 61, 78, 92, 94, 121, 122, 157, 159), XidClass.MIXED),
        ((154,), XidClass.RECOVERY),
    ],
)
def test_the_catalogue_says_what_nvidia_published(codes, xid_class):
    assert {CATALOGUE[code].xid_class for code in codes} == {xid_class}


def test_a_code_that_no_catalogue_lists_warns(read_log):
    assert said(findings(read_log(xid(999)))) == [(GPU, "warn", None)]


def test_no_xid_passes_and_says_how_far_back_the_log_goes(read_log):
    (finding,) = findings(read_log("Linux version 6.1.0", "NVRM: nothing of note"))

    assert said([finding]) == [("n1", "pass", None)]
    assert finding.message == "no Xid that fails a GPU since boot"


@pytest.mark.parametrize(
    ("code", "statuses"), [(94, ["warn", "pass"]), (79, ["fail"]), (31, ["pass"])]
)
def test_a_node_of_which_no_gpu_fails_has_a_pass(read_log, code, statuses):
    """A warning alone could also mean that the log was not read, and ends no drain."""
    found = judge(read_log(xid(code)), Parameters(), CASE)

    assert [finding.status.word for finding in found] == statuses


@pytest.mark.parametrize(("word", "status"), [("Fatal", "fail"), ("Nonfatal", "warn")])
def test_an_nvlink5_line_says_itself_whether_it_is_fatal(read_log, word, status):
    line = xid(145, tail=f"RLW_SRC_TRACK {word} XC1 i0 Link 11 (0x5 0x0)")

    assert said(findings(read_log(line))) == [(GPU, status, "gpu_hw.nvlink")]


@pytest.mark.parametrize(
    "words", ["GPU Reset Required", "Node Reboot Required", "Drain P2P", "Drain and Reset", "?"]
)
def test_what_the_driver_wants_done_fails_in_whatever_words(read_log, words):
    line = xid(154, tail=f"GPU recovery action changed from 0x0 (None) to 0x2 ({words})")
    (finding,) = findings(read_log(line))

    assert said([finding]) == [(GPU, "fail", "gpu_sw.driver")]
    assert f"the driver requests: {words}" in finding.message


@pytest.mark.parametrize("words", ["", " (Recover IMEX Domain)", " (Domain)"])
@pytest.mark.parametrize(
    ("first", "status", "failure_class"),
    [("boot", "warn", "gpu_sw.fabric"), (xid(79), "fail", "gpu_hw.fell_off_bus")],
    ids=["alone", "beside a fault of its own"],
)
def test_what_the_driver_wants_of_an_nvlink_domain_convicts_no_gpu(
    read_log, words, first, status, failure_class
):
    line = xid(154, tail=f"GPU recovery action changed from 0x0 (None) to 0x5{words}")
    (finding,) = findings(read_log(first, line))

    assert said([finding]) == [(GPU, status, failure_class)]
    assert "of the NVLink domain and not of this GPU" in finding.message
    assert first_match(log.RULES, line, LogSource.KERNEL) is None


def test_the_wish_of_the_driver_outranks_the_class_of_its_cause(read_log):
    (finding,) = findings(
        read_log(xid(145, tail="RLW_REMAP Nonfatal XC0 i0 Link 00"), xid(154, RESET))
    )

    assert said([finding]) == [(GPU, "fail", "gpu_hw.nvlink")]


def test_a_wish_that_is_taken_back_takes_back_what_was_before_it(read_log):
    assert said(findings(read_log(xid(119), xid(154, RESET), xid(154, WELL)))) == [
        ("n1", "pass", None)
    ]


def test_what_comes_after_a_wish_was_taken_back_counts(read_log):
    lines = xid(119), xid(154, RESET), xid(154, WELL), xid(48)

    assert said(findings(read_log(*lines))) == [(GPU, "fail", "gpu_hw.ecc_uncorrectable")]


def test_a_wish_about_one_gpu_says_nothing_about_another(read_log):
    lines = xid(79), xid(154, WELL, gpu="86")

    assert said(findings(read_log(*lines))) == [(GPU, "fail", "gpu_hw.fell_off_bus")]


@pytest.mark.parametrize(
    ("after_us", "status"),
    [(-SECOND_US, "fail"), (0, "pass"), (SECOND_US, "pass")],
    ids=["repaired before", "at the same time", "repaired after"],
)
@pytest.mark.parametrize(("kind", "name"), [("node", "n1"), ("gpu", UUID), ("gpu", GPU)])
def test_an_acknowledged_repair_ends_what_was_before_it(
    tmp_path, read_log, after_us, status, kind, name
):
    log.gpu_information(tmp_path, ADDRESS, UUID)
    facts = read_log(xid(79), start_us=600 * SECOND_US)
    (finding,) = findings(facts, repaired(600 * SECOND_US + after_us, kind, name))

    assert finding.status.word == status


@pytest.mark.parametrize(
    "case",
    [
        repaired(9, kind="gpu", name="GPU-another"),
        repaired(9, kind="nic", name=UUID),
        repaired(-5 * SECOND_US),
        JudgeContext(node=NODE, repairs=repaired(9 * SECOND_US).repairs),
    ],
    ids=["another GPU", "a network card", "in an earlier boot", "nobody knows when it booted"],
)
def test_a_repair_of_something_else_ends_nothing(read_log, case):
    assert said(findings(read_log(xid(79)), case)) == [(GPU, "fail", "gpu_hw.fell_off_bus")]


def test_a_failure_says_how_to_end_it_and_does_not_fade(read_log):
    facts = read_log(xid(79), start_us=0)
    month_old = KernelFacts(
        source=facts.source,
        now_us=30 * 86400 * SECOND_US,
        log=facts.log,
        driver=facts.driver,
        xids=facts.xids,
    )
    (finding,) = findings(month_old)

    assert finding.status.word == "fail"
    assert "`gpuops repair n1 --what TEXT`" in finding.message


def test_the_drivers_loading_ends_what_was_before_it(read_log):
    assert said(findings(read_log(xid(119), LOADED))) == [("n1", "pass", None)]
    assert said(findings(read_log(LOADED, xid(119)))) == [(GPU, "fail", "gpu_hw.gsp")]


def test_xid_45_follows_the_xid_that_brought_it(read_log):
    (finding,) = findings(read_log(xid(95), *[xid(45)] * 9))

    assert said([finding]) == [(GPU, "fail", "gpu_hw.ecc_uncorrectable")]
    assert "also Xid 45" in finding.message


def test_xid_45_alone_convicts_nobody_and_says_what_it_can_be(read_log):
    (finding,) = findings(read_log(xid(45)))

    assert finding.status.word == "pass"
    assert "fabric manager" in finding.message


@pytest.mark.parametrize(("minutes", "status"), [(2, "pass"), (3, "warn"), (4, "warn")])
def test_a_gpu_on_which_applications_fail_again_and_again_is_suspect(read_log, minutes, status):
    facts = read_log(*[xid(31)] * minutes, step_us=60 * SECOND_US)
    (finding,) = findings(facts, application_minutes=limit(warn=3))

    assert finding.status.word == status
    assert finding.failure_class == ("gpu_fault.illegal_access" if status == "warn" else None)


def test_no_number_of_application_xids_fails_a_node(read_log):
    facts = read_log(*[xid(13), xid(31), xid(43)] * 90, step_us=60 * SECOND_US)

    assert findings(facts, application_minutes=limit(fail=1))[0].status.word == "warn"


@pytest.mark.parametrize(("step_us", "minutes"), [(59_999_999, 1), (60_000_000, 2)])
def test_lines_are_counted_once_a_minute(read_log, step_us, minutes):
    """The second line comes just before the minute's edge, or at it."""
    facts = read_log(xid(31), xid(31), step_us=step_us)

    assert len(facts.driver.xids) == minutes


@pytest.mark.parametrize(
    "lines",
    [
        ["NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."],
        ["\n".join(OFF_BUS)],
        OFF_BUS,
        [*OFF_BUS, LOADED],
    ],
    ids=["one line", "one record", "three records", "while the driver is loaded"],
)
def test_a_gpu_off_the_bus_fails_without_an_xid_too(read_log, lines):
    (finding,) = findings(read_log(*lines))

    assert said([finding]) == [(GPU, "fail", "gpu_hw.fell_off_bus")]
    assert "fallen off the bus" in finding.message


def test_a_gpu_is_named_by_its_uuid_where_it_is_known(tmp_path, read_log):
    log.gpu_information(tmp_path, ADDRESS, UUID)

    assert findings(read_log(xid(79)))[0].entity.id == UUID


def test_a_gpu_is_named_by_what_the_driver_wrote_beside_its_first_xid(read_log):
    facts = read_log(f"NVRM: GPU at PCI:0000:3b:00: {UUID}", xid(79))

    assert findings(facts)[0].entity.id == UUID


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (None, "fail"),
        ({UUID}, "fail"),
        ({UUID.upper()}, "fail"),
        ({"1"}, "fail"),
        ({"00000000:3B:00.0"}, "fail"),
        ({"0"}, "warn"),
        ({"GPU-another"}, "warn"),
        (set(), "warn"),
    ],
)
def test_a_gpu_that_a_job_does_not_get_only_warns(tmp_path, read_log, asked, status):
    log.gpu_information(tmp_path, "0000:1a:00.0", "GPU-0a1b2c3d-0000-0000-0000-000000000000")
    log.gpu_information(tmp_path, ADDRESS, UUID)
    case = JudgeContext(node=NODE, gpus=None if asked is None else frozenset(asked))
    (finding,) = findings(read_log(xid(79)), case)

    assert said([finding]) == [(UUID, status, "gpu_hw.fell_off_bus")]


@pytest.mark.parametrize(("number", "status"), [(0, "warn"), (1, "fail"), (3, "fail"), (2, "warn")])
def test_a_number_of_slurms_is_a_place_by_address_or_a_device_file(
    tmp_path, read_log, number, status
):
    log.gpu_information(tmp_path, "0000:1a:00.0", "GPU-0a1b2c3d-0000-0000-0000-000000000000", 2)
    log.gpu_information(tmp_path, ADDRESS, UUID, 3)
    (finding,) = findings(
        read_log(xid(79)), JudgeContext(node=NODE, gpus=frozenset({f"slurm:{number}"}))
    )

    assert finding.status.word == status


def test_a_gpu_that_cannot_be_told_from_others_counts_as_asked_about(tmp_path, read_log):
    assert (
        findings(read_log(xid(79)), JudgeContext(node=NODE, gpus=frozenset({UUID})))[0].status.word
        == "fail"
    )
    log.gpu_information(tmp_path, ADDRESS, "GPU-????????-????-????-????-????????????")
    assert (
        findings(read_log(xid(79)), JudgeContext(node=NODE, gpus=frozenset({UUID})))[0].status.word
        == "fail"
    )


def test_each_gpu_is_a_finding_and_the_worst_comes_first(read_log):
    facts = read_log(xid(31, gpu="1a"), xid(94, gpu="2b"), xid(79, gpu="3c"))

    assert [finding.status.word for finding in findings(facts)] == ["fail", "warn", "pass"]


def n_calls(function, *args):
    """Return what *function* returns, and how many calls it makes, of Python and of C."""
    events = Counter()
    sys.setprofile(lambda _frame, event, _arg: events.update((event,)))
    try:
        found = function(*args)
    finally:
        sys.setprofile(None)
    return found, events["call"] + events["c_call"]


def test_a_storm_of_170000_lines_is_one_finding_and_costs_forty_calls_a_line(tmp_path):
    """200 lines a millisecond, and the ten that matter among them (27 calls were measured).

    Calls, because seconds depend on the machine; `test_kernel_log` bounds what one search takes.
    """
    lines = [
        (n * 5, xid(45, tail=f"pid=4711, name=python, Ch {n % 64:08x}")) for n in range(170_000)
    ]
    lines[85_000:85_000] = [
        (85_000 * 5, xid(119, tail="pid=1, name=python, Timeout after 6s"))
    ] * 10
    log.write_kmsg(tmp_path, lines)
    machine = ProbeContext(tmp_path, log.RULE_DIRS, xid_dirs=log.XID_DIRS)
    facts, calls = n_calls(CHECK.probe.read, machine, 60.0)
    (finding,) = findings(facts)

    assert said([finding]) == [(GPU, "fail", "gpu_hw.gsp")]
    assert "Xid 119 (GSP gave no answer in time), 10 times" in finding.message
    assert "170000 times" in finding.message
    assert calls < 40 * len(lines)


def test_a_forged_line_of_a_program_counts_for_nothing(tmp_path):
    """Priority 12 is facility 1 (user): what `echo ... > /dev/kmsg` writes."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text(f"12,0,1,-;{xid(79)}\n")
    machine = ProbeContext(tmp_path, xid_dirs=log.XID_DIRS)

    assert said(findings(CHECK.probe.read(machine, 5.0))) == [("n1", "pass", None)]


@given(st.lists(st.text(max_size=120), max_size=20))
def test_any_log_is_judged_without_an_error(tmp_path_factory, lines):
    prefixed = [f"NVRM: Xid (PCI:0000:3b:00): {text}" for text in lines]
    root = tmp_path_factory.mktemp("root")

    assert findings(log.facts(root, *lines, *prefixed))


def test_facts_survive_their_way_through_json(read_log):
    facts = read_log(xid(79), xid(145, tail="RLW_CTRL Fatal XC0 i0 Link 00"), xid(154, RESET))

    assert from_json(KernelFacts, to_json(facts), "a test") == facts


SITE = """
source = "our tickets"

[[xid]]
codes = [121]
name = "C2C link error"
class = "hardware"
failure_class = "gpu_hw.nvlink"
"""


def test_a_site_judges_a_code_its_own_way(tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    kinds = load_xids([*log.XID_DIRS, tmp_path])

    assert (kinds[121].xid_class, kinds[121].source) == (XidClass.HARDWARE, "our tickets")
    assert kinds[79] == CATALOGUE[79]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source = "our tickets"', "", "must name the source"),
        ('class = "hardware"', 'class = "bad"', "bad"),
        ('failure_class = "gpu_hw.nvlink"', "", "needs a failure_class"),
        ('failure_class = "gpu_hw.nvlink"', 'failure_class = "gpu.none"', "gpu.none"),
        ('name = "C2C link error"', "", "missing 'name'"),
        ("codes = [121]", 'codes = ["121"]', "whole numbers"),
        ("codes = [121]", "codes = [121, 121]", "121 twice"),
        ("codes = [121]", "code = 121", "unknown key 'code'"),
    ],
)
def test_a_catalogue_that_is_none_is_refused_by_name(tmp_path, old, new, message):
    (tmp_path / "site.toml").write_text(SITE.replace(old, new))

    with pytest.raises(ConfigError, match=message):
        load_xids([tmp_path])
