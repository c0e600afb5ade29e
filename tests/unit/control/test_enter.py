"""Entering a run and leaving it: who begins, who joins, what a killed run leaves behind."""

import json
import random
from dataclasses import replace
from uuid import UUID

import pytest

from gpuops.control.join import RunIsOverError, join, leave
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import (
    RECORD_KEY,
    SENT_KEY,
    ControlKeys,
    ControlRecord,
    Member,
    RunPhase,
    pack,
)
from gpuops.control.tcp.server import RUN_OVER_KEY
from gpuops.control.tcp.server_connection import REFUSED_PREFIX
from gpuops.errors import EXIT_USAGE, UsageError
from gpuops.host.clock import SystemClock

CLOCK = SystemClock()


def uid(number):
    return str(UUID(int=number))


def agent(number, node=None):
    return Member(agent=uid(number), node=node or f"n{number}", address="10.0.0.1", n_workers=1)


def record(number, **changes):
    fresh = ControlRecord(
        run_id=uid(number),
        folder="f",
        generation=0,
        phase=RunPhase.RENDEZVOUS,
        since_s=0.0,
        fingerprint="a",
    )
    return replace(fresh, **changes)


@pytest.fixture
def board():
    return MemoryControlStore(CLOCK)


def never(_seconds):
    raise AssertionError("nobody is waited for")


def quiet(_seconds):
    return None


def come(board, member, fresh, wait=never):
    return join(board, member, fresh, CLOCK, wait)


def beats(board, view, member, sent_ns=None):
    """Return a wait in which a heartbeat of *member* arrives, sent in it or at *sent_ns*."""
    key = ControlKeys(run_id=view.record.run_id).heartbeat(member.agent)

    def wait(_seconds):
        board.put(key, pack({"seq": 1, SENT_KEY: CLOCK.mono_ns() if sent_ns is None else sent_ns}))

    return wait


def end(board, view):
    stopped = replace(view.record, phase=RunPhase.STOP, exit_code=0)
    assert board.compare_and_set(RECORD_KEY, stopped.to_bytes(), version=view.version)[0]
    return stopped


def test_the_first_begins_the_run_and_the_others_join_it(board):
    assert come(board, agent(1), record(1)).record.run_id == uid(1)
    assert come(board, agent(2), record(2)).record.run_id == uid(1)


def test_another_job_under_the_same_key_is_refused(board):
    view = come(board, agent(1), record(1))

    with pytest.raises(UsageError, match="another job"):
        come(board, agent(2), record(2, fingerprint="b"), beats(board, view, agent(1)))

    (note,) = board.list(REFUSED_PREFIX).values()
    assert note.value.startswith(b"an agent on node n2 (10.0.0.1) was refused: another job")
    come(board, agent(3), record(3, fingerprint="b"), quiet)  # a new run
    assert not board.list(REFUSED_PREFIX)


@pytest.mark.parametrize("phase", [RunPhase.RUN, RunPhase.STOP])
def test_what_another_job_left_when_it_was_killed_is_replaced(board, phase):
    come(board, agent(1), record(1, phase=phase))

    view = come(board, agent(2), record(2, fingerprint="b"), quiet)

    assert view.record.run_id == uid(2)
    assert [*board.list("")] == [RECORD_KEY, *board.list(f"{ControlKeys(run_id=uid(2)).prefix}/")]


def test_of_two_that_find_a_killed_run_one_replaces_it(board):
    end(board, come(board, agent(1), record(1)))
    views = []

    def meanwhile(_seconds):
        views.append(come(board, agent(2), record(2), quiet))

    views.append(come(board, agent(3), record(3), meanwhile))

    assert [view.record.run_id for view in views] == [uid(2), uid(2)]
    assert len(board.list(ControlKeys(run_id=uid(2)).agent())) == 2


def test_who_comes_while_a_run_is_ending_hears_how_it_ended(board):
    view = come(board, agent(1), record(1))
    end(board, view)

    with pytest.raises(RunIsOverError):
        come(board, agent(2), record(2), beats(board, view, agent(1)))


def test_a_run_whose_last_agent_leaves_while_one_waits_makes_room(board):
    view = come(board, agent(1), record(1))
    stopped = end(board, view)

    def goes(_seconds):
        leave(board, stopped, agent(1), has_server=False)

    assert come(board, agent(2), record(2), goes).record.run_id == uid(2)


def test_nothing_remains_after_the_last_agent_of_a_run(board):
    view = come(board, agent(1), record(1))
    come(board, agent(2), record(2))
    stopped = end(board, view)

    leave(board, stopped, agent(1), has_server=False)
    assert RECORD_KEY in board.list("")
    leave(board, stopped, agent(2), has_server=False)

    assert board.list("") == {}


def test_a_dead_agent_is_not_waited_for_to_clean_up(board):
    view = come(board, agent(1), record(1))
    come(board, agent(2), record(2))
    stopped = end(board, view)

    leave(board, stopped, agent(1), has_server=False, dead=[uid(2)])

    assert board.list("") == {}


def test_a_server_is_told_of_the_end_and_of_the_next_run(board):
    view = come(board, agent(1), record(1))
    stopped = end(board, view)

    leave(board, stopped, agent(1), has_server=True)
    assert board.get(RUN_OVER_KEY).value == b"1"

    come(board, agent(2), record(2))
    assert board.get(RUN_OVER_KEY).version == 0


