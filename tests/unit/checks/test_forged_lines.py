"""Lines that a user without any right makes the kernel write: they prove nothing.

In a user namespace of his own everybody may mount, and the kernel logs the options that it does not
know; everybody names processes, files and cpusets.
"""

import pytest
from support import kernel_log as log
from support.checks import CASE
from support.fake_root import FakeRoot
from support.kernel_log import records

from gpuops.agent.journal.session import AttemptKernelLog
from gpuops.checks.core.check import NoParameters, ProbeContext
from gpuops.checks.core.kernel_rules import PROBE
from gpuops.checks.fabric import nvswitch_sxid
from gpuops.checks.gpu import gpu_xid
from gpuops.checks.host import kernel_log
from gpuops.errors import ConfigError
from gpuops.host.kmsg import message_of, parse_kmsg, quotes_user
from gpuops.host.xid import parse_xid
from gpuops.incident.kernel import find_node_fault, oom_record
from gpuops.model import FailureClass, Status
from gpuops.rules import LogSource, first_match, load_rules

RULES = [rule for rule in log.RULES if rule.source is LogSource.KERNEL]
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
OFF_BUS = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."
OOM = "Out of memory: Killed process 4711 (python) total-vm:1kB"

QUOTED = {
    "unknown option": "tmpfs: Unknown parameter '{}'",
    "bad value": "tmpfs: Bad value for '{}'",
    "old tmpfs": "tmpfs: Bad value '{}' for mount option 'mode'",
    "overlay": 'overlayfs: unrecognized mount option "{}" or missing value',
    "path": "overlayfs: failed to resolve '{}': -2",
    "source": "{}: Can't open blockdev",
    "command line": 'ptrace attach of "{}"[7] was attempted by "{}"[8]',
    "start": "process '{}' launched '{}' with NULL argv: empty string added",
    "version of a client": (
        "NVRM: API mismatch: the client 'x' (pid 7)\nNVRM: has the version {}, but\nNVRM: this"
    ),
    "audit": 'audit: type=1400 audit(1.0:1): apparmor="DENIED" name="{}" pid=7',
    "a later line": "tmpfs: hm\n{}",
}
NAMED = {
    "library": "{:.15}[4711]: segfault at 0 ip 0000001 sp 0000000002 error 4 in {}[1+2]",
    "trap": "{:.15}[4711] trap divide error ip:1 sp:2 error:0 in {}[1+2]",
    "cpuset": "{:.15}: page allocation failure: order:0, mode:0x1, nodemask=(null),cpuset={}",
    "killer": "{:.15} invoked oom-killer: gfp_mask=0xcc0, order=0, cpuset={}",
}
FORMS = [*QUOTED.values(), *NAMED.values()]


def forged(form, text):
    return form.format(*[text] * form.count("{"))


@pytest.mark.parametrize("form", FORMS)
def test_a_quoted_line_hits_no_rule(form):
    for rule in RULES:
        line = forged(form, rule.example)

        assert parse_xid(line) is None, line
        if not (rule.about_process and form in NAMED.values()):
            assert first_match(RULES, line, LogSource.KERNEL) is None, line


@pytest.mark.parametrize("form", FORMS)
def test_a_quoted_line_neither_blames_the_node_nor_explains_an_exit(form):
    lines = [forged(form, line) for line in (XID_79, OFF_BUS, OOM)]

    assert find_node_fault(lines, RULES, ["0000:3b:00.0"]) is None
    assert oom_record(lines, {4711}) is None


@pytest.mark.parametrize("form", FORMS)
def test_a_quoted_line_fails_no_check(tmp_path, form):
    texts = [forged(form, rule.example) for rule in RULES]
    FakeRoot(tmp_path).kmsg("Linux version 6.1.0", *(text.replace("\n", "\\x0a") for text in texts))
    facts = PROBE.read(ProbeContext(tmp_path, log.RULE_DIRS, xid_dirs=log.XID_DIRS), 5.0)

    assert facts.driver.xids == facts.driver.sxids == ()
    for module, parameters in (
        (kernel_log, NoParameters()),
        (gpu_xid, gpu_xid.Parameters()),
        (nvswitch_sxid, nvswitch_sxid.Parameters()),
    ):
        found = module.judge(facts, parameters, CASE)
        assert {finding.status for finding in found} == {Status.PASS}


def test_what_a_user_wrote_is_no_evidence_of_a_run(tmp_path):
    FakeRoot(tmp_path).kmsg("Linux version 6.1.0")
    kernel = AttemptKernelLog(tmp_path)
    kernel.mark()
    texts = [forged(form, OOM) for form in QUOTED.values()]
    with (tmp_path / "dev/kmsg").open("a") as file:
        file.writelines(f"4,9,9,-;{text}\n" for text in texts if quotes_user(text))

    assert sum(quotes_user(text) for text in texts) == 7
    assert kernel.since_mark() == ()


@pytest.mark.parametrize("name", ["Bad value for 't", "x: Bad value fo", "process 'abcdef"])
def test_the_name_of_a_process_hides_no_true_line(name):
    line = f"NVRM: Xid (PCI:0000:3b:00): 48, pid=7, name={name}, Ch 1"
    (record,) = parse_kmsg(f"4,1,1,-;{line}\n")

    assert first_match(RULES, record.text, LogSource.KERNEL).id == "gpu_ecc_uncorrectable"


