"""Events of burn-ins and sweeps that no gpuops writes are refused, whoever sends them."""

import pytest
from support.stories import Teller, envelopes, measured, pair

from gpuops.store.ingest.projections.registry import project_event
from gpuops.store.spool.format import SpoolLineError
from gpuops.store.spool.forward import why_refused


@pytest.mark.parametrize("kind", ["burnin.measured", "sweep.tested", "sweep.ended"])
def test_of_a_user_none_is_forwarded_to_the_store_of_the_fleet(kind):
    teller = Teller()
    event = teller.tell(kind, node="n1", run_id="r1")

    reason = why_refused(event, nodes=frozenset({"n1"}), now_us=event.t_us)

    assert reason == f"a user's spool has no {kind} events"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": "nan"}, "value is not a number"),
        ({"value": True}, "value is not a number"),
        ({"value": 10**400}, "value is not a number"),
        ({"value": float("inf")}, "value is not a number"),
        ({"status": "splendid"}, "status is not one of fail, pass, unknown, warn"),
        ({"part": "GPU-1"}, "part is not one"),
        ({"part": {"kind": "comet", "id": "1"}}, "part is not one"),
        ({"part": {"kind": "gpu"}}, "id is not present"),
        ({"parameters": "x" * 256}, "parameters is not at most 255"),
        ({"parameters": {"size": 1}}, "parameters is not a text"),
        ({"higher_is_better": 1}, "higher_is_better is not true or false"),
        ({"check_run": None}, "check_run is not present"),
        ({"repeats": "many"}, "repeats is not a whole number"),
        ({"software": ["570"]}, "software is not a table"),
        ({"software": {"driver": 570}}, "software is not a table"),
        ({"software": dict.fromkeys(map(str, range(65)), "1")}, "software is not a table"),
        ({"software": {"driver": "x" * 256}}, "driver is not at most 255"),
    ],
)
def test_what_is_no_measurement_is_refused(changes, words):
    teller = Teller()
    teller.tell("burnin.measured", {**measured("run"), **changes})

    with pytest.raises(SpoolLineError, match=words):
        project_event(*envelopes(teller.lines))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": ["n1"]}, "nodes is not the names of two nodes"),
        ({"nodes": ["n1", "n1"]}, "nodes is not the names of two nodes"),
        ({"nodes": ["n1", "n 2"]}, "nodes is not the names of two nodes"),
        ({"nodes": ["n1", "n2" * 200]}, "nodes is not the names of two nodes"),
        ({"nodes": ["n1", 2]}, "nodes is not a list of texts"),
        ({"outcome": "maybe"}, "outcome is not one of fail, pass, slow, timeout"),
        ({"round": None}, "round is not present"),
        ({"rail": "first"}, "rail is not a whole number"),
        ({"sweep": "x" * 256}, "sweep is not at most 255"),
        ({"value": [1]}, "value is not a number"),
    ],
)
def test_what_is_no_test_of_a_pair_is_refused(changes, words):
    teller = Teller()
    teller.tell("sweep.tested", {**pair(), **changes})

    with pytest.raises(SpoolLineError, match=words):
        project_event(*envelopes(teller.lines))
