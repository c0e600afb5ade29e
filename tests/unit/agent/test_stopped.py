"""Workers that somebody stopped are told from those that are busy."""

import os
import signal
import subprocess
import sys

from support.runs import wait_until

from gpuops.agent.monitors.rank_state import StoppedRanks, state_of

S = 1_000_000_000


def test_a_rank_counts_from_the_first_look_that_found_it_stopped():
    ranks = StoppedRanks()
    for second in range(6):
        ranks.update({0: "T", 1: "S"}, second * S)

    assert ranks.longer_than(5, 5 * S) == {0: 5.0}
    assert ranks.longer_than(6, 5 * S) == {}


def test_one_that_goes_on_in_between_starts_anew():
    ranks = StoppedRanks()
    for second, state in enumerate("TTTSTT"):
        ranks.update({0: state}, second * S)

    assert ranks.longer_than(2, 5 * S) == {}
    assert ranks.longer_than(1, 5 * S) == {0: 1.0}


def test_an_agent_that_was_stopped_itself_blames_nobody_for_that_time():
    ranks = StoppedRanks()
    ranks.update({0: "T"}, 0)
    ranks.update({0: "T"}, 100 * S)

    assert ranks.longer_than(1, 100 * S) == {}


def test_a_debugger_is_left_alone_and_a_gone_process_is_none():
    ranks = StoppedRanks()
    ranks.update({0: "t", 1: None}, 0)

    assert ranks.longer_than(0, 10 * S) == {}


def test_looks_are_a_second_apart():
    ranks = StoppedRanks()
    assert ranks.is_due(0)
    ranks.update({}, 0)

    assert not ranks.is_due(S // 2)
    assert ranks.is_due(S)


def test_the_state_of_a_real_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(child.pid) == "T", what="state T")
    finally:
        child.kill()
        child.wait()
    assert state_of(child.pid) is None
