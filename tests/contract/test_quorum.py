"""Agents make a quorum of real etcds, which outlives a member and the server that introduced it."""

import contextlib
import functools
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
from support.boards import RUN_KEY, TOKEN, eventually, server, tcp_board
from support.etcd import find_etcd
from support.ports import free_ports

from gpuops.control.etcd.formation import QuorumFormation, QuorumPlan
from gpuops.control.etcd.handle import announce
from gpuops.control.etcd.quorum import (
    QUORUM_KEY,
    Candidate,
    GatherLimits,
    QuorumPhase,
    QuorumState,
)
from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import RECORD_KEY
from gpuops.control.store import ControlStoreError, ControlStoreUnreachableError
from gpuops.control.tcp.process import start_server
from gpuops.host.clock import SystemClock
from gpuops.log import NOTICE_LOGGER


def children(module):
    """Return the processes of this test that run *module*."""
    found = psutil.Process().children()
    living = (child for child in found if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in living if module in child.cmdline()]


def members():
    """Return the processes that run this test's members."""
    return children("gpuops.control.etcd.member")


def left(handles):
    """End the agents of *handles*, but not their members."""
    for handle in handles:
        handle.close(is_last=False)
        handle.store.close()


def formation(board, node, limits, wait, **more):
    """Return the part of the agent on *node* in forming a quorum at *board*."""
    return QuorumFormation(
        server=board,
        plan=QuorumPlan(node=node, limits=limits),
        address="127.0.0.1",
        run_key=RUN_KEY,
        wait=wait,
        **{"token": TOKEN, "introduction": lambda: board, **more},
    )


@pytest.fixture
def introduce():
    """Return a function that forms a quorum of agents, each on its thread; ends what they left."""
    find_etcd()

    def form(port, n, token=TOKEN, **limits):
        limits = GatherLimits(**{"nodes_min": n, "nodes_max": n, **limits})
        introduction = functools.partial(tcp_board, port, deadline_s=2.0)

        def one(index):
            with contextlib.closing(introduction()) as board:
                wait, more = threading.Event().wait, {"token": token, "introduction": introduction}
                return formation(board, f"n{index}", limits, wait, **more).run()

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(one, range(n)))

    yield form
    for child in (*members(), *children("gpuops.control.tcp.serve")):
        child.kill()


def test_a_quorum_outlives_a_member_and_the_server(introduce):
    with server() as process:
        handles = introduce(process.port, 3)
        first, second, third = (handle.store for handle in handles)
        assert first.compare_and_set("control", b"1", version=0)[0]
        with contextlib.closing(tcp_board(process.port)) as board:
            assert QuorumState.from_bytes(board.get(QUORUM_KEY).value).phase is QuorumPhase.ON
        process.kill()
        os.kill(members()[0].pid, signal.SIGKILL)

        assert second.compare_and_set("control", b"2", version=1)[0]
        assert third.get("control").value == b"2"

        # Whoever has another token has another certificate authority.
        folder = handles[0].folder
        other = str(folder / "cacert.pem")
        plain = EtcdControlStore(
            f"{str(first.address).partition('?')[0]}?cacert={other}",
            run_key=RUN_KEY,
            deadline_s=1.0,
        )
        with contextlib.closing(plain), pytest.raises(ControlStoreError):
            plain.get("control")

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda handle: handle.close(is_last=False), handles))
        for handle in handles:
            handle.store.close()
        assert not folder.exists()


def test_a_member_has_the_certificates_of_its_agent(introduce, tmp_path, monkeypatch):
    """Each of them takes four processes to make."""
    calls, openssl = tmp_path / "calls", tmp_path / "openssl"
    openssl.write_text(f'#!/bin/sh\necho >> {calls}\nexec {shutil.which("openssl")} "$@"\n')
    openssl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with server() as process:
        left(introduce(process.port, 3))
    assert len(calls.read_text().splitlines()) == 3 * 4


def test_members_end_with_the_run(introduce):
    with server() as process:
        handles = introduce(process.port, 3)
        assert len(members()) == 3
        handles[1].store.put("k", b"v")
        handles[1].store.delete("")
        for index, handle in enumerate(handles):
            handle.store.close()
            handle.close(is_last=index == 2)
        eventually(lambda: not members(), "the members end")


def test_agents_that_were_started_again_introduce_later_ones(introduce):
    """Whose agent is killed, its etcd lives on; the new agent is a member no more."""
    with server() as process:
        left(introduce(process.port, 3))
        again = introduce(process.port, 3)
        process.kill()
        anew = start_server("127.0.0.1", process.port, run_key=RUN_KEY, token=TOKEN)
        try:
            with contextlib.closing(tcp_board(process.port)) as board:
                eventually(lambda: board.get(QUORUM_KEY).version, "they tell it of the quorum")
                found = QuorumState.from_bytes(board.get(QUORUM_KEY).value)
            assert found == again[0].state
            left(again)
        finally:
            anew.kill()


