"""Eight nodes are lost at once, a rack or all that would lead: the others go on within 30 s.

The agents are simulated on a fake clock; the control stores are real.
"""

import pytest
from support.agreement import World
from support.boards import memory_boards, postgres_boards, tcp_boards

from gpuops.control.membership import N_STANDBYS, succession_of
from gpuops.incident.decision import RestartPolicy

N_NODES = 24
KINDS = ["memory", "tcp", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=KINDS)
def boards(request):
    if request.param == "postgres":
        new = postgres_boards(request.getfixturevalue("postgres_url"))
    else:
        new = memory_boards() if request.param == "memory" else tcp_boards()
    with new as opened:
        yield opened


@pytest.mark.parametrize("which", ["rack", "standbys"])
def test_the_others_go_on_within_30_s(boards, which):
    policy = RestartPolicy(nodes_min=1, nodes_max=N_NODES, restarts_max=9)
    world = World(policy, N_NODES, new_handle=boards.open, first_call_s=0.0)
    world.run_until(lambda w: w.all_run(0, N_NODES))
    world.pass_time(5)
    by_agent = {player.me.agent: player for player in world.players}
    order = succession_of(world.players[0].leader.roster.members)
    lost = world.players[:8] if which == "rack" else [by_agent[a] for a in order[:N_STANDBYS]]
    for player in lost:
        player.is_dead = True
        player.stop()

    def goes_on(w):
        return {p.running for p in w.players if not p.is_dead} == {1}

    assert world.run_until(goes_on, limit_s=120.0) < 30.0


def test_who_leads_next_knows_it_as_soon_as_workers_run_though_it_came_late():
    """By order of arrival it is too far back to watch the others."""
    policy = RestartPolicy(nodes_min=1, nodes_max=N_NODES, restarts_max=9)
    world = World(policy, 0, first_call_s=0.0)
    for number in range(N_NODES):
        # Once the first eight ranks are lost rank 9 leads, which comes as the eighteenth.
        world.players.append(world.player(number, order=(number - 8) % N_NODES))
    world.run_until(lambda w: w.all_run(0, N_NODES))
    assert world.players[17].rank == 9
    for player in world.players[8:16]:
        assert player.rank < 8
        player.is_killed()

    def goes_on(w):
        return {p.running for p in w.players if not p.is_dead} == {1}

    assert world.run_until(goes_on) < 8.0
