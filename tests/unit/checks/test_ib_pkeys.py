"""The verdicts on the partition keys of InfiniBand ports."""

from dataclasses import replace

import pytest
from support.checks import CASE, said

from gpuops.checks.core.check import NoParameters
from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation, TextExpectation
from gpuops.checks.nic.ib_pkeys import CHECK, judge
from gpuops.host.infiniband import PkeyTable, PkeyTables

BAD = "network.port_down"
DEFAULT, OURS = 0x7FFF, 0x8001


def port(n, *keys, **changes):
    read = PkeyTable(
        device=f"mlx5_{n}",
        number=1,
        guid=f"guid{n}",
        is_active=True,
        keys=keys,
        is_complete=True,
    )
    return replace(read, **changes)


def case(*keys, count=None):
    profile = replace(
        NO_PROFILE,
        ib_pkeys=TextExpectation(value=keys, source="order 7") if keys else None,
        nic_count=None if count is None else NumberExpectation(value=count, source="order 7"),
    )
    return replace(CASE, profile=profile)


def findings(*ports, profiled=CASE):
    return judge(PkeyTables(ports), NoParameters(), profiled)


@pytest.mark.parametrize(
    ("expected", "held", "status"),
    [
        ("0x8001", (DEFAULT, 0x8001), "pass"),
        ("0x8001", (DEFAULT, 0x0001), "fail"),
        ("0x8001", (DEFAULT,), "fail"),
        ("0x8001", (), "fail"),
        ("0x0001", (0x0001,), "pass"),
        ("0x0001", (0x8001,), "pass"),
        ("0x1", (0x8001,), "pass"),
        ("0x0001", (0x8002,), "fail"),
        ("0xffff", (0xFFFF,), "pass"),
        ("0xFFFF", (0x7FFF,), "fail"),
        ("0x7fff", (0xFFFF,), "pass"),
    ],
)
def test_a_full_member_is_a_limited_one_and_not_the_other_way_round(expected, held, status):
    (finding,) = findings(port(0, *held), profiled=case(expected))

    bad = ("guid0", "fail", BAD)
    assert said([finding]) == [bad if status == "fail" else ("n1", "pass", None)]


def test_every_key_of_the_profile_is_needed():
    profiled = case("0x8001", "0x8002")

    assert said(findings(port(0, 0x8001, 0x8002), profiled=profiled))[0][1] == "pass"
    assert said(findings(port(0, 0x8001), profiled=profiled))[0][1] == "fail"


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ((DEFAULT,), "mlx5_0/1 lacks the P_Key 0x8001 (its P_Keys: 0x7fff)"),
        ((), "mlx5_0/1 lacks the P_Key 0x8001 (its P_Keys: none)"),
        (
            (DEFAULT, 0x0001),
            "mlx5_0/1 is only a limited member of 0x8001 (its P_Keys: 0x7fff, 0x0001)",
        ),
    ],
)
def test_a_failure_says_what_is_there_and_may_be_that_of_many_nodes(held, text):
    (finding,) = findings(port(0, *held), profiled=case("0x8001"))

    assert (finding.message, finding.source) == (text, "order 7")
    assert (finding.shared_cause, finding.hardware_reported) == (True, False)


def test_without_a_count_one_port_of_several_only_warns():
    verdicts = said(findings(port(0, OURS), port(1, DEFAULT), profiled=case("0x8001")))

    assert verdicts == [("guid1", "warn", BAD)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, ("n1", "pass", None)), (2, ("guid1", "fail", BAD)), (9, ("guid1", "fail", BAD))],
)
def test_the_profile_counts_how_many_adapters_need_it(count, expected):
    profiled = case("0x8001", count=count)

    assert said(findings(port(0, OURS), port(1, DEFAULT), profiled=profiled)) == [expected]


@pytest.mark.parametrize(
    "unknown", [port(2, is_active=False), port(2, is_complete=False), port(2, 1, is_complete=False)]
)
def test_an_adapter_that_does_not_tell_convicts_no_other_one(unknown):
    profiled = case("0x8001", count=2)
    verdicts = said(findings(port(0, OURS), port(1, DEFAULT), unknown, profiled=profiled))

    assert ("guid1", "warn", BAD) in verdicts
    assert "fail" not in {status for _, status, _ in verdicts}


def test_a_table_that_was_not_read_to_its_end_lacks_nothing():
    (finding,) = findings(port(0, DEFAULT, is_complete=False), profiled=case("0x8001"))

    assert said([finding]) == [("guid0", "skip", None)]
    assert finding.message == "mlx5_0/1: its P_Key table cannot be read"


@pytest.mark.parametrize("key", [DEFAULT, 0xFFFF, 0x8001, 0x0001])
def test_without_expected_keys_any_partition_will_do(key):
    (finding,) = findings(port(0, key, is_complete=False))

    assert said([finding]) == [("n1", "pass", None)]
    assert finding.message == f"1 InfiniBand ports hold the P_Key {key:#06x}"


def test_without_expected_keys_a_port_in_no_partition_warns():
    assert said(findings(port(0, DEFAULT), port(1))) == [("guid1", "warn", BAD)]
    assert said(findings(port(0, DEFAULT), port(1, is_complete=False))) == [
        ("n1", "pass", None),
        ("guid1", "skip", None),
    ]


def test_nodes_without_infiniband_and_ports_without_a_link_are_skipped():
    assert said(findings(profiled=case("0x8001", count=8))) == [("n1", "skip", None)]
    (finding,) = findings(port(0, is_active=False), profiled=case("0x8001", count=8))
    assert finding.message == "no InfiniBand port is active; see ib_ports"


def test_the_reader_is_told_which_keys_to_look_for():
    assert CHECK.inputs(NoParameters(), case("0x8001").profile) == ("0x8001",)
    assert CHECK.inputs(NoParameters(), NO_PROFILE) == ()
