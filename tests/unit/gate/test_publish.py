"""A drain's reason on its way to slurmctld."""

from dataclasses import replace

import pytest
from support.fake_slurm import FakeSlurm

from gpuops.gate.drain import (
    SETTLE_S,
    DrainPublication,
    DrainRecord,
    DrainRetry,
    DrainStage,
    drain_node,
    read_drain,
    save_outcome,
    write_drain,
)
from gpuops.gate.policy import DrainStep
from gpuops.host.clock import FakeClock

DRAIN = DrainRecord(
    id="d1",
    node="n1",
    hook="prolog",
    reason="gpuops: fail gpu_lost n1 15 -> drain #1",
    check="gpu_lost",
    failure_class="gpu_hw.fell_off_bus",
    t_us=1,
    replaces=("Prolog error",),
)


def ended(slurm, drain=DRAIN, *, state=None, limit_s=600.0):
    clock, waited = FakeClock(), []

    def pause(seconds):
        assert seconds > 0
        waited.append(seconds)
        clock.advance(seconds)

    patience = DrainRetry(limit_s=limit_s, pause=pause)
    return drain_node(drain, slurm, state or (lambda: drain), patience, clock), sum(waited)


def slurmd_drains(slurm):
    if "DRAIN" not in slurm.states:
        slurm.by_somebody("Prolog error")


def test_slurmds_word_is_replaced_by_our_reason():
    slurm = FakeSlurm(script=[slurmd_drains])
    published, waited_s = ended(slurm)

    assert published == DrainPublication(DrainStep.DONE)
    assert waited_s >= SETTLE_S
    assert (slurm.reason, slurm.calls) == (DRAIN.reason, [("drain", DRAIN.reason)])


def test_a_word_of_slurmds_that_follows_ours_is_replaced_as_well():
    slurm = FakeSlurm(script=[None, lambda it: it.by_somebody("Prolog error")])
    published, _ = ended(slurm)

    assert published.step is DrainStep.DONE
    assert slurm.reason == DRAIN.reason


@pytest.mark.parametrize("reason", ["ann: cable", "Epilog error", f"{DRAIN.reason}; ann"])
def test_somebody_elses_reason_is_left(reason):
    slurm = FakeSlurm()
    slurm.by_somebody(reason)
    published, _ = ended(slurm)

    assert published.step is DrainStep.YIELD
    assert slurm.calls == []


def test_an_administrator_who_takes_it_back_has_the_last_word():
    slurm = FakeSlurm(script=[None, FakeSlurm.taken_back])
    published, _ = ended(slurm)

    assert published.step is DrainStep.LIFTED
    assert slurm.calls == [("drain", DRAIN.reason)]


def test_a_slurmctld_that_is_down_for_minutes_is_waited_for():
    def comes_back(slurm):
        slurm.down = False

    slurm = FakeSlurm(down=True, script=[*[None] * 12, comes_back])
    published, waited_s = ended(slurm)

    assert published.step is DrainStep.DONE
    assert 60 < waited_s < 300


def test_a_slurmctld_that_stays_down_is_given_up_in_time():
    published, waited_s = ended(FakeSlurm(down=True), limit_s=100.0)

    assert published == DrainPublication(None, "Unable to contact slurm controller")
    assert 80 < waited_s <= 100


@pytest.mark.parametrize("now", [None, replace(DRAIN, id="d2")])
def test_a_drain_that_is_no_longer_wanted_is_over(now):
    slurm = FakeSlurm()
    published, _ = ended(slurm, state=lambda: now)

    assert published.step is None
    assert slurm.calls == []


@pytest.mark.parametrize(
    ("step", "stage"),
    [
        (DrainStep.DONE, DrainStage.SET),
        (DrainStep.YIELD, None),
        (DrainStep.LIFTED, None),
        (None, DrainStage.WANTED),
    ],
)
def test_what_came_of_it_is_kept(tmp_path, step, stage):
    write_drain(tmp_path, DRAIN)
    save_outcome(DRAIN, DrainPublication(step), tmp_path)
    kept = read_drain(tmp_path, uid=1)

    assert kept == (None if stage is None else replace(DRAIN, stage=stage.value))
