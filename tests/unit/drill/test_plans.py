"""What a fault says it will do, from what was asked: without touching anything."""

from pathlib import Path
from random import Random

import pytest

from gpuops.drill.catalogue import (
    BY_NAME,
    HOLD_RANGE_S,
    RANDOM_DEFAULT,
    SCENARIOS,
    draw_fault,
    needs_run,
)
from gpuops.drill.fault import DrillOptions, DrillTarget
from gpuops.drill.find import AgentStateFile, Victim
from gpuops.drill.machine import size_to_take
from gpuops.drill.network import discipline, host_prefix
from gpuops.drill.steps import RunProgram, SendSignal, TakeSpace, from_json, to_json
from gpuops.errors import DrillError, UsageError
from gpuops.host.kmsg import parse_kmsg
from gpuops.host.net.traffic import parse_qdisc, parse_routes
from gpuops.host.xid import parse_xid


@pytest.fixture
def root(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").touch()
    (tmp_path / "sys/class/net/ib0").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000000000\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    return tmp_path


def plan(name, root, **wanted):
    return BY_NAME[name].plan(DrillTarget(uid=0, root=root), DrillOptions(**wanted))


def published(node, *ranks):
    return AgentStateFile(
        path=Path("/runs/a/state.json"),
        owner_uid=0,
        run_id="r1",
        node=node,
        generation=0,
        phase="running",
        agent_pid=100,
        pids=dict.fromkeys(ranks, 200),
        ring_dir=Path("/rings/g"),
    )


def test_every_scenario_has_its_file_and_options_that_exist():
    names = [scenario.name for scenario in SCENARIOS]

    assert len(names) == len(set(names))
    for scenario in SCENARIOS:
        assert set(scenario.options) <= set(DrillOptions.__dataclass_fields__)


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS if needs_run(s)])
def test_without_a_run_nothing_is_broken(name, root):
    with pytest.raises(DrillError, match="no run publishes"):
        plan(name, root, rank=0)


@pytest.mark.parametrize("name", ["kill-rank", "stop-rank", "slow-rank"])
def test_a_fault_of_a_rank_wants_a_rank(name, root):
    with pytest.raises(UsageError, match="--rank"):
        plan(name, root)


def test_a_sick_gpu_is_a_line_that_names_the_rehearsal(root):
    fault = plan("sick-gpu", root, address="0000:3b:00", xid=48)
    ((line,),) = [change.do.lines for change in fault.changes]

    assert list(parse_kmsg(line)) == [], "no check of the node takes it for the driver's"
    (record,) = parse_kmsg(line, rehearsals=True)
    xid = parse_xid(record.text)
    assert (xid.address, xid.code) == ("0000:3b:00.0", 48)
    assert "gpuops drill" in record.text
    assert "0000:3b:00" in fault.breaks


def test_a_storm_is_many_lines(root):
    assert len(plan("xid-storm", root, count=50).changes[0].do.lines) == 50


