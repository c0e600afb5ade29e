"""Which nodes hold the control record, and when that is decided."""

import os
from dataclasses import replace

import pytest

from gpuops.agent.launch.option_values import parse_conf
from gpuops.control.etcd.credentials import private_key
from gpuops.control.etcd.folders import locked_folder
from gpuops.control.etcd.quorum import (
    QUORUM_KEY,
    SETTLE_S,
    Candidate,
    GatherLimits,
    QuorumPhase,
    QuorumState,
    after_gathering,
    choose_members,
    may_begin_anew,
    reason_against,
)
from gpuops.control.store import ControlStoreError


def candidates(*domains):
    return [
        Candidate(
            agent=f"m{index}",
            node=f"n{index}",
            address="10.0.0.1",
            client_port=1,
            peer_port=2,
            domain=tuple(domain.split("/")) if domain else (),
        )
        for index, domain in enumerate(domains)
    ]


@pytest.mark.parametrize(
    ("domains", "chosen"),
    [
        (["", ""], []),
        ([""] * 4, ["n0", "n1", "n2"]),
        ([""] * 7, ["n0", "n1", "n2", "n3", "n4"]),
        (["a", "a", "a", "b"], ["n0", "n3", "n1"]),
        (["r/a", "r/a", "r/b", "s/c"], ["n0", "n3", "n2"]),
    ],
)
def test_members_are_spread_over_failure_domains(domains, chosen):
    assert [member.node for member in choose_members(candidates(*domains))] == chosen


def gathered(*able, nodes="2:4", quiet_s=0.0, waited_s=0.0, can_call=True):
    """Return what follows once so many nodes have come, each *able* to start an etcd or not."""
    low, _, high = nodes.partition(":")
    found = [
        replace(candidate, client_port=int(is_able), can_call=can_call)
        for candidate, is_able in zip(candidates(*[""] * len(able)), able, strict=True)
    ]
    limits = GatherLimits(nodes_min=int(low), nodes_max=int(high or low))
    return after_gathering(QuorumState(), found, limits, quiet_s=quiet_s, waited_s=waited_s)


def test_members_start_once_all_nodes_are_there_or_no_more_come():
    assert gathered(1, 1, 1) is None
    assert gathered(1, 1, 1, 1).phase is QuorumPhase.START
    assert gathered(1, 1, 1, quiet_s=SETTLE_S).phase is QuorumPhase.START
    assert gathered(1, 1, 1, 0, nodes="4").phase is QuorumPhase.START


def test_a_run_of_fixed_size_waits_for_its_nodes_as_long_as_without_a_quorum():
    limits = GatherLimits(nodes_min=4, nodes_max=4)
    assert gathered(1, 1, nodes="4", quiet_s=60, waited_s=limits.join_timeout_s - 1) is None
    assert gathered(1, 1, nodes="4", waited_s=600).why == "only 2 of 4 nodes came within 600 s"


def test_a_run_of_a_range_waits_for_a_third_node_as_long_as_it_waits_for_its_start():
    assert gathered(1, nodes="1:4", quiet_s=29, waited_s=29) is None
    assert gathered(1, nodes="1:4", waited_s=30).why == "only 1 of 4 nodes came within 30 s"


def test_what_no_further_node_can_change_is_decided_at_once():
    assert gathered(0, nodes="3").why == "etcd is not installed on n0; 3 of 3 nodes need it"
    assert gathered(0, 1, nodes="4") is None
    why = "etcd is not installed on n0, n2; 3 of 4 nodes need it"
    assert gathered(0, 1, 0, nodes="4").why == why
    many = gathered(*[0] * 6, nodes="8")
    assert many.why.startswith("etcd is not installed on n0, n1, n2, n3 and 2 more; ")
    assert gathered(1, can_call=False).why == "openssl is not installed on n0"


@pytest.mark.parametrize(
    ("n_members", "here", "may"),
    [
        (3, "", False),
        (3, "n0", False),
        (3, "n0 n1", True),
        (5, "n0 n1", False),
        (5, "n2 n3 n4", True),
    ],
)
def test_members_that_may_be_a_majority_elsewhere_keep_their_run(n_members, here, may):
    members = candidates(*[""] * n_members)
    state = QuorumState(phase=QuorumPhase.ON, members=tuple(members))
    found = [member for member in members if member.node in here.split()]
    stranger = Candidate(agent="m", node="n9", address="10.0.0.1")

    assert may_begin_anew(state, [*found, stranger]) is may


def test_a_state_is_read_as_it_was_written():
    state = QuorumState(number=3, phase=QuorumPhase.ON, members=tuple(candidates("a/b", "")))

    assert QuorumState.from_bytes(state.to_bytes()) == state
    assert state.cluster == "m0=https://10.0.0.1:2,m1=https://10.0.0.1:2"
    for bad in (b"", b"[]", b'{"number": 1}'):
        with pytest.raises(ControlStoreError, match=QUORUM_KEY):
            QuorumState.from_bytes(bad)


def test_what_a_killed_process_left_is_removed(tmp_path):
    left, fd = locked_folder("etcd-", tmp_path)
    (left / "data").mkdir()
    used, _mark = locked_folder("etcd-", tmp_path)
    assert left.exists()
    os.close(fd)  # as the end of the process does
    other = tmp_path / "other-1"
    other.mkdir()

    new, _mark = locked_folder("etcd-", tmp_path)

    assert sorted(tmp_path.iterdir()) == sorted([new, used, other])
    assert new.stat().st_mode & 0o77 == 0


def test_a_key_follows_from_the_token_alone():
    assert private_key("a") == private_key("a") != private_key("b")


@pytest.mark.parametrize(
    ("nodes", "is_refused"), [(2, True), (3, False), (256, False), (257, True)]
)
def test_runs_that_have_none(nodes, is_refused):
    assert bool(reason_against(nodes)) == is_refused


@pytest.mark.parametrize(("conf", "wanted"), [("quorum=1", True), ("quorum=0", False), ("", None)])
def test_it_can_be_asked_for_and_turned_off(conf, wanted):
    assert parse_conf(conf).quorum is wanted
