"""Bytes that a process and its children move, by files and by connections."""

import os
import socket
import time

import pytest
from support.movers import CHILD, READS, READS_IN_A_THREAD, RECEIVES, SENDS, told

from gpuops.host.process.traffic import (
    Connection,
    TcpEnd,
    TrafficKind,
    leads_to_rank,
    process_trees,
    read_traffic,
    tcp_bytes,
)

FILES, MAIN, RECEIVED, SENT, TICKS, FROM_RANK = TrafficKind


def by_kind(traffic):
    """Return the bytes of the files, and of the busiest connection each way."""
    found = {kind: [n for (each, _), n in traffic.items() if each is kind] for kind in TrafficKind}
    return sum(found[FILES]), max(found[RECEIVED], default=0), max(found[SENT], default=0)


def test_what_is_read_from_a_file_counts():
    with told(READS) as (pid, tell):
        before = by_kind(read_traffic([pid])[pid])
        tell(300_000)
        now = by_kind(read_traffic([pid])[pid])

    assert 300_000 <= now[0] - before[0] < 400_000


def test_a_child_of_a_rank_is_seen_with_it():
    with told(CHILD) as (pid, _):
        trees = process_trees([pid, os.getpid()])

    assert trees[pid][0] == pid
    assert len(trees[pid]) == 2
    assert set(trees[pid]) < set(trees[os.getpid()])


def test_what_is_received_on_a_connection_counts_though_proc_io_does_not_show_it():
    if not tcp_bytes():
        pytest.skip("no sock_diag in this kernel or sandbox")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        told(RECEIVES, server.getsockname()[1]) as (pid, tell),
        server.accept()[0] as near,
    ):
        before = by_kind(read_traffic([pid])[pid])
        near.sendall(bytes(50_000))
        tell(50_000)
        now = by_kind(read_traffic([pid])[pid])
        ours = by_kind(read_traffic([os.getpid()])[os.getpid()])

    assert now[1] - before[1] == 50_000
    assert now[0] - before[0] < 10_000
    assert ours[2] >= 50_000


def test_a_process_that_is_gone_has_moved_nothing(tmp_path):
    assert by_kind(read_traffic([2**22 + 1])[2**22 + 1]) == (0, 0, 0)
    assert read_traffic([7], tmp_path) == {7: {(FILES, 7): 0, (MAIN, 7): 0, (TICKS, 7): 0}}


@pytest.mark.parametrize(("text", "least"), [(READS, 300_000), (READS_IN_A_THREAD, 0)])
def test_what_the_main_thread_reads_is_counted_apart(text, least):
    with told(text) as (pid, tell):
        before = read_traffic([pid])[pid]
        tell(300_000)
        now = read_traffic([pid])[pid]

    assert now[FILES, pid] - before[FILES, pid] >= 300_000
    assert least <= now[MAIN, pid] - before[MAIN, pid] < least + 100_000


def test_processor_time_is_counted():
    before = read_traffic([os.getpid()])[os.getpid()]
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:
        pass
    now = read_traffic([os.getpid()])[os.getpid()]

    assert now[TICKS, os.getpid()] - before[TICKS, os.getpid()] >= 0.05 * os.sysconf("SC_CLK_TCK")


def from_rank(traffic):
    return max((n for (kind, _), n in traffic.items() if kind is FROM_RANK), default=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_what_comes_from_another_rank_of_the_job_is_counted_apart(tmp_path, host):
    if not tcp_bytes():
        pytest.skip("no sock_diag in this kernel or sandbox")
    with (
        told(SENDS, tmp_path / "port") as (sender, send),
        told(RECEIVES, (tmp_path / "port").read_text(), host) as (pid, tell),
    ):
        send(50_000)
        tell(50_000)
        job, alone = read_traffic([pid, sender]), read_traffic([pid])

    assert from_rank(job[pid]) == 50_000
    assert from_rank(job[sender]) == 0
    assert from_rank(alone[pid]) == 0, "not of a program here that is no rank"


def connection(near, far):
    return Connection(1, 1, TcpEnd(*near), TcpEnd(*far))


def test_on_other_hosts_a_service_is_no_rank():
    here, there = b"\x0a\0\0\1", b"\x0a\0\0\2"

    assert leads_to_rank(connection((here, 40_000), (there, 50_000)), 1, {})
    assert not leads_to_rank(connection((here, 40_000), (there, 443)), 1, {})
    assert not leads_to_rank(connection((here, 40_000), (here, 50_000)), 1, {})
