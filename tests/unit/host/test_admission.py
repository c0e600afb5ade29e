"""Places for connections that have not proved the job's token: strangers keep nobody out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.host.net.admission import AdmissionLimits, ConnectionAdmission, plain_address

KNOWN = "10.0.0.1"


def admission(connections_max=6, unknown_max=4, per_address_max=2):
    found = ConnectionAdmission(
        AdmissionLimits(
            connections_max=connections_max,
            unknown_max=unknown_max,
            per_address_max=per_address_max,
        )
    )
    found.set_known([KNOWN, "10.0.0.2"])
    return found


def test_the_oldest_of_an_address_gives_way():
    places = admission()
    assert [places.admit(name, "192.0.2.1") for name in "abc"] == [[], [], ["a"]]
    assert places.admit("d", "192.0.2.2") == []
    assert not places.authenticate("a")
    assert places.authenticate("b")


def test_the_oldest_stranger_gives_way_and_no_node_of_the_job():
    places = admission()
    assert places.admit("node", KNOWN) == []
    for n, name in enumerate("abcd"):
        assert places.admit(name, f"192.0.2.{n}") == []
    assert places.admit("e", "192.0.2.9") == ["a"]
    assert places.admit("other node", "10.0.0.2") == []
    # All six places are taken.
    assert places.admit("again", KNOWN) == ["b"]
    assert places.authenticate("node")


def test_who_has_named_the_job_gives_way_last():
    places = admission()
    for n, name in enumerate("abcd"):
        assert places.admit(name, f"192.0.2.{n // 2}") == []
    places.refresh("a")
    assert places.admit("e", "192.0.2.0") == ["b"]
    assert places.admit("f", "192.0.2.9") == ["c"]
    places.refresh("b")  # is gone
    assert places.authenticate("a")


def test_a_connection_with_proof_is_never_cut_off():
    places = admission()
    for name in "abcdef":
        assert places.admit(name, KNOWN) == []
        assert places.authenticate(name)
    assert places.admit("stranger", "192.0.2.1") is None
    assert places.admit("node", KNOWN) is None
    places.remove("c")
    assert places.admit("stranger", "192.0.2.1") == []
    assert places.admit("node", KNOWN) == ["stranger"]
    # A stranger does not take the place of a node that is about to prove the token.
    assert places.admit("stranger", "192.0.2.1") is None


def test_a_new_roster_takes_the_place_of_the_last_and_a_proof_adds_its_address():
    places = admission()
    places.set_known(["10.0.0.3"])
    assert not places.is_known(KNOWN)
    places.add_known(KNOWN)
    assert places.is_known(KNOWN)
    for n in range(10):
        places.add_known(f"10.0.1.{n}")
    assert not places.is_known(KNOWN)


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:DB8::0:1", "2001:db8::1"),
        ("", ""),
        ("node7", "node7"),
    ],
)
def test_addresses_are_compared_in_one_spelling(spelled, plain):
    assert plain_address(spelled) == plain


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "authenticate", "remove"]),
            st.sampled_from([KNOWN, "10.0.0.2", "192.0.2.1", "192.0.2.2", "192.0.2.3"]),
            st.integers(0, 20),
        ),
        max_size=80,
    )
)
def test_no_limit_is_ever_exceeded_and_no_proof_is_lost(calls):
    places, names = admission(), itertools.count()
    waiting, proved = {}, set()
    for what, address, number in calls:
        if what == "admit":
            name = next(names)
            cut_off = places.admit(name, address)
            if cut_off is None:
                continue
            for other in cut_off:
                del waiting[other]
            waiting[name] = address
        elif what == "authenticate":
            assert places.authenticate(number) == (number in waiting)
            if waiting.pop(number, None):
                proved.add(number)
        else:
            places.remove(number)
            waiting.pop(number, None)
            proved.discard(number)
        assert len(places) == len(waiting) + len(proved) <= 6
        assert places.n_waiting == len(waiting)
        assert sum(address.startswith("192") for address in waiting.values()) <= 4
        assert all(list(waiting.values()).count(address) <= 2 for address in waiting.values())
