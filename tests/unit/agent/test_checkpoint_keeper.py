"""A keeper that is started, adopted, listened to, lost and ended; training never waits long."""

import threading
import time

import pytest
from support.keepers import FakeKeeper, Heard
from support.runs import wait_until

from gpuops.agent.checkpoint.api import CheckpointService, FinalFlush
from gpuops.agent.checkpoint.keeper_supervisor import KeeperSupervisor, KeeperTimeouts
from gpuops.agent.checkpoint.messages import CommitRecord, FinalCommitRecord
from gpuops.checkpoint.types import KeeperError, StateId
from gpuops.host.clock import FakeClock
from gpuops.units import NS_PER_S

NEVER_S = 3600.0


class Bench:
    """A keeping without its thread, the keepers that it starts, and what is recorded."""

    def __init__(self, *keepers, **options):
        self.keepers = list(keepers) or [FakeKeeper()]
        self.starts = 0
        self.heard = Heard()
        self.clock = FakeClock()
        self.released = []
        times = KeeperTimeouts(every_s=NEVER_S, ready_s=5.0, poll_s=60.0)
        options = {"times": times, **options}
        self.keeping = KeeperSupervisor(
            self.start, self.heard, self.clock, release=self.released.append, **options
        )

    @property
    def keeper(self):
        return self.keepers[self.starts - 1]

    def start(self):
        self.starts += 1
        if self.starts > len(self.keepers):
            raise KeeperError("no memory")
        return self.keeper.started()


@pytest.fixture
def bench():
    return Bench()


def test_the_workers_are_told_where_the_keeper_is_and_it_is_told_of_them(bench):
    keeping = Bench(directory="/ckpt").keeping
    assert keeping.env() == {"GPUOPS_KEEPER": "", "GPUOPS_CKPT_DIR": "/ckpt"}

    keeping.begin(0, 1, None)
    bench.keeping.begin(3, 1, 40)

    assert keeping.env() == {"GPUOPS_KEEPER": "/run/keeper.sock", "GPUOPS_CKPT_DIR": "/ckpt"}
    assert bench.keeper.begun == [(3, 1, 40)]
    assert bench.keeping.env() == {"GPUOPS_KEEPER": "/run/keeper.sock"}
    assert bench.starts == 1


