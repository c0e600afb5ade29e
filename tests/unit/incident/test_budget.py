"""The run's budget, and when it may grow."""

import json
from dataclasses import replace

import pytest
from support.decisions import decision, failure

from gpuops.agent.journal.payloads import budget as budget_of_record
from gpuops.config.schema import WINDOW_RESTARTS_MAX
from gpuops.incident.budget import (
    GROWTHS_WINDOW_S,
    check_growth,
    consecutive_infrastructure_failures,
    count_failures,
    history_after,
    restarts_left,
)
from gpuops.incident.decision import HISTORY_MAX, ClusterState, RestartPolicy


def test_only_what_counts_is_counted():
    history = (failure(at_s=1.0), failure(at_s=2.0, is_counted=False), failure(at_s=3.0))

    assert count_failures(history, RestartPolicy(), 10) == 2
    assert restarts_left(history, RestartPolicy(restarts_max=3), 10) == 1
    assert restarts_left(history, RestartPolicy(restarts_max=1), 10) == 0


def test_a_window_counts_what_is_in_it():
    history = (failure(at_s=1.0), failure(at_s=5.0), failure(at_s=9.0))

    assert count_failures(history, RestartPolicy(restarts_window_s=5.0), 10) == 1
    assert count_failures(history, RestartPolicy(restarts_window_s=5.5), 10) == 2


def test_the_history_is_bounded_and_its_total_is_kept():
    history = tuple(failure(counted_total=i + 1) for i in range(HISTORY_MAX))
    longer = history_after(decision(), history)

    assert len(longer) == HISTORY_MAX
    assert longer[0] == replace(history[1], earlier_failures_s=(history[0].at_s,))
    assert longer[1] is history[2]
    many = (failure(counted_total=70),)
    assert count_failures(many, RestartPolicy(), 0) == 70


def test_a_window_of_more_failures_than_are_kept_counts_them_all():
    terms = RestartPolicy(restarts_max=50, restarts_window_s=86_400.0)
    history = ()
    for i in range(50):
        assert restarts_left(history, terms, 10.0 * i) == 50 - i
        made = decision(failure=failure(at_s=10.0 * i, is_counted=True))
        history = history_after(made, history)

    assert restarts_left(history, terms, 500.0) == 0
    assert restarts_left(history, terms, 86_405.0) == 1
    assert budget_of_record(terms, history)["used"] == 50


def test_the_largest_window_is_kept_within_bounds():
    history = ()
    for i in range(WINDOW_RESTARTS_MAX + 100):
        uncounted = i % 4 == 3
        made = decision(failure=failure(at_s=1e9 + i + 1 / 3, is_counted=not uncounted))
        history = history_after(made, history_after(made, history))

    assert count_failures(history, RestartPolicy(restarts_window_s=1e8), 1e9) >= WINDOW_RESTARTS_MAX
    assert len(history) == HISTORY_MAX
    assert sum(len(json.dumps(past.to_json())) for past in history) < 40_000


def test_infrastructure_in_a_row_ends_with_anything_else():
    port = failure(is_counted=False, is_infrastructure=True)

    assert consecutive_infrastructure_failures(()) == 0
    assert consecutive_infrastructure_failures((port, failure(), port, port)) == 2


def grown(**changes):
    fields = {"grown_at_s": (), "now_s": 1000.0, "waiting_since_s": 900.0, "at_checkpoint": True}
    on = changes.pop("on", cluster())
    return check_growth(on, **{**fields, **changes})


def cluster(members=2, live=4, **changes):
    fields = {"nodes_min": 1, "nodes_max": 4, **changes}
    names = tuple(f"n{i}" for i in range(live))
    return ClusterState(
        policy=RestartPolicy(**fields), generation=1, members=names[:members], live=names
    )


def test_it_grows_at_a_checkpoint_to_all_that_may_train():
    assert grown().n_nodes == 4
    assert grown(on=cluster(live=9)).n_nodes == 4
    assert grown(on=cluster(live=5, node_unit=2, nodes_max=8)).n_nodes == 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"at_checkpoint": False}, "next checkpoint"),
        ({"waiting_since_s": 975.0}, "within 30 s"),
        ({"grown_at_s": (900.0, 910.0, 920.0)}, "3 times within an hour"),
        ({"on": cluster(members=4)}, "no more nodes"),
        ({"on": cluster(members=2, live=3, node_unit=2)}, "no more nodes"),
        ({"on": cluster(members=2, live=2)}, "no more nodes"),
        ({"on": cluster(nodes_max=2)}, "no more nodes"),
    ],
)
def test_when_it_does_not_grow(changes, why):
    growth = grown(**changes)

    assert growth.n_nodes == 0
    assert why in growth.why


def test_an_excluded_node_is_no_reason_to_grow():
    on = cluster(live=3)

    assert grown(on=on).n_nodes == 3
    names = ClusterState(
        policy=on.policy, generation=1, members=on.members, live=on.live, excluded={"n2": "sick"}
    )
    assert grown(on=names).n_nodes == 0


def test_the_flap_limit_is_of_an_hour():
    old = (1.0, 2.0, 3.0)

    assert grown(grown_at_s=old, now_s=GROWTHS_WINDOW_S + 10, waiting_since_s=0.0).n_nodes == 4