NONFATAL = "RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000004 0x00000001)"
TAKEN_BACK = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
NAMES = [
    "Fatal",
    "x, Fatal",
    "x, MSE_A Fatal",
    "x, Fatal, Link",
    "a, to 0x1 (bbb)",
    "Link 07",
    "x,\nFatal",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_process_is_none_of_the_drivers_words(tmp_path, name):
    start = f"pid=7, name={name}, "
    link = f"NVRM: Xid (PCI:0000:3b:00): 145, {start}{NONFATAL}"
    wish = f"NVRM: Xid (PCI:0000:3b:00): 154, {start}{TAKEN_BACK}"

    assert (parse_xid(link).fatal, parse_xid(link).link) == (False, 0)
    assert parse_xid(wish).recovery == "None"
    assert first_match(RULES, link, LogSource.KERNEL) is None
    assert first_match(RULES, wish, LogSource.KERNEL) is None
    (finding, *_) = gpu_xid.judge(log.facts(tmp_path, link), gpu_xid.Parameters(), CASE)
    assert finding.status is Status.WARN


@pytest.mark.parametrize("name", ["Nonfatal", "x, Nonfatal", "to 0x0 (None)"])
def test_the_name_of_a_process_takes_nothing_back(tmp_path, name):
    """A job can not hide what its GPU does."""
    start = f"pid=7, name={name}, "
    link = f"NVRM: Xid (PCI:0000:3b:00): 145, {start}RLW_REMAP Fatal XC0 i0 Link 03 (0x4)"
    wish = (
        f"NVRM: Xid (PCI:0000:3b:00): 154, {start}GPU recovery action changed from 0x0 (None)"
        " to 0x2 (Node Reboot Required)"
    )

    assert parse_xid(link).fatal
    assert parse_xid(wish).recovery == "Node Reboot Required"
    for line in (link, wish):
        assert first_match(RULES, line, LogSource.KERNEL).status is Status.FAIL
        (finding,) = gpu_xid.judge(log.facts(tmp_path, line), gpu_xid.Parameters(), CASE)
        assert finding.status is Status.FAIL


@pytest.mark.parametrize(
    "line", ["NVRM: Xid (PCI:0000:3b:00): 154, pid=7, name=" + "x" * 70 + " Fatal, a"]
)
def test_a_name_that_no_kernel_writes_is_not_read(line):
    assert parse_xid(line).recovery is None
    assert first_match(RULES, line, LogSource.KERNEL) is None


PREFIXES = [
    "[  123.456789] ",
    "[  123.456789][ T4711] ",
    "[Mon Apr  6 07:25:23 2026] ",
    "<4>[  123.456789] ",
    "4,339,5140900,-;",
    "Nov  5 17:12:10 gpu017 kernel: ",
    "Nov 25 17:12:10 gpu017 kernel: [  123.456789] ",
    "2026-11-25T17:12:10.123456+00:00 gpu017 kernel: ",
    "2026-11-25T17:12:10,123456+0000 gpu017 kernel: ",
    "Nov 25 17:12:10.123456 gpu017 kernel: ",
    "Wed 2026-11-25 17:12:10 UTC gpu017 kernel: ",
    "Wed 2026-11-25 17:12:10.123456 CEST gpu017 kernel: ",
    "[   12.345678] gpu017 kernel: ",
    "1795626730.123456 gpu017 kernel: ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_a_tool_writes_in_front_hides_no_line(prefix):
    for rule in RULES:
        assert message_of(prefix + rule.example) == rule.example
        assert first_match(RULES, prefix + rule.example, LogSource.KERNEL) is rule


def test_no_shipped_rule_loses_its_example_to_the_filters():
    for rule in RULES:
        (record,) = parse_kmsg(f"4,1,1,-;{rule.example}\n")

        assert first_match(RULES, record.text, LogSource.KERNEL) is rule


SITE = """
[[rule]]
id = "fan"
pattern = '{}'
failure_class = "host_hw.pcie"
source = "kernel"
side = "infra"
reference = "a test"
example = "acme 0000:01:00.0: fan 3 stopped"
"""


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("fan (?P<subject>.) stopped", "does not match its own example .* beginning"),
        (".*fan 3 stopped", "begins with any text"),
        ("(?:.{0,80}fan) 3 stopped", "begins with any text"),
    ],
)
def test_a_sites_rule_is_matched_from_the_beginning_too(tmp_path, pattern, message):
    (tmp_path / "site.toml").write_text(SITE.format(pattern))

    with pytest.raises(ConfigError, match=message):
        load_rules([tmp_path])


OLD_OOM = (
    "Memory cgroup out of memory: Kill process 4700 (bash) score 900 or sacrifice child",
    "Killed process 4711 (python) total-vm:8kB, anon-rss:8kB, file-rss:0kB",
    "Out of memory: Kill process 14294 (idle-priority) score 876 or sacrifice child",
    "Killed process 14458, UID 1000, (normal-priority) total-vm:4176kB, anon-rss:88kB",
)


def test_who_an_old_kernel_killed_is_in_its_second_line():
    assert oom_record(OLD_OOM, {4711}).failure_class is FailureClass.CGROUP_OOM
    assert oom_record(OLD_OOM, {14458}).failure_class is FailureClass.KERNEL_OOM
    assert oom_record(OLD_OOM, {15}) is None


def test_an_oom_line_of_a_tools_output_is_read_too():
    assert oom_record([f"[  1.000000] {OOM}"], {4711}).failure_class is FailureClass.KERNEL_OOM


def test_records_are_kept_that_only_look_like_quotes():
    lines = ["nvme nvme0: I/O tag 320 (c140) opcode 0x1 (I/O Cmd) QID 5 timeout, aborting", OOM]
    text = "".join(f"4,{n},1,-;{line}\n" for n, line in enumerate(lines))

    assert [record.text for record in parse_kmsg(text)] == [item.text for item in records(*lines)]
