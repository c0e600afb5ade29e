"""The way to the board: in this process, at an endpoint, within a time."""

import contextlib
import re
import socket
import time
from dataclasses import replace

import pytest
from support.boards import RUN_KEY, TOKEN, server

from gpuops.agent.elastic.workers import free_port
from gpuops.agent.launch.endpoint import address_towards, meet
from gpuops.agent.launch.plan import EndpointKind, EndpointPlan
from gpuops.control.etcd.formation import QuorumPlan
from gpuops.control.etcd.quorum import GatherLimits
from gpuops.control.store import (
    ControlStoreError,
    ControlStoreUnreachableError,
)
from gpuops.control.tcp.process import start_server
from gpuops.control.tcp.server import RUN_OVER_KEY
from gpuops.errors import UsageError
from gpuops.host.clock import FakeClock

PRIVATE = EndpointPlan(kind=EndpointKind.PRIVATE, run_key="job")


def join(meeting, clock=None, waits=None, **options):
    clock = clock or FakeClock()

    def wait(seconds):
        clock.advance(seconds)
        if waits is not None:
            waits.append(seconds)

    fields = {"local_address": None, "limit_s": 10.0, "wait": wait}
    return meet(meeting, clock, **{**fields, **options})


def test_a_run_on_one_node_meets_nobody_and_opens_nothing():
    met = join(PRIVATE)

    assert (met.is_shared, met.guard, met.address) == (False, None, "127.0.0.1")
    met.store.put("key", b"1")
    assert met.store.get("key").value == b"1"
    assert join(PRIVATE, local_address="10.0.0.7").address == "10.0.0.7"


def test_two_private_runs_of_one_id_share_nothing():
    one, two = join(PRIVATE), join(PRIVATE)
    one.store.put("key", b"1")

    assert two.store.get("key").version == 0


def test_an_endpoint_that_nobody_serves_is_waited_for_and_then_given_up():
    meeting = EndpointPlan(
        kind=EndpointKind.TCP, run_key="job", host="127.0.0.1", port=free_port(), is_host=False
    )
    waits = []

    with pytest.raises(ControlStoreUnreachableError, match=str(meeting.port)):
        join(meeting, waits=waits, limit_s=3.0, deadline_s=0.05)
    assert 3 <= sum(waits) <= 4


def test_whoever_waits_may_end_the_wait():
    meeting = EndpointPlan(
        kind=EndpointKind.TCP, run_key="job", host="127.0.0.1", port=free_port(), is_host=False
    )

    with pytest.raises(ZeroDivisionError):
        join(meeting, wait=lambda _s: 1 // 0, deadline_s=0.05)


def tcp_meeting(port, *, is_host):
    return EndpointPlan(
        kind=EndpointKind.TCP,
        run_key=RUN_KEY,
        host="127.0.0.1",
        port=port,
        token=TOKEN,
        is_host=is_host,
    )


def test_the_host_of_a_requeued_job_waits_for_the_board_of_the_run_before(caplog):
    with server(run_key="before") as before:
        met = join(tcp_meeting(before.port, is_host=True), wait=lambda _s: before.kill())

    try:
        assert met.guard is not None
        assert met.store.get("control").version == 0
        (told,) = (line.getMessage() for line in caplog.records if line.levelname == "WARNING")
        assert re.search("waiting for .* another run", told)
    finally:
        met.store.put(RUN_OVER_KEY, b"0")
        met.store.close()
        met.guard.close()


def test_who_joins_a_requeued_job_waits_for_the_board_of_this_run():
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(server(run_key="before"))
        port = before.port

        def wait(_seconds):
            before.kill()
            ours = start_server("127.0.0.1", port, run_key=RUN_KEY, token=TOKEN)
            stack.callback(ours.kill)

        met = join(tcp_meeting(port, is_host=False), wait=wait)
        stack.callback(met.store.close)

        assert met.guard is None
        assert met.store.get("control").version == 0


def test_a_port_that_some_other_service_has_is_refused():
    """One that answers nothing, so it could still be the board of a run that ends."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(ControlStoreError, match=rf"taken.*127\.0\.0\.1:{port}") as got:
            join(tcp_meeting(port, is_host=True), predecessor_s=0.0)

    assert not isinstance(got.value, ControlStoreUnreachableError)


@pytest.mark.parametrize("is_host", [True, False], ids=["host", "joins"])
def test_a_run_that_stays_is_refused_after_a_while(is_host):
    waits = []
    with (
        server(run_key="other") as other,
        pytest.raises(ControlStoreError, match="to another run") as got,
    ):
        join(tcp_meeting(other.port, is_host=is_host), waits=waits, predecessor_s=1.0)

    assert not isinstance(got.value, ControlStoreUnreachableError)
    assert sum(waits) == 1.0


def test_another_token_than_that_of_the_user_is_refused_at_once(tmp_path):
    waits = []
    with (
        server(token="another token") as other,
        pytest.raises(UsageError, match=rf"another token.*{tmp_path}/token, .*=\$\(openssl rand"),
    ):
        join(
            replace(tcp_meeting(other.port, is_host=False), own_token=tmp_path / "token"),
            waits=waits,
        )

    assert waits == []


def test_a_job_with_a_new_token_waits_for_the_end_of_its_run_before():
    """As a requeued batch script does that makes a token each time."""
    waits = []
    with server(token="of the run before") as before:
        meeting = tcp_meeting(before.port, is_host=False)
        with pytest.raises(UsageError, match=r"another token.*GPUOPS_TOKEN or --token-file gives"):
            join(meeting, waits=waits, predecessor_s=1.0)
    assert sum(waits) == 1.0

    with server(token="of the run before") as before:
        met = join(tcp_meeting(before.port, is_host=True), wait=lambda _s: before.kill())
    try:
        assert met.store.get("control").version == 0
    finally:
        met.store.put(RUN_OVER_KEY, b"0")
        met.store.close()
        met.guard.close()


@pytest.mark.parametrize("is_host", [True, False], ids=["same host", "another host"])
def test_of_the_agents_of_a_run_only_the_holder_of_its_record_says_that_it_holds_it(
    caplog, is_host
):
    caplog.set_level("INFO")
    port = free_port()
    limits = GatherLimits(nodes_min=2, nodes_max=2)
    with contextlib.ExitStack() as ends:
        for name, is_local in (("n0", True), ("n1", is_host)):
            plan = QuorumPlan(node=name, limits=limits)
            met = join(tcp_meeting(port, is_host=is_local), quorum=plan, wait=time.sleep)
            if met.guard is not None:
                ends.callback(met.guard.close)
            ends.callback(met.store.close)
        met.store.put(RUN_OVER_KEY, b"0")

    said = [line for line in caplog.messages if "is lost" in line]
    line = "the run ends if node n0, which holds the control store, is lost: two nodes have no "
    assert said == [f"{line}majority without one of them"]


def test_what_is_told_of_a_board_holds_no_secret():
    meeting = EndpointPlan(
        kind=EndpointKind.POSTGRES,
        run_key="job",
        host="db",
        port=5432,
        url="postgresql+psycopg://app:hunter2@db/x",
        token="sesame",
    )
    told = join(PRIVATE).describe(meeting)

    assert told["run_key"] == "job"
    assert "hunter2" not in str(told)
    assert "sesame" not in str(told)
    assert "hunter2" not in repr(meeting)


def test_towards_loopback_this_node_is_loopback():
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert address_towards("no such host", 9) == "127.0.0.1"
