"""Bytes that a process and its children move, by files and by connections."""

import os
import socket

import pytest
from support.movers import CHILD, READS, RECEIVES, told

from gpuops.host.process.traffic import TrafficKind, process_trees, read_traffic, tcp_bytes

FILES, RECEIVED, SENT = TrafficKind


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
    assert read_traffic([7], tmp_path) == {7: {(FILES, 7): 0}}