def test_a_new_round_ends_the_members_on_the_nodes_that_it_counts(introduce):
    """With those that were cut off they would be a majority again, and two runs would train."""
    with server() as process:
        handles = introduce(process.port, 3)
        left(handles[:2])
        handles[2].close(is_last=False)
        by_port = {
            int(it.cmdline()[it.cmdline().index("--client-port") + 1]): it for it in members()
        }
        by_node = {it.node: by_port[it.client_port] for it in handles[0].state.members}
        (cut_off,) = by_node["n2"].children()
        cut_off.suspend()
        by_node["n0"].kill()

        later = introduce(process.port, 2, nodes_max=3, first_call_s=0.0)
        assert all("only 2 of 3 nodes came" in why for why in later)

        cut_off.resume()
        with pytest.raises(ControlStoreUnreachableError):
            handles[2].store.put("k", b"v")
        handles[2].store.close()


def test_an_agent_that_is_cut_off_leaves_the_member_of_its_node_alone(introduce):
    """The run needs it after the cut."""
    with server() as process:
        handles = introduce(process.port, 3)
        left(handles)
        etcds = [child for member in members() for child in member.children()]
        for etcd in etcds:
            etcd.suspend()

        with ThreadPoolExecutor(1) as pool:
            alone = pool.submit(introduce, process.port, 1, nodes_max=3)
            with contextlib.closing(tcp_board(process.port)) as board:
                eventually(lambda: board.list("quorum/2/"), "a candidate of the next round")
            for etcd in etcds:
                etcd.resume()
            (found,) = alone.result()
        assert found.state == handles[0].state
        left([found])


def test_agents_without_etcd_do_not_wait_for_others(introduce, tmp_path, monkeypatch):
    (tmp_path / "openssl").symlink_to(shutil.which("openssl"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with server() as process:
        why = introduce(process.port, 2, nodes_max=3)
    assert all(each.startswith("etcd is not installed on n") for each in why)


def test_an_agent_that_takes_no_part_keeps_the_others_with_it(introduce):
    with server() as process, contextlib.closing(tcp_board(process.port)) as board:
        board.put(RECORD_KEY, b"{}")
        assert all("without a quorum" in why for why in introduce(process.port, 2, nodes_max=3))


def test_an_agent_that_waits_alone_says_once_who_has_come(caplog):
    find_etcd()
    caplog.set_level("INFO", NOTICE_LOGGER)
    board, now_s = MemoryControlStore(SystemClock()), [0.0]

    def wait(_seconds):
        now_s[0] += 5.0

    limits = GatherLimits(nodes_min=3, nodes_max=3)
    alone = formation(board, "n0", limits, wait, now_s=lambda: now_s[0])

    assert alone.run() == "only 1 of 3 nodes came within 600 s"
    (record,) = caplog.records
    assert record.getMessage().startswith("1 of at least 3 nodes came so far: n0; waiting for the")


def test_whoever_cannot_reach_the_members_begins_no_second_run():
    """They may train on the other side of a cut."""
    find_etcd()
    board, now_s = MemoryControlStore(SystemClock()), [0.0]
    gone = [
        Candidate(agent=f"m{i}", node=f"n{i}", address="127.0.0.1", client_port=port)
        for i, port in enumerate(free_ports(3))
    ]
    board.put(QUORUM_KEY, QuorumState(phase=QuorumPhase.ON, members=tuple(gone)).to_bytes())

    def come(node):
        def wait(_seconds):
            now_s[0] += 10.0

        limits = GatherLimits(nodes_min=1, nodes_max=4)
        more = {"now_s": lambda: now_s[0], "probe_timeout_s": 0.1}
        return formation(board, node, limits, wait, **more)

    spare, first, second = come("spare"), come("n0"), come("n1")
    spare.plan = replace(spare.plan, limits=replace(spare.plan.limits, join_timeout_s=15.0))
    with pytest.raises(ControlStoreUnreachableError, match="n0, n1, n2 hold the control record"):
        spare.run()
    assert QuorumState.from_bytes(board.get(QUORUM_KEY).value).number == 1
    assert board.list("quorum/2/") == {}

    # Where two of the three nodes see it so, the third has no majority alone.
    first.note_in("2")
    first.note_in("2-ended")
    assert "nodes came within" in second.run()
    first.close()


def test_a_server_that_was_started_anew_learns_of_the_quorum():
    board = MemoryControlStore(SystemClock())
    state = QuorumState(number=2, phase=QuorumPhase.ON)
    announce(board, state)
    assert QuorumState.from_bytes(board.get(QUORUM_KEY).value) == state

    # Agents that found no quorum gather there: those of the quorum tell them of it.
    anew = MemoryControlStore(SystemClock())
    anew.put(QUORUM_KEY, QuorumState().to_bytes())
    announce(anew, state)
    assert QuorumState.from_bytes(anew.get(QUORUM_KEY).value) == state

    later = QuorumState(number=3)
    board.put(QUORUM_KEY, later.to_bytes())
    announce(board, state)
    assert QuorumState.from_bytes(board.get(QUORUM_KEY).value) == later
