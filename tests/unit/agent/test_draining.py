"""A drain gives the workers a step, or as long as they ask for; never more than the grace."""

import signal
from uuid import UUID

import pytest
from support.agreement import CutBoard
from support.supervised import FakeWorkers

from gpuops.agent.elastic.drain import Draining, caught_signals, common_step, drain_from_afar
from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import ControlRecord, Member, RunPhase, pack
from gpuops.control.store import Entry
from gpuops.host.clock import FakeClock
from gpuops.wire.ring import STEP_UNKNOWN, AgentRequest, WorkerFlag

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture
def clock():
    return FakeClock()


def drain(workers, clock, number=TERM, stop_step=None, reach_s=0.0, caught=()):
    return Draining(
        number,
        workers,
        clock,
        grace_s=25.0,
        stop_step=stop_step,
        reach_s=reach_s,
        caught=lambda _pid: caught,
    )


def test_workers_without_a_beat_have_nothing_to_finish(clock):
    assert drain(FakeWorkers(2), clock).is_over()


def test_each_rank_gets_one_more_step(clock):
    workers = FakeWorkers(2)
    workers.beat(0, 1)
    draining = drain(workers, clock)
    assert not draining.is_over()
    workers.beat(0)
    assert not draining.is_over()
    workers.beat(1)
    assert draining.is_over()


def test_whoever_asks_has_until_the_deadline(clock):
    workers = FakeWorkers(2)
    workers.beat(0, 1)
    workers.rings[0].flags = WorkerFlag.STOP_POLLED
    draining = drain(workers, clock, stop_step=70)
    workers.beat(0, 1)
    clock.advance(24.9)
    assert not draining.is_over(), "rank 0 may be saving"
    clock.advance(0.1)
    assert draining.is_over()
    assert [ring.wanted for ring in workers.rings] == [(AgentRequest.DRAIN, 70)] * 2


def test_a_checkpointer_has_half_the_grace_to_save_the_stop_step(clock):
    workers = FakeWorkers(2)
    workers.beat(0, 1)
    for ring in workers.rings:
        ring.flags = WorkerFlag.SAVES_AT_STOP
    draining = drain(workers, clock, stop_step=70, reach_s=10.0)
    workers.beat(0, 1)
    workers.rings[0].flags |= WorkerFlag.SAVED_AT_STOP
    clock.advance(12.4)
    assert not draining.is_over(), "rank 1 has not reached the step"
    workers.rings[1].flags |= WorkerFlag.SAVED_AT_STOP
    assert draining.is_over()
    workers.rings[1].flags = WorkerFlag.SAVES_AT_STOP
    clock.advance(0.1)
    assert draining.is_over(), "what was saved before has to persist"


@pytest.mark.parametrize(
    ("flags", "reach_s", "over"),
    [
        (WorkerFlag.SAVES_AT_STOP, 12.5, False),
        (WorkerFlag.SAVES_AT_STOP, 12.6, True),
        (WorkerFlag.STOP_POLLED, 25.0, False),
        (WorkerFlag.STOP_POLLED, 25.1, True),
        (WorkerFlag.STOP_POLLED | WorkerFlag.STOP_RETURNED, 25.1, False),
        (WorkerFlag.STOP_POLLED | WorkerFlag.SAVED_AT_STOP, 1.0, False),
    ],
    ids=repr,
)
def test_a_stop_step_that_comes_too_late_is_not_waited_for(clock, flags, reach_s, over):
    workers = FakeWorkers(1)
    workers.beat(0)
    workers.rings[0].flags = flags
    draining = drain(workers, clock, stop_step=70, reach_s=reach_s)
    assert not draining.is_over(), "one more step, as without a Checkpointer"
    workers.beat(0)

    assert draining.is_over() == over


def test_a_program_that_has_ended_may_tidy_up(clock):
    workers = FakeWorkers(1)
    workers.beat(0)
    draining = drain(workers, clock)
    workers.beat(0)
    workers.rings[0].flags = WorkerFlag.HANDLES_SIGTERM | WorkerFlag.PROGRAM_ENDED
    assert not draining.is_over()
    workers.end_all(0)

    assert draining.is_over()
    assert draining.ended_unasked()


def test_without_a_common_step_the_ranks_are_asked_to_stop_at_once(clock):
    workers = FakeWorkers(1)
    drain(workers, clock)

    assert workers.rings[0].wanted == (AgentRequest.DRAIN, STEP_UNKNOWN)


def test_once_all_have_ended_it_is_over(clock):
    workers = FakeWorkers(2)
    workers.rings[0].flags = WorkerFlag.STOP_POLLED
    draining = drain(workers, clock)
    assert not draining.is_over()
    workers.end_all(0)

    assert draining.is_over()


