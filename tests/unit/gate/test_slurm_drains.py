"""What Slurm says of drains, against what is on record: only what a person did, and only once."""

import pytest

from gpuops.cli.slurm import slurm
from gpuops.errors import UsageError
from gpuops.gate.slurm_drains import REASON_CHARS_MAX, TAKEOVER_S, DrainChange, drain_changes
from gpuops.slurm.scontrol import SlurmNode
from gpuops.store.queries.fleet_queries import LastState

S = 1_000_000
NOW_US = 1_795_600_000 * S + 5


def node(*states, reason=None, by="ann", ago_s=60):
    return SlurmNode(
        name="n1",
        states=frozenset(states or {"IDLE"}),
        reason=reason,
        reason_by=by,
        reason_us=None if ago_s is None else NOW_US - 5 - ago_s * S,
    )


def drained(reason="swapping a cable", **more):
    return node("IDLE", "DRAIN", reason=reason, **more)


def last(state="drained", reason="swapping a cable", actor="administrator ann", ago_s=60):
    return LastState(NOW_US - 5 - ago_s * S, state, reason, actor)


def changes(view, before=None):
    return drain_changes([view], {"n1": before}, NOW_US)


def test_a_drain_is_recorded_with_its_reason_its_user_and_its_time():
    assert changes(drained()) == [
        DrainChange(
            node="n1",
            drained=True,
            reason="swapping a cable",
            actor="administrator ann",
            t_us=NOW_US - 5 - 60 * S,
        )
    ]


@pytest.mark.parametrize(
    "before",
    [
        last(),
        last(ago_s=30, actor="administrator"),  # of a health check, which saw it later
        last(reason="swapping\ta  cable"),
    ],
)
def test_a_drain_on_record_is_not_recorded_again(before):
    assert changes(drained(), before) == []


@pytest.mark.parametrize(
    "before", [last(ago_s=61), last(reason="another"), last(state="resumed"), None]
)
def test_another_drain_is_recorded_after_what_is_on_record(before):
    (found,) = changes(drained(), before)
    known = LastState(found.t_us, "drained", found.reason, found.actor)

    assert found.t_us > (before.t_us if before else 0)
    assert changes(drained(), known) == []


def test_a_clock_that_was_ahead_does_not_make_a_drain_new_each_time():
    before = last(state="resumed", actor="gpuops", ago_s=-7200)
    (found,) = changes(drained(), before)

    assert changes(drained(), LastState(found.t_us, "drained", found.reason, found.actor)) == []


def test_a_drain_without_time_user_and_reason_is_recorded_once():
    view = drained(reason=None, by=None, ago_s=None)
    (found,) = changes(view)

    assert (found.reason, found.actor, found.t_us) == ("no reason", "administrator", NOW_US)
    assert changes(view, LastState(found.t_us, "drained", found.reason, found.actor)) == []


@pytest.mark.parametrize(
    "reason", ["gpuops: fail gpu_lost -> drain #1", "Prolog error", "Epilog error"]
)
def test_drains_of_gpuops_and_slurmd_are_no_administrators(reason):
    assert changes(drained(reason)) == []


def test_a_taken_over_drain_is_the_health_checks_for_an_hour():
    ours = last(reason="gpuops: fail gpu_lost", actor="gpuops", ago_s=9000)

    assert changes(drained(ago_s=TAKEOVER_S - 1), ours) == []
    assert [item.actor for item in changes(drained(ago_s=TAKEOVER_S), ours)] == [
        "administrator ann"
    ]


def test_the_end_of_a_drain_is_recorded_once_dated_when_slurm_was_asked():
    (found,) = changes(node(), last())

    assert found == DrainChange(
        node="n1",
        drained=False,
        reason="in use again; was swapping a cable",
        actor="administrator",
        t_us=NOW_US - 5,
    )
    assert changes(node(), LastState(found.t_us, "resumed", found.reason, found.actor)) == []


def test_a_drain_in_the_second_of_the_last_resume_comes_after_it():
    (resumed,) = changes(node(), last())
    before = LastState(resumed.t_us, "resumed", resumed.reason, resumed.actor)
    (again,) = changes(drained(ago_s=0), before)

    assert again.t_us == resumed.t_us + 1


@pytest.mark.parametrize(
    ("view", "before"),
    [
        (node("DOWN"), last()),  # still out of service
        (node(), last(actor="gpuops")),  # of the node's health check, whose event may be late
        (node(), last(state="resumed")),
        (node(), None),
    ],
)
def test_nothing_else_is_a_resume(view, before):
    assert changes(view, before) == []


def test_a_node_that_the_store_does_not_know_is_left_out():
    assert drain_changes([drained()], {"n2": None}, NOW_US) == []


def test_a_hostile_reason_is_bounded_printable_and_without_secrets():
    view = drained("\x1b[31mred\r\n token=hunter2hunter2 " + "x" * 9999, by="e\x1bve " * 99)
    (found,) = changes(view)

    assert len(found.reason) == REASON_CHARS_MAX
    assert (found.reason + found.actor).isprintable()
    assert "hunter2" not in found.reason
    assert len(found.actor) < 100
    assert changes(view, LastState(found.t_us, "drained", found.reason, found.actor)) == []


def test_only_root_records(monkeypatch):
    monkeypatch.setattr("gpuops.cli.slurm.current_uid", lambda: 1000)

    with pytest.raises(UsageError, match="drains must be run by root, not by uid 1000"):
        slurm.main(["drains"], standalone_mode=False)