def test_a_server_ends_at_the_word_of_the_last_agent_even_if_another_speaks_later(board):
    view = come(board, agent(1), record(1))
    come(board, agent(2), record(2))
    stopped = end(board, view)

    class Slow:
        """The board as an agent sees it that is overtaken after its look at who is left."""

        put, compare_and_set, delete = board.put, board.compare_and_set, board.delete

        def list(self, prefix):
            found = board.list(prefix)
            leave(board, stopped, agent(2), has_server=True)
            return found

    leave(Slow(), stopped, agent(1), has_server=True)

    assert board.get(RUN_OVER_KEY).value == b"1"


def test_a_killed_agent_of_the_same_node_whose_heartbeat_is_gone_is_not_waited_for(board):
    view = come(board, agent(1), record(1))
    board.delete(ControlKeys(run_id=view.record.run_id).heartbeat(uid(1)))

    again = replace(agent(2), node=agent(1).node)
    assert come(board, again, record(2), never).record.run_id == uid(1)


def test_an_agent_that_is_known_has_a_heartbeat(board):
    """Two that start on one node at the same moment: the second one sees that the first lives."""
    seen = []

    class Watched:
        get, list, delete = board.get, board.list, board.delete
        compare_and_set, heartbeat = board.compare_and_set, board.heartbeat

        def put(self, key, value):
            seen.append((key, board.list(key.replace("/agent/", "/alive/"))))
            board.put(key, value)

    come(Watched(), agent(1), record(1))

    ((key, alive),) = seen
    assert key.endswith(f"/agent/{uid(1)}")
    assert alive


def test_an_agent_of_the_same_node_that_lives_is_not_joined(board):
    view = come(board, agent(1), record(1))

    with pytest.raises(UsageError, match="one agent for each node"):
        come(board, agent(2, node="n1"), record(2), beats(board, view, agent(1)))


def test_late_heartbeats_of_an_agent_that_was_cut_off_do_not_keep_its_successor_out(board):
    """Members of etcd pass on what they were sent during the cut once they reach each other."""
    view = come(board, agent(1), record(1))

    again = replace(agent(2), node=agent(1).node)
    late = beats(board, view, agent(1), sent_ns=CLOCK.mono_ns())

    assert come(board, again, record(2), late).record.run_id == uid(1)


def test_the_clock_of_another_host_says_nothing(board):
    view = come(board, replace(agent(1), address="10.0.0.2"), record(1))
    alive = beats(board, view, agent(1), sent_ns=0)

    with pytest.raises(UsageError, match="one agent for each node"):
        come(board, agent(2, node="n1"), record(2), alive)


def test_two_versions_of_gpuops_end_a_run_that_has_not_trained_and_name_both_nodes(board):
    ours = come(board, agent(1), record(1, gpuops_version="1.2.0", made_by="n1"))

    with pytest.raises(UsageError) as refused:
        come(board, agent(2), record(2, gpuops_version="1.3.0"), beats(board, ours, agent(1)))

    assert str(refused.value) == (
        "node n2 has gpuops 1.3.0, and node n1 has gpuops 1.2.0: all nodes of a run need the same "
        "version; install it on all of them"
    )
    seen = ControlRecord.from_bytes(board.get(RECORD_KEY).value)
    assert (seen.run_id, seen.phase, seen.exit_code) == (uid(1), RunPhase.STOP, EXIT_USAGE)
    assert seen.reason == str(refused.value)


def test_a_record_in_an_unknown_form_is_another_version_and_no_error_of_gpuops(board):
    body = json.loads(record(1, gpuops_version="9.0", made_by="n1").to_bytes())
    board.put(RECORD_KEY, json.dumps({**body, "v": 9, "phase": "anew"}).encode())
    key = ControlKeys(run_id=uid(1)).heartbeat(uid(1))

    with pytest.raises(UsageError, match=r"node n2 has gpuops .*, and node n1 has gpuops 9\.0"):
        come(board, agent(2), record(2), lambda _s: board.put(key, b"beat"))


# A store takes it compressed.
MANY_EXCLUDED = {f"n{n}": random.Random(n).randbytes(280).hex() for n in range(200)}


def test_an_agent_joins_a_run_whose_record_has_become_long(board):
    first = come(board, agent(1), record(1, excluded=MANY_EXCLUDED))
    assert not board.get(RECORD_KEY).value.startswith(b"{"), "it is not long enough"

    assert come(board, agent(2), record(2)).record == first.record


def test_a_long_record_of_another_version_is_ended_too(board):
    long = record(1, gpuops_version="1.2.0", made_by="n1", excluded=MANY_EXCLUDED)
    ours = come(board, agent(1), long)

    with pytest.raises(UsageError, match=r"node n1 has gpuops 1\.2\.0"):
        come(board, agent(2), record(2, gpuops_version="1.3.0"), beats(board, ours, agent(1)))

    seen = ControlRecord.from_bytes(board.get(RECORD_KEY).value)
    assert (seen.run_id, seen.phase, seen.exit_code) == (uid(1), RunPhase.STOP, EXIT_USAGE)


def test_a_run_that_trains_goes_on_without_a_node_of_another_version(board):
    ours = come(board, agent(1), record(1, gpuops_version="1.2.0", made_by="n1"))
    trains = replace(ours.record, phase=RunPhase.RUN).to_bytes()
    board.put(RECORD_KEY, trains)

    with pytest.raises(UsageError, match=r"gpuops 1\.3\.0"):
        come(board, agent(2), record(2, gpuops_version="1.3.0"), beats(board, ours, agent(1)))

    assert board.get(RECORD_KEY).value == trains


def test_a_run_of_another_version_whose_agents_are_dead_is_replaced(board):
    come(board, agent(1), record(1, gpuops_version="1.2.0", made_by="n1"))

    view = come(board, agent(2), record(2, gpuops_version="1.3.0"), quiet)

    assert view.record.run_id == uid(2)
    assert not board.list(ControlKeys(run_id=uid(1)).prefix)
