"""An agent's way to a seat, over real records and without any process."""

import socket

import pytest
from support.supervised import Agent

from gpuops.control.record import RunPhase
from gpuops.incident.decision import RestartPolicy

pytestmark = pytest.mark.torch


class Hooks:
    """What the agent does meanwhile: lets time pass; it is healthy."""

    def __init__(self, agent):
        self.agent = agent

    def gate(self):
        from gpuops.agent.elastic.rendezvous import Preflight

        return Preflight(passed=True)

    def excluded(self, reason):
        raise AssertionError(reason)

    def waiting(self, record):
        self.agent.waiting(record)


def seats(agent):
    from gpuops.agent.elastic.rendezvous import ControlRendezvous

    return ControlRendezvous(agent.control, "job", Hooks(agent), pick_port=lambda: 1234)


def test_an_agent_alone_is_rank_0_of_1_with_an_empty_store_and_its_own_port(tmp_path):
    agent = Agent(tmp_path)
    mine = seats(agent)
    found = mine.next_rendezvous()

    assert (found.rank, found.world_size) == (0, 1)
    assert not found.store.check(["anything"])
    assert found.bootstrap_store_info.master_addr == "127.0.0.1"
    assert found.bootstrap_store_info.master_port == 1234
    assert mine.assignment.group_rank == 0
    assert agent.control.record.phase is RunPhase.RUN


def test_the_port_that_is_offered_is_free():
    from gpuops.agent.elastic.workers import free_port

    with socket.socket() as server:
        server.bind(("", free_port()))


def test_nobody_waits_and_the_workers_get_no_store_of_the_agents(tmp_path):
    mine = seats(Agent(tmp_path))

    assert mine.num_nodes_waiting() == 0
    assert mine.use_agent_store is False
    assert (mine.get_run_id(), mine.get_backend()) == ("job", "gpuops")
    assert mine.shutdown() is True
    mine.set_closed()
    assert not mine.is_closed(), "an agent's own trouble closes nobody else's run"


def test_a_generation_that_it_had_a_part_in_is_not_joined_again(tmp_path):
    agent = Agent(tmp_path)
    mine = seats(agent)
    mine.next_rendezvous()
    agent.while_waiting = [lambda: None] * 3 + [lambda: restart(agent)]
    mine.next_rendezvous()

    assert mine.assignment.record.generation == 1


def change(agent, **changes):
    from dataclasses import replace

    agent.control.update_record(lambda now: replace(now, **changes))


def restart(agent):
    change(agent, phase=RunPhase.RENDEZVOUS, generation=agent.control.record.generation + 1)


def test_a_word_that_does_not_reach_the_board_is_said_again(tmp_path):
    agent = Agent(tmp_path)
    agent.store.is_cut = True
    agent.while_waiting = [lambda: None, lambda: setattr(agent.store, "is_cut", False)]

    assert seats(agent).next_rendezvous().rank == 0


def test_the_hooks_may_end_the_wait(tmp_path):
    agent = Agent(tmp_path, terms=RestartPolicy(nodes_min=2, nodes_max=2))
    agent.while_waiting = [lambda: None, lambda: 1 // 0]

    with pytest.raises(ZeroDivisionError):
        seats(agent).next_rendezvous()


def test_a_spare_waits_until_there_is_a_hole(tmp_path, monkeypatch):
    # The time between two polls of the record: nothing changes while it passes.
    monkeypatch.setattr("gpuops.agent.elastic.rendezvous.LOOK_S", 0.01)
    one = Agent(tmp_path, terms=RestartPolicy(nodes_min=1, nodes_max=1))
    spare = Agent(tmp_path, terms=one.restart_policy, board=one.shared, clock=one.clock, number=2)
    one.take_seats()
    restarted = []

    def others_turn():
        one.run_once()
        if spare.control.record.generation == 0 and not restarted:
            restarted.append(1)
            change(one, phase=RunPhase.RENDEZVOUS, generation=1, excluded={"n1": "sick"})

    spare.while_waiting = [others_turn] * 100
    mine = seats(spare)
    mine.next_rendezvous()

    assert mine.assignment.record.generation == 1
    assert [member.node for member in mine.assignment.roster.members] == ["n2"]