@pytest.mark.parametrize(
    ("name", "wanted", "why"),
    [
        ("sick-gpu", {"address": "0000:3b:00): 1\nfoo"}, "PCI address"),
        ("sick-gpu", {"xid": 0}, "--xid 0"),
        ("xid-storm", {"count": 0}, "--count 0"),
        ("kill-rank", {"rank": 0, "signal": "SIGSTOP"}, "--signal SIGSTOP"),
        ("preempt", {"signal": "SIGKILL"}, "--signal SIGKILL"),
        ("slow-rank", {"rank": 0, "share": 1.0}, "--share 1"),
        ("slow-board", {"delay_ms": 0.0}, "--delay 0"),
        ("cut-link", {}, "either --interface or --peer"),
        ("cut-link", {"interface": "ib0", "peers": ("10.0.0.1",)}, "either --interface or --peer"),
        ("cut-link", {"interface": "lo"}, "loopback"),
        ("slow-link", {"interface": "ib0"}, "how slow"),
        ("slow-link", {"interface": "ib0", "loss_percent": 101.0}, "0 to 100"),
        ("slow-link", {"delay_ms": 1.0}, "which link"),
        ("fill-disk", {}, "which directory"),
        ("fill-disk", {"directory": "/", "size_bytes": 1, "leave_bytes": 1}, "either --size"),
        ("memory-hog", {}, "either --size"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_usage(name, wanted, why, root):
    with pytest.raises(UsageError, match=why):
        plan(name, root, **wanted)


@pytest.mark.parametrize(
    ("name", "wanted", "why"),
    [
        ("cut-link", {"interface": "eth7"}, "no interface eth7; there are ib0"),
        ("cut-link", {"interface": "ib0"}, "CAP_NET_ADMIN"),
        ("cut-link", {"peers": ("10.0.0.1",)}, "CAP_NET_ADMIN"),
        ("slow-link", {"interface": "ib0", "rate_mbit": 1.0}, "CAP_NET_ADMIN"),
        ("fill-disk", {"directory": "/", "size_bytes": 2**60}, "fewer than --size"),
        ("fill-disk", {"directory": "/no/such", "size_bytes": 1}, "cannot read /no/such"),
        ("memory-hog", {"leave_bytes": 1000}, "the kernel may kill any process"),
    ],
    ids=str,
)
def test_what_cannot_be_done_here_says_why(name, wanted, why, root):
    with pytest.raises(DrillError, match=why):
        plan(name, root, **wanted)


def test_delay_and_loss_go_through_netem_and_a_rate_alone_through_tbf():
    assert discipline(DrillOptions(delay_ms=100, loss_percent=1))[0] == "netem"
    assert "delay 100ms loss 1%" in " ".join(discipline(DrillOptions(delay_ms=100, loss_percent=1)))
    assert " ".join(discipline(DrillOptions(rate_mbit=8))).startswith("tbf rate 8mbit burst 16000b")


def test_the_room_to_take_is_a_size_or_what_leaves_a_size():
    assert size_to_take(100, size_bytes=30, leave_bytes=None) == 30
    assert size_to_take(100, size_bytes=None, leave_bytes=30) == 70
    with pytest.raises(DrillError, match="nothing to take"):
        size_to_take(100, size_bytes=None, leave_bytes=100)


def test_an_address_is_cut_off_alone():
    assert host_prefix("10.0.0.7") == "10.0.0.7/32"
    assert host_prefix("fd00::7") == "fd00::7/128"
    with pytest.raises(UsageError, match="not an IP address"):
        host_prefix("10.0.0.0/8")


def test_routes_are_read_so_that_they_can_be_given_back():
    text = "default via 10.0.0.1 proto dhcp metric 100 linkdown \n10.0.0.0/24 proto kernel dead\n"

    assert parse_routes(text) == (
        ("default", "via", "10.0.0.1", "proto", "dhcp", "metric", "100"),
        ("10.0.0.0/24", "proto", "kernel"),
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qdisc noqueue 0: root refcnt 2 \n", None),
        ("qdisc mq 0: root \nqdisc fq_codel 0: parent :1\n", None),
        ("qdisc tbf 8001: root refcnt 2 rate 1Mbit\n", "tbf"),
        ("", None),
    ],
    ids=["none", "the kernel's", "somebody's", "nothing"],
)
def test_only_what_somebody_set_is_a_discipline_of_its_own(text, name):
    assert parse_qdisc(text) == name


def test_what_undoes_crosses_to_the_keeper_and_nothing_else_does():
    for step in (SendSignal(Victim(5, 6, 0, "x"), "SIGCONT"), RunProgram(("ip", "link"))):
        assert from_json(to_json(step)) == step
    with pytest.raises(ValueError, match="undoes nothing"):
        to_json(TakeSpace("/", 1))


def test_the_same_seed_draws_the_same_faults():
    states = [published("n1", 2, 3), published("n0", 0, 1), published("spare")]

    def drawn(seed):
        dice = Random(seed)
        return [draw_fault(dice, RANDOM_DEFAULT, states) for _ in range(20)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    for name, wanted in drawn(3):
        low, high = HOLD_RANGE_S[name]
        assert low <= (wanted.for_s or 0) <= high
        assert wanted.node in {"n0", "n1"}
        assert wanted.rank in {"n0": {0, 1, None}, "n1": {2, 3, None}}[wanted.node]
    with pytest.raises(DrillError, match="nothing to break"):
        draw_fault(Random(1), RANDOM_DEFAULT, states[2:])
