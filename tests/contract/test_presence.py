"""An agent whose connections are closed by its end is gone for the others, and for nobody else."""

import contextlib

import pytest
from support.boards import RUN_KEY, TOKEN, eventually, server

from gpuops.control.etcd.presence import QuorumControlStore
from gpuops.control.store import CLOSED_FENCE_S, ControlStoreUnreachableError


@pytest.fixture
def run_key(request):
    """Return a key of this test's own, in an etcd for all."""
    return f"{RUN_KEY}/{request.node.name}"


@pytest.fixture
def members(run_key):
    """Three servers, as three members start them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server(run_key=run_key)) for _ in range(3)]


@pytest.fixture
def join(members, etcd_url, run_key):
    """Return a function that opens the store of one agent."""
    with contextlib.ExitStack() as stack:

        def one(deadline_s=20.0):
            store = QuorumControlStore(
                etcd_url,
                servers=[("127.0.0.1", member.port) for member in members],
                run_key=run_key,
                token=TOKEN,
                deadline_s=deadline_s,
            )
            return stack.enter_context(contextlib.closing(store))

        yield one


def beat(store, agent):
    store.heartbeat(f"run/alive/{agent}", b"1", watch="control", seen_version=0, hold_s=0.0)


def alive(store):
    return {key.rpartition("/")[2] for key in store.list("run/alive/")}


def test_an_agent_that_ended_has_no_heartbeat_and_one_that_is_silent_keeps_it(join):
    first, second, silent = join(), join(), join()
    for agent, store in (("a", first), ("b", second), ("c", silent)):
        beat(store, agent)
    eventually(lambda: alive(first) == {"a", "b", "c"}, "all are seen")
    eventually(lambda: all(len(m._present) == 3 for m in first._members), "by all members")

    second.close()

    eventually(lambda: alive(first) == {"a", "c"}, "its connections were closed")
    assert first.get("run/alive/b").version == 0
    assert first.get("run/alive/c").version == 1  # no heartbeat more, and not closed
    assert first.disconnected_s() == silent.disconnected_s() == 0.0


def test_an_agent_bears_the_loss_of_one_member_and_ends_its_workers_without_two(join, members):
    first, second = join(), join()
    beat(first, "a")
    beat(second, "b")
    eventually(lambda: all(member.is_connected for member in first._members), "all members")
    eventually(lambda: alive(first) == {"a", "b"}, "both are seen")

    members[0].kill()
    eventually(lambda: first._members[0].disconnected_s() > CLOSED_FENCE_S, "it was closed")
    assert first.disconnected_s() == 0.0
    assert alive(first) == {"a", "b"}

    members[1].kill()
    eventually(lambda: first.disconnected_s() > CLOSED_FENCE_S, "a majority was closed")


def test_nobody_is_alive_in_etcd_who_is_not_connected_to_a_majority(join, members):
    members[0].kill()
    members[1].kill()
    store = join(deadline_s=1.0)
    with pytest.raises(ControlStoreUnreachableError, match="majority"):
        beat(store, "a")
    assert join().get("run/alive/a").version == 0
