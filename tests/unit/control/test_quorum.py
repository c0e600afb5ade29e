"""Which nodes hold the control record, and when that is decided."""

import os

import pytest

from gpuops.agent.launch.option_values import parse_conf
from gpuops.agent.launch.quorum import reason_against
from gpuops.control.etcd.credentials import private_key
from gpuops.control.etcd.folders import locked_folder
from gpuops.control.etcd.quorum import (
    QUORUM_KEY,
    SETTLE_S,
    Candidate,
    QuorumPhase,
    QuorumState,
    after_gathering,
    choose_members,
)
from gpuops.control.store import ControlStoreError


def candidates(*domains, able=True):
    return [
        Candidate(
            agent=f"m{index}",
            node=f"n{index}",
            address="10.0.0.1",
            client_port=1 if able else 0,
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


def gathered(n, *, quiet_s=0.0, able=True):
    found = candidates(*[""] * n, able=able)
    return after_gathering(QuorumState(), found, nodes_min=2, nodes_max=4, quiet_s=quiet_s)


def test_it_is_decided_once_all_are_there_or_no_more_come():
    assert gathered(1, quiet_s=100.0) is None
    assert gathered(3) is None
    assert gathered(4).phase is gathered(3, quiet_s=SETTLE_S).phase is QuorumPhase.START
    alone = gathered(2, quiet_s=SETTLE_S)
    assert (alone.phase, alone.why) == (
        QuorumPhase.OFF,
        "2 nodes have no majority without one of them",
    )
    assert "installed on 0 of 4 nodes" in gathered(4, able=False).why


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
    assert (reason_against(nodes) is not None) == is_refused


def test_it_is_asked_for():
    assert parse_conf("quorum=1").quorum is True
    assert parse_conf("").quorum is None