@pytest.mark.parametrize(
    ("number", "flags", "caught", "sent"),
    [
        (TERM, WorkerFlag(0), (TERM,), [(0, TERM)]),
        (TERM, WorkerFlag.HANDLES_SIGTERM, (TERM,), []),
        (TERM, WorkerFlag.HANDLES_SIGUSR1, (TERM,), [(0, TERM)]),
        (USR1, WorkerFlag.HANDLES_SIGUSR1, (USR1,), []),
        (USR1, WorkerFlag(0), (), []),
        (signal.SIGINT, WorkerFlag(0), (TERM,), []),
    ],
)
def test_a_script_with_a_handler_of_its_own_gets_the_signal(clock, number, flags, caught, sent):
    workers = FakeWorkers(1)
    workers.beat(0)
    workers.rings[0].flags = flags
    drain(workers, clock, number, caught=caught)

    assert workers.sent == sent


def test_a_script_that_handles_the_signal_has_until_the_deadline(clock):
    workers = FakeWorkers(1)
    workers.beat(0)
    draining = drain(workers, clock, caught=(TERM,))
    workers.beat(0)
    assert not draining.is_over()
    clock.advance(25)
    assert draining.is_over()


def test_a_handler_that_turns_out_to_be_ours_asks_for_no_time(clock):
    """Before the first beat nobody knows whose it is."""
    workers = FakeWorkers(1)
    draining = drain(workers, clock, caught=(TERM,))
    assert not draining.is_over()
    workers.rings[0].flags = WorkerFlag.HANDLER_RAN

    assert draining.is_over()


def test_what_a_process_catches_is_read_from_its_status(tmp_path):
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    mask = 1 << (TERM - 1) | 1 << (signal.SIGINT - 1)
    (folder / "status").write_text(f"Name:\tpython\nSigCgt:\t{mask:016x}\nSeccomp:\t0\n")

    assert set(caught_signals(7, tmp_path)) == {TERM, signal.SIGINT}
    assert caught_signals(8, tmp_path) == ()


class TwoAgents:
    """A seated agent, whose ranks are at step 100 and make five a second, and a spare."""

    def __init__(self, clock):
        self.store = CutBoard(MemoryControlStore(clock))
        fresh = ControlRecord(
            run_id=str(UUID(int=9)), folder="run", generation=3, phase=RunPhase.RUN, since_s=0.0
        )

        def link(number):
            me = Member(agent=str(UUID(int=number)), node=f"n{number}", address="h", n_workers=1)
            view = join(self.store, me, fresh, clock, lambda _s: None)
            return ControlClient(self.store, me, view, clock, fence_timeout_s=10.0)

        self.progress = {"generation": 3, "step": 100, "rate": 5.0}

        self.seated, self.spare = link(1), link(2)
        self.send_heartbeat()
        self.spare.send_heartbeat({"generation": -1, "step": None, "rate": None}, hold_s=0.0)

    def send_heartbeat(self):
        self.seated.send_heartbeat(self.progress, hold_s=0.0)


def test_a_spare_that_hears_first_says_at_which_step_all_stop(clock):
    agents = TwoAgents(clock)

    assert drain_from_afar(agents.spare, "SIGTERM")
    agents.send_heartbeat()

    record = agents.seated.record
    assert (record.phase, record.drain_signal, record.reason) == (
        RunPhase.DRAIN,
        "SIGTERM",
        "SIGTERM on n2",
    )
    # 3.5 s until the last rank hears of it are 18 steps, and one rank may be a step ahead.
    assert record.drain_step == 120
    assert not drain_from_afar(agents.spare, "SIGTERM"), "the first word holds"


def test_an_agent_whose_workers_have_ended_asks_nobody_for_the_step(clock):
    agents = TwoAgents(clock)
    agents.store.lose = lambda name: "call" if name == "list" else None

    assert drain_from_afar(agents.spare, "SIGTERM", was_there=True, stop_step=107)
    agents.store.lose = lambda _name: None
    agents.send_heartbeat()

    assert agents.seated.record.drain_step == 107


def test_a_spare_without_the_board_asks_again(clock):
    agents = TwoAgents(clock)
    agents.store.is_cut = True
    assert not drain_from_afar(agents.spare, "SIGTERM")

    agents.store.is_cut = False
    assert drain_from_afar(agents.spare, "SIGTERM")


@pytest.mark.parametrize(
    ("told", "step"),
    [
        ([], None),
        ([{"generation": 3, "step": 7, "rate": None}], None),
        ([{"generation": 2, "step": 7, "rate": 1.0}], None),
        ([{"generation": 3, "step": 7, "rate": 0.0}], 10),
        ([{"generation": 3, "step": 7, "rate": 1.0}, {"generation": 3, "step": 8, "rate": 2}], 17),
        ([{"generation": 3, "step": "7", "rate": 1.0}], None),
        ([{"generation": 3, "step": 7, "rate": float("inf")}, {"v": 0}], None),
    ],
)
def test_the_step_at_which_all_stop_is_by_what_heartbeats_tell(told, step):
    beats = {f"alive/{index}": Entry(pack(body), 1) for index, body in enumerate(told)}

    assert common_step({**beats, "alive/x": Entry(b"\xff", 1)}, generation=3) == step