def test_the_workers_are_told_that_there_is_a_state_which_they_map_ahead(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(7)
    bench.keeping.run_once()
    told = {"GPUOPS_KEEPER": "/run/keeper.sock", "GPUOPS_HAS_STATE": "1"}
    assert bench.keeping.env() == told

    bench.keeping.begin(1, 1, None)

    assert bench.keeping.env() == told


def test_ranks_of_several_nodes_are_not_led_to_a_keeper_that_knows_only_its_own(bench):
    bench.keeping.begin(0, 2, None)
    assert bench.keeping.env() == {"GPUOPS_KEEPER": ""}

    bench.keeping.begin(1, 1, None)

    assert bench.keeping.env() == {"GPUOPS_KEEPER": "/run/keeper.sock"}
    assert bench.keeper.begun == [(0, 2, None), (1, 1, None)]


def test_one_that_is_open_is_started_at_once_and_heard_by_itself():
    bench = Bench(times=KeeperTimeouts(every_s=0.01, ready_s=5.0))
    bench.keeping.open()
    wait_until(lambda: bench.starts, what="the start")

    bench.keepers[0].commit(5)

    wait_until(lambda: bench.heard.states, what="the news")
    assert (bench.keeping.state().step, bench.starts) == (5, 1)
    bench.keeping.end(0)
    assert bench.keepers[0].has_ended
    assert bench.released == [True]


def test_what_is_held_is_known_with_its_age(bench):
    bench.keeping.begin(0, 1, None)
    assert bench.keeping.state().step is None
    bench.keeper.commit(7, epoch=2)
    bench.keeper.persisted = StateId(2, 4)
    bench.keeper.skipped = {"in_flight": 3}
    bench.keeping.poll()
    since_ns = bench.clock.mono_ns()
    bench.clock.advance(10)
    bench.keeping.poll()

    state = bench.keeping.state()

    assert (state.step, state.epoch, state.tier, state.persisted_step) == (7, 2, "memory", 4)
    assert (state.committed, state.skipped, state.is_alive) == (1, {"in_flight": 3}, True)
    assert state.since_ns == since_ns
    bench.keeper.commit(7, epoch=3)  # the same step again, after a restart
    bench.keeping.poll()
    assert bench.keeping.state().since_ns == bench.clock.mono_ns()


def test_only_what_this_generation_saved_is_new(bench):
    bench.keepers[0].commit(5)
    bench.keeping.begin(0, 1, None)
    assert bench.heard.states == [(5, False)]
    bench.keeper.commit(6)
    bench.keeping.poll()
    bench.keeping.poll()
    bench.keeping.begin(1, 1, None)
    bench.keeper.commit(6, epoch=1)
    bench.keeping.poll()

    assert bench.heard.states == [(5, False), (6, True), (6, True)]


def test_an_adopted_keeper_says_what_it_holds():
    keeper = FakeKeeper()
    keeper.commit(41)
    heard = Heard()
    keeping = KeeperSupervisor(lambda: keeper.started(adopted=True), heard, FakeClock())
    keeping.begin(0, 1, None)

    assert heard.adopted == [(True, StateId(0, 41))]
    assert (keeping.state().step, keeping.state().tier) == (41, "memory")


def test_a_keeper_that_dies_is_on_record_once_and_replaced_before_the_next_generation():
    first, second = FakeKeeper(), FakeKeeper()
    bench = Bench(first, second)
    bench.keeping.begin(0, 1, None)
    first.commit(9)
    bench.keeping.poll()
    first.kill()
    for _ in range(3):
        bench.keeping.poll()

    assert len(bench.heard.failures) == 1
    assert bench.heard.failures[0][1] == "the keeper does not answer"
    state = bench.keeping.state()
    assert (state.is_alive, state.step, state.committed) == (False, None, 1)
    assert bench.keeping.env() == {"GPUOPS_KEEPER": ""}
    assert first.clients[0].is_closed

    bench.keeping.begin(1, 1, None)

    assert second.begun == [(1, 1, None)]
    assert bench.keeping.env() == {"GPUOPS_KEEPER": "/run/keeper.sock"}
    assert bench.keeping.state().is_alive


def test_what_a_keeper_told_before_it_failed_in_the_same_look_is_on_record(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(9)
    client = bench.keeper.clients[0]
    client.status = lambda: client.close() or client.events()
    bench.keeping.poll()

    assert [(event.kind, event.state) for event in bench.heard.events] == [
        ("committed", StateId(0, 9))
    ]
    assert bench.heard.failures == [
        ("polling the keeper of the checkpoints", "the keeper does not answer")
    ]


def test_a_keeper_that_dies_under_its_workers_is_followed_by_one_that_takes_over():
    first, second = FakeKeeper(), FakeKeeper()
    bench = Bench(first, second)
    bench.keeping.begin(4, 1, 40)
    first.epoch = 2
    first.commit(9, epoch=2)
    bench.keeping.run_once()
    first.kill()
    bench.keeping.run_once()

    assert second.begun == [(4, 1, 40)]
    assert second.taken_over == [2]
    assert bench.heard.lost == [None, StateId(2, 9)]
    assert bench.keeping.env() == {"GPUOPS_KEEPER": "/run/keeper.sock"}
    second.epoch = 2
    second.commit(10, epoch=2)
    bench.keeping.run_once()
    assert bench.heard.states == [(9, True), (10, True)]


@pytest.mark.parametrize("is_noticed", [False, True])
def test_what_was_lost_with_a_keeper_is_on_record_if_its_successor_begins_a_generation(is_noticed):
    first, second = FakeKeeper(), FakeKeeper()
    bench = Bench(first, second)
    bench.keeping.begin(0, 1, None)
    first.commit(9)
    bench.keeping.run_once()
    first.kill()
    if is_noticed:  # while the workers end
        bench.keeping.poll()
    bench.keeping.begin(1, 1, None)

    assert second.begun == [(1, 1, None)]
    assert bench.heard.lost == [None, StateId(0, 9)]


def test_while_ranks_may_still_ask_what_to_load_another_keeper_begins_as_the_first_did():
    first, second = FakeKeeper(), FakeKeeper()
    first.commit(5)  # of a former generation
    bench = Bench(first, second)
    bench.keeping.begin(1, 1, None)
    first.epoch = 1
    bench.keeping.run_once()
    first.kill()
    bench.keeping.run_once()

    assert (second.begun, second.taken_over) == ([(1, 1, None)], [])


def test_keepers_that_die_again_and_again_are_given_up_for_a_while():
    bench = Bench(*(FakeKeeper() for _ in range(9)))
    bench.keeping.begin(0, 1, None)
    found = []
    for _ in range(700):
        bench.keeper.kill()
        bench.keeping.run_once()
        if bench.keeping.state().is_alive:
            found.append(round(bench.clock.mono_ns() / NS_PER_S))
        bench.clock.advance(1.0)

    start = found[0]
    assert [at - start for at in found[:4]] == [0, 11, 72, 600]  # seen a second later
    bench.keeping.begin(1, 1, None)  # a new generation has one whatever was
    assert bench.keeping.state().is_alive


def test_a_keeper_that_only_took_its_time_goes_on_where_it_was():
    keeper = FakeKeeper()
    heard, is_adopted = Heard(), iter([False, True])
    clock = FakeClock()
    keeping = KeeperSupervisor(lambda: keeper.started(adopted=next(is_adopted)), heard, clock)
    keeping.begin(0, 1, None)
    keeper.commit(3)
    keeping.run_once()
    keeper.clients[0].close()  # as a line is closed on which no answer came
    keeping.run_once()

    assert keeper.begun == [(0, 1, None)]
    assert keeping.state().step == 3
    assert keeping.state().is_alive


def test_who_looks_does_not_wait_for_a_keeper_that_does_not_answer():
    bench = Bench(times=KeeperTimeouts(every_s=NEVER_S, ready_s=5.0))
    bench.keeping.open()
    wait_until(lambda: bench.heard.adopted, what="the start")
    bench.keeper.commit(5)
    bench.keeping.run_once()
    assert bench.keeping.state().step == 5
    bench.keeper.answers.clear()
    bench.keeper.commit(6)
    began_s = time.monotonic()
    bench.keeping.poll()
    assert time.monotonic() - began_s < 20.0  # it would be given up after 30
    assert bench.keeping.state().step == 5
    bench.keeper.answers.set()
    wait_until(lambda: bench.keeping.state().step == 6, what="the answer")
    bench.keeping.end(0)


def test_one_that_dies_unnoticed_is_replaced_in_the_same_breath():
    first, second = FakeKeeper(), FakeKeeper()
    bench = Bench(first, second)
    bench.keeping.begin(0, 1, None)
    first.kill()

    bench.keeping.begin(1, 1, None)

    assert (first.begun, second.begun) == ([(0, 1, None)], [(1, 1, None)])
    assert len(bench.heard.failures) == 1


def test_a_keeper_that_cannot_be_started_stops_nobody_and_is_tried_again():
    bench = Bench(FakeKeeper())
    bench.keepers[0].kill()
    bench.keepers.append(FakeKeeper())
    bench.keeping.begin(0, 1, None)

    assert bench.keepers[1].begun == [(0, 1, None)]
    assert len(bench.heard.failures) == 1

    alone = Bench(FakeKeeper())
    alone.keepers[0].kill()
    alone.keeping.begin(0, 1, None)
    assert alone.keeping.env() == {"GPUOPS_KEEPER": ""}
    assert alone.heard.failures[-1] == ("starting the keeper of the checkpoints", "no memory")


def test_our_own_bug_is_recorded_and_goes_no_further(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.clients[0].events = lambda: 1 / 0
    bench.keeping.poll()

    assert [what for what, _ in bench.heard.failures] == ["polling the keeper"]


def test_a_flush_says_whether_the_newest_state_fitted(bench):
    bench.keeping.begin(0, 1, None)
    assert bench.keeping.flush(5.0) is None  # nothing was ever committed
    bench.keeper.commit(12)
    bench.keeping.poll()

    fitted = bench.keeping.flush(5.0)
    bench.keeper.commit(13)
    bench.keeper.flush_s = 60.0
    missed = bench.keeping.flush(5.0)

    assert (fitted.fitted, fitted.state.step, fitted.within_s) == (True, 12, 5.0)
    assert (missed.fitted, missed.state.step, missed.newest.step) == (False, 12, 13)
    assert bench.heard.flushes == [fitted, missed]
    assert bench.keeping.state().persisted_step == 12


def test_a_flush_says_that_it_waits_for_other_nodes(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.others_s = 65.0
    bench.keeping.flush(5.0)

    assert bench.heard.waits == [65.0]


def test_a_state_that_nobody_had_heard_of_is_flushed_as_well(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(12)

    assert bench.keeping.flush(5.0).state.step == 12


def test_the_only_state_that_is_still_hashed_when_the_run_ends_is_persisted(bench):
    bench.keeping.begin(0, 1, None)
    client = bench.keeper.clients[0]
    flush = client.flush
    client.flush = lambda *within: bench.keeper.commit(12) or flush(*within)
    bench.keeping.end(5.0)

    assert bench.keeper.persisted == StateId(0, 12)
    assert [done.state.step for done in bench.heard.flushes] == [12]


class Agreement:
    """The agreement with other nodes, which comes about after a few polls of the control store."""

    is_on, directory, is_waiting = True, "/ckpt", False
    trouble = missed = ""
    is_over, last = False, None

    def __init__(self, keeper):
        self.keeper = keeper
        self.left, self.persisted, self.must_persist = 3, None, False
        self.is_saving = False

    has_committed = False
    is_uncommitted = property(
        lambda self: self.is_saving and self.left > 0 and not self.has_committed
    )

    def begin(self, _client, _roster):
        return True

    def node_status(self):
        return {} if self.is_saving else None

    def is_led(self):
        return True

    @property
    def agreed(self):
        missed = StateId(99, 0) if self.missed else None
        last = FinalCommitRecord(missed=missed, why=self.missed, behind=("n1",))
        return CommitRecord(persisted=self.persisted, last=last)

    def update(self, _client, _status):
        self.is_saving = True

    def fetch(self):
        self.left -= 1
        if self.left == 0:
            self.keeper.commit(12)
        if self.left < 0 and self.must_persist:
            self.persisted = self.keeper.committed[-1]


@pytest.mark.parametrize("how", ["settle", "flush"])
def test_at_the_end_what_was_saved_last_is_agreed_on_before_it_is_persisted(how):
    keeper = FakeKeeper()
    agreement = Agreement(keeper)
    bench = Bench(keeper, follower=agreement, pause=lambda _s: None)
    bench.keeping.begin(0, 2, None, roster=object())
    keeper.commit(11)
    agreement.is_saving = False  # of the last step
    getattr(bench.keeping, how)(60.0)

    assert agreement.persisted == StateId(0, 12)
    assert agreement.is_over  # who lacks it now never has it: the others do not wait


def test_what_cannot_be_written_here_is_not_waited_for_until_the_time_is_up():
    keeper = FakeKeeper()
    agreement = Agreement(keeper)
    agreement.is_saving, agreement.left = True, 10**9
    bench = Bench(keeper, follower=agreement, pause=lambda _s: bench.clock.advance(1.0))
    bench.keeping.begin(0, 2, None, roster=object())
    keeper.commit(11)
    agreement.trouble = "cannot write into /ckpt: Read-only file system"

    done = bench.keeping.flush(600.0)

    assert (done.fitted, done.why) == (False, agreement.trouble)
    assert done.seconds < 60


@pytest.mark.parametrize(
    ("missed", "why", "least_s", "most_s"),
    [
        ("n1: Read-only file system", "n1: Read-only file system", 0, 1),
        ("", "n1 has written nothing for 60.0 s", 60, 70),
    ],
)
def test_nobody_waits_for_a_node_that_cannot_write_or_comes_to_nothing(
    missed, why, least_s, most_s
):
    keeper = FakeKeeper()
    agreement = Agreement(keeper)
    agreement.is_saving, agreement.left, agreement.missed = True, 10**9, missed
    agreement.has_committed = True
    bench = Bench(keeper, follower=agreement, pause=lambda _s: bench.clock.advance(1.0))
    bench.keeping.begin(0, 2, None, roster=object())
    keeper.commit(11)
    bench.keeping.poll()
    agreement.is_saving = True
    began_ns = bench.clock.mono_ns()
    bench.keeping.settle(600.0)
    seconds = (bench.clock.mono_ns() - began_ns) / NS_PER_S
    assert agreement.is_over
    assert least_s <= seconds <= most_s

    bench.keeping.end(600.0)  # what was given up is not waited for again

    (done,) = bench.heard.flushes
    assert (done.fitted, done.why, done.newest) == (False, why, StateId(0, 11))
    assert done.seconds < 1
    assert done.is_end


def test_a_keeper_that_dies_in_a_flush_is_said_to_have_kept_nothing(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(12)
    bench.keeping.poll()
    client = bench.keeper.clients[0]
    client.flush = lambda *_within: client.close() or client.status()

    done = bench.keeping.flush(5.0)

    assert (done.fitted, done.newest) == (False, StateId(0, 12))
    assert "does not answer" in done.why
    assert bench.heard.flushes == [done]


@pytest.mark.parametrize("persisted", [None, StateId(0, 12)])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_what_a_keeper_took_along_when_the_ranks_had_ended_is_said(persisted, is_replaced):
    first, second = FakeKeeper(), FakeKeeper()
    bench = Bench(first, second)
    bench.keeping.begin(0, 1, None)
    first.commit(12)
    first.persisted = persisted
    bench.keeping.poll()
    first.kill()
    if is_replaced:
        bench.keeping.run_once()
    else:
        bench.keepers.clear()
        bench.keeping.poll()
    bench.keeping.end(5.0)

    lost = [(done.fitted, done.newest, done.why) for done in bench.heard.flushes]
    why = "the keeper is gone, and the states in it"
    assert lost == ([] if persisted else [(False, StateId(0, 12), why)])


def test_looking_does_not_wait_for_a_long_flush():
    bench = Bench(times=KeeperTimeouts(every_s=NEVER_S, ready_s=5.0))
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(12)
    bench.keeping.run_once()
    bench.keeper.flush_may_go_on.clear()
    flushing = threading.Thread(target=bench.keeping.flush, args=(20.0,))
    flushing.start()
    assert bench.keeper.flushing.wait(10)

    bench.keeping.poll()
    assert bench.keeping.state().step == 12
    second = bench.keeping.flush(0.1)
    bench.keeper.flush_may_go_on.set()
    flushing.join(10)

    assert second == FinalFlush(within_s=0.1, why="the keeper did not answer in time")
    assert [done.fitted for done in bench.heard.flushes] == [False, True]


def test_the_end_of_a_run_persists_what_is_newest_and_ends_the_keeper(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(12)

    bench.keeping.end(10.0)
    bench.keeping.leave()
    bench.keeping.begin(1, 1, None)

    assert bench.keeper.persisted == StateId(0, 12)
    assert bench.keeper.has_ended
    assert bench.released == [True]
    assert bench.heard.overs == 2  # of the generation before the first, and of that
    assert bench.starts == 1


def test_the_end_after_a_flush_is_at_once(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(12)

    bench.keeping.end(0.0)

    assert bench.heard.flushes == []
    assert bench.keeper.has_ended


def test_an_agent_that_leaves_lets_the_keeper_live_for_the_next_one(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(12)

    bench.keeping.leave()

    assert bench.keeper.is_alive
    assert bench.keeper.clients[0].is_closed
    assert bench.released == [False]
    assert [event.kind for event in bench.heard.events] == ["committed"]


def test_one_that_does_not_end_is_left_to_its_lease(bench):
    bench.keeping.begin(0, 1, None)
    bench.keeper.kill()

    bench.keeping.end(0.0)

    assert bench.released == [True]  # it was found dead when it was listened to
    assert len(bench.heard.failures) == 1


def test_without_a_keeper_the_workers_hear_that_none_is_to_be_started():
    nothing = CheckpointService("/ckpt")
    nothing.begin(0, 1, None)
    nothing.poll()
    nothing.end(1.0)
    nothing.leave()

    assert nothing.env() == {"GPUOPS_KEEPER": "", "GPUOPS_CKPT_DIR": "/ckpt"}
    assert nothing.state() is None
    assert nothing.flush(1.0) is None


def test_a_run_that_ends_does_not_complain_that_it_was_given_no_directory(bench):
    bench.keepers[0].directory = None
    bench.keeping.begin(0, 1, None)
    bench.keeper.commit(12)
    assert not bench.keeping.flush(5.0).has_place
    bench.keeping.end(5.0)

    assert [done.has_place for done in bench.heard.flushes] == [False]  # that of the drain
