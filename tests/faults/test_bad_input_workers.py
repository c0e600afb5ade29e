"""Workers that misbehave otherwise: helpers that they leave, output without end, an early end."""

from contextlib import suppress

import psutil
import pytest
from support.faulty import FaultyRun
from support.runs import is_alive, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
MIB = 2**20


def daemons(folder):
    """Return the daemons that workers of the run in *folder* started, by their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.environ().get("JOB_DIR") == str(folder)
            if is_ours and "time.sleep(600)" in str(process.cmdline()):
                found.append(process)
    return found


def test_daemons_of_a_failed_generation_are_ended_before_the_next(tmp_path):
    """They left the worker's group and session: they would hold its ports and its GPU's memory."""
    words = ("daemon", "--rank", 1, "--at", 3, "--generation", 0, "--steps", 100, "--pause", 0.1)
    with FaultyRun(tmp_path, (), words) as run:
        run.start()
        run.wait_for_generation(1)
        assert daemons(run.job) == []


def test_output_without_end_costs_neither_memory_nor_the_run(tmp_path):
    """As fast as two ranks can write: the agent keeps next to none of it."""
    words = ("shout", "--at", 3, "--steps", 40, "--pause", 0.1, "--alone")
    with FaultyRun(tmp_path, (), words) as run:
        run.start()
        agent = psutil.Process(run.agents[0].process.pid)
        run.wait_for_step(2)
        before = peak = agent.memory_info().rss

        def has_shouted():
            nonlocal peak
            peak = max(peak, agent.memory_info().rss)
            return sum(line.what == "shouted" for line in run.lines()) == 2

        run.wait(has_shouted, "the end of the noise")
        assert run.ended() == 0, run.said()[-2000:]

    written = sum(line.number for line in run.lines() if line.what == "shouted")
    assert written >= 400 * MIB
    assert peak - before < 100 * MIB
    assert run.generations() == [0]


def test_a_rank_that_is_done_early_ends_nothing_where_nobody_needs_it(tmp_path):
    with FaultyRun(tmp_path, (), ("leave", "--rank", 1, "--at", 3, "--alone")) as run:
        run.start()
        assert run.ended() == 0, run.said()

    assert run.generations() == [0]
    assert max(line.number for line in run.lines()) == 20
    assert run.incidents() == []


@pytest.mark.soak
def test_an_agent_that_is_started_again_by_hand_rejoins(tmp_path):
    """Two agents on one machine; one is killed with SIGKILL in the middle."""
    words = ("none", "--steps", 300, "--pause", 0.1)
    flags = ("--grow-after", "1")
    with FaultyRun(tmp_path, flags, words, n_nodes=2, nproc=1) as run:
        run.start()
        run.wait_for_step(3)
        orphan = run.state(run.hosts[1])["pids"].values()
        run.agents[1].process.kill()
        run.agents[1].process.wait(30)
        wait_until(lambda: not any(map(is_alive, orphan)), 20, "the end of its worker")
        run.start(run.hosts[1])
        run.wait(lambda: {x.rank for x in run.lines() if x.generation > 0} == {0, 1}, "its return")
        last = run.lines()[-1]
        run.wait_for_step(last.number + 5, last.generation)

    assert "node.lost" in run.rules()
