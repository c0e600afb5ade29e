"""What an agent tells of its workers: with each heartbeat, to whoever asks, in the run's folder."""

from support.supervised import Agent

from gpuops.agent.status.published import PublishedSnapshot, busy_for_s, progress_of, state_of
from gpuops.control.record import pack
from gpuops.control.store import Entry
from gpuops.wire.ring import Beat, StepSource, WorkerPhase

BOARD = {"kind": "private", "host": "", "port": 0, "run_key": "job", "endpoint": ""}


def beats(agent, **steps):
    """Let ranks step, one step a second."""
    for rank, last in steps.items():
        times = range(1, last + 1)
        mine = [
            Beat(
                n,
                n,
                agent.clock.mono_ns() + n * 10**9,
                WorkerPhase.STEPPING,
                StepSource.REPORTED,
                n,
            )
            for n in times
        ]
        by_rank = {int(rank[1:]): mine}
        agent.session.journal.beats(by_rank)
        agent.known.step_tracker.feed(by_rank)


def trained(tmp_path, **steps):
    agent = Agent(tmp_path)
    agent.attempt(agent.take_seats())
    agent.known = agent.parts
    beats(agent, **steps)
    agent.clock.advance(max(steps.values(), default=0))
    return agent


def test_before_there_are_workers_there_is_nothing_to_tell(tmp_path):
    agent = Agent(tmp_path)

    assert progress_of(agent.parts) == {}


def test_the_slowest_rank_tells_how_far_a_node_is(tmp_path):
    agent = trained(tmp_path, r0=7, r1=5)
    told = progress_of(agent.known)

    assert (told["ranks"], told["first_rank"], told["step"]) == (2, 0, 5)
    assert (told["rate"], told["step_seconds"]) == (1.0, 1.0)
    assert told["silent_s"] == 0.0
    agent.clock.advance(4)
    assert progress_of(agent.known)["silent_s"] == 4.0


def test_steps_that_are_only_counted_are_told_as_that(tmp_path):
    agent = trained(tmp_path)
    for rank, count in ((0, 7), (1, 6)):
        beat = Beat(count, -1, 1, WorkerPhase.STEPPING, StepSource.COUNTED, count, "", count)
        agent.session.journal.beats({rank: [beat]})
    told = progress_of(agent.known)

    assert (told["step"], told["steps_counted"]) == (None, 6)


def test_workers_without_a_step_have_no_rate(tmp_path):
    agent = trained(tmp_path)
    told = progress_of(agent.known)

    assert (told["step"], told["rate"], told["silent_s"]) == (None, None, None)


def test_the_busiest_of_the_others_counts_and_what_cannot_be_read_or_is_old_does_not():
    told = {
        "r/alive/me": Entry(pack({"generation": 4, "busy_for_s": 900}), 1),
        "r/alive/a": Entry(pack({"generation": 4, "busy_for_s": 3.5}), 1),
        "r/alive/b": Entry(pack({"generation": 4, "busy_for_s": 40}), 1),
        "r/alive/c": Entry(pack({"generation": 4, "busy_for_s": "long"}), 1),
        "r/alive/d": Entry(b"\xff", 1),
        "r/alive/e": Entry(pack({}), 1),
        "r/alive/killed": Entry(pack({"generation": 3, "busy_for_s": 590}), 1),
    }

    assert busy_for_s(told, "me", 4) == 40
    assert busy_for_s({}, "me", 4) == 0


def test_the_state_names_workers_and_where_to_ask(tmp_path):
    agent = trained(tmp_path, r0=3)
    snapshot = PublishedSnapshot(agent.known, BOARD)
    snapshot.http_port = 4711
    state = state_of(agent.known, snapshot, "running")

    assert state["pids"] == {"0": 4000, "1": 4001}
    assert (state["node"], state["phase"], state["generation"]) == ("n1", "running", 0)
    assert state["ring_dir"].endswith("generation-0")
    taken = snapshot.take()
    assert [(rank.rank, rank.step, rank.phase) for rank in taken.ranks] == [
        (0, 3, "stepping"),
        (1, None, "starting"),
    ]
    assert (taken.phase, taken.generation, taken.http_port) == ("run", 0, 4711)
    assert (taken.group_rank, taken.world_size) == (0, 2)
    assert taken.restarts_max == 3


def test_the_time_of_a_phase_is_when_it_was_first_seen(tmp_path):
    agent = trained(tmp_path)
    snapshot = PublishedSnapshot(agent.known, BOARD)
    first = snapshot.take().phase_ns
    agent.clock.advance(30)

    assert snapshot.take().phase_ns == first
