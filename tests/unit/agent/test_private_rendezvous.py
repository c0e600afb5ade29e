"""A rendezvous with nobody: no socket, nothing left over between generations."""

import os
import socket

import psutil
import pytest

pytestmark = pytest.mark.torch


@pytest.fixture
def rendezvous():
    from gpuops.agent.private_rendezvous import PrivateRendezvous

    return PrivateRendezvous("job", "127.0.0.1")


def test_each_generation_is_rank_0_of_1_with_an_empty_store_and_a_free_port(rendezvous):
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    first.store.set("key", "of the dead")

    assert (second.rank, second.world_size) == (0, 1)
    assert not second.store.check(["key"])
    assert second.bootstrap_store_info.master_addr == "127.0.0.1"
    with socket.socket() as server:
        server.bind(("", second.bootstrap_store_info.master_port))


def test_nothing_is_opened(rendezvous):
    rendezvous.next_rendezvous()

    assert psutil.Process(os.getpid()).net_connections("tcp") == []


def test_nobody_waits_and_the_workers_get_no_store_of_the_agents(rendezvous):
    assert rendezvous.num_nodes_waiting() == 0
    assert rendezvous.use_agent_store is False
    assert rendezvous.get_run_id() == "job"
    assert rendezvous.get_backend() == "private"


@pytest.mark.parametrize("how", ["set_closed", "shutdown"])
def test_once_closed_it_stays_closed(rendezvous, how):
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    assert not rendezvous.is_closed()
    getattr(rendezvous, how)()

    assert rendezvous.is_closed()
    with pytest.raises(RendezvousClosedError):
        rendezvous.next_rendezvous()
