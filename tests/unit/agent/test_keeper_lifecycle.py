"""The phases of a keeper: what moves it from one to the next, and what nothing undoes."""

from functools import reduce

import pytest

from gpuops.agent.checkpoint.api import StartedKeeper
from gpuops.agent.checkpoint.keeper_lifecycle import KeeperGeneration, KeeperLifecycle, KeeperPhase
from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.keeper.messages import KeeperStatus
from gpuops.checkpoint.types import StateId

KEEPER = StartedKeeper(client=None, socket="/run/keeper.sock", pid=7)
GENERATION = KeeperGeneration(0, 1, None, None)
PHASES = {phase.value: phase for phase in KeeperPhase}


def status(step=None, persisted=None):
    newest = None if step is None else StateId(0, step)
    return KeeperStatus(progress=KeeperProgress(newest=newest, persisted=persisted), epoch=0)


EVENTS = {
    "started": lambda life: life.started(KEEPER),
    "polled": lambda life: life.polled(status(), None, 1),
    "saved": lambda life: life.polled(status(5), None, 1),
    "persisted": lambda life: life.polled(status(5), StateId(0, 5), 1),
    "begins": lambda life: life.between_generations(is_used=True),
    "prepared": lambda life: life.prepared(GENERATION, is_used=True),
    "unused": lambda life: life.prepared(GENERATION, is_used=False),
    "dies": lambda life: life.died(10.0),
    "finishing": lambda life: life.finishing(),
    "ended": lambda life: life.ended(),
}


def after(events):
    return reduce(lambda life, event: EVENTS[event](life), events.split(), KeeperLifecycle())


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ("", "starting"),
        ("started", "starting"),
        ("started polled", "serving"),
        ("started dies", "starting"),
        ("started polled begins prepared", "starting"),
        ("started polled begins prepared polled", "serving"),
        ("started polled dies", "starting"),  # no workers use it: `begin` starts another one
        ("started polled unused dies", "starting"),
        ("started polled prepared dies", "restarting"),
        ("started polled prepared dies started", "restarting"),
        ("started polled prepared dies started dies", "restarting"),
        ("started polled prepared dies started polled", "serving"),
        ("started polled prepared dies begins", "starting"),
        ("finishing", "finishing"),
        ("started finishing polled", "finishing"),
        ("started polled prepared finishing dies", "finishing"),
        ("started polled prepared dies finishing", "finishing"),
        ("started polled finishing begins prepared", "finishing"),
        ("started polled ended", "ended"),
        ("started polled ended polled", "ended"),
        ("started polled prepared ended dies", "ended"),
        ("started polled ended finishing", "ended"),
    ],
)
def test_each_event_leads_to_one_phase(events, phase):
    life = after(events)

    assert life.phase is PHASES[phase]
    assert life.must_restart(10.0) is (phase == "restarting")


@pytest.mark.parametrize(
    ("events", "died_with", "lost"),
    [
        ("started prepared saved dies", 5, 5),
        ("started prepared persisted dies", 5, None),
        ("started prepared polled dies", None, None),
        ("started prepared saved dies started polled", 5, 5),  # told when that one has answered
        ("started prepared saved dies started polled dies", 5, 5),
        ("started prepared saved dies started polled prepared", None, 5),  # still said at the end
        ("started prepared saved dies begins", 5, None),
        ("started prepared saved dies begins started polled prepared", None, None),
    ],
)
def test_what_a_keeper_took_along_is_known_until_it_is_told(events, died_with, lost):
    life = after(events)

    assert life.died_with == (None if died_with is None else StateId(0, died_with))
    assert life.lost == (None if lost is None else StateId(0, lost))


def test_restarts_come_later_and_later_and_not_more_often_than_the_window_allows():
    life, found = after("started polled prepared dies"), []
    for now_s in range(10, 1300):
        if life.must_restart(now_s):
            found.append(now_s)
            life = life.restarting(now_s)

    assert found == [10, 20, 80, 610, 670, 730, 1210, 1270]
