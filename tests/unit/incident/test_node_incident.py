"""Which incidents a node's checks open, keep and close."""

import itertools
from dataclasses import replace

import pytest

from gpuops.checks.core.runner import CheckRun
from gpuops.host.node_state import OpenIncident, Repair
from gpuops.host.records import from_json, to_json
from gpuops.incident.incidents.node import (
    EVIDENCE_MAX,
    NodeCheckContext,
    acknowledge_repairs,
    incident_key,
    update_incidents,
)
from gpuops.incident.runbook import Runbook
from gpuops.model import (
    ActionKind,
    Confidence,
    Entity,
    EntityKind,
    FailureClass,
    Finding,
    IncidentState,
    Side,
    Status,
    UnknownReason,
)

NODE = Entity(EntityKind.NODE, "n1")
GPU = Entity(EntityKind.GPU, "GPU-1")
LOST = FailureClass.GPU_FELL_OFF_BUS
T0 = 1_760_000_000_000_000
KEY = incident_key(LOST, GPU)


def finding(status, entity=GPU, check="gpu_xid", kind=LOST, **more):
    values = {
        "check": check,
        "entity": entity,
        "status": status,
        "message": "Xid 79",
        "failure_class": None if status in (Status.PASS, Status.SKIP) else kind,
        "unknown_reason": UnknownReason.TIMEOUT if status is Status.UNKNOWN else None,
    }
    return Finding(**{**values, **more})


FAILS = finding(Status.FAIL)
PASSES = finding(Status.PASS)
WELL = finding(Status.PASS, NODE)


def ran(*findings, at=0):
    return CheckRun(
        suite="prolog",
        node="n1",
        start_us=T0 + at * 10**6,
        end_us=T0 + at * 10**6 + 5,
        findings=findings,
    )


def runbook(action=ActionKind.DRAIN, side=Side.INFRA):
    return Runbook(
        failure_class=LOST,
        title="lost",
        severity="page",
        side=side,
        action=action,
        sources=("x",),
        body="",
        text="",
    )


def about(**changes):
    count = itertools.count(1)
    values = {
        "runbooks": {LOST: runbook()},
        "new_id": lambda _key: f"i{next(count)}",
        "trigger": "prolog",
        "job_id": "17",
    }
    return NodeCheckContext(**{**values, **changes})


def opened(*findings):
    return update_incidents(ran(*(findings or (FAILS,))), {}, about()).open


def repair(kind="gpu", entity="GPU-1", at=1):
    return Repair(
        entity_kind=kind, entity_id=entity, t_us=T0 + at * 10**6, by="ada", what="a new GPU"
    )


def test_a_failure_opens_an_incident_that_blames_the_part_and_names_the_node():
    change = update_incidents(ran(FAILS), {}, about())

    (found,) = change.changed
    assert found.failure_class is LOST
    assert found.culprits == (GPU, NODE)
    assert (found.side, found.confidence) == (Side.INFRA, Confidence.CONFIRMED)
    assert (found.state, found.rev, found.id) == (IncidentState.OPEN, 1, "i1")
    assert found.actions == (ActionKind.DRAIN,)
    assert found.title == "gpu GPU-1 on node n1: Xid 79"
    assert found.culprit_how == "check gpu_xid in the prolog of job 17"
    assert (found.first_us, found.detected_us) == (T0, T0 + 5)
    assert change.open == {KEY: OpenIncident(incident=found, checks=("gpu_xid",))}


def test_the_evidence_holds_the_value_and_what_it_was_held_against():
    failing = finding(Status.FAIL, value=7.0, unit="GPUs", threshold="= 8", source="profile")
    (found,) = update_incidents(ran(failing), {}, about(job_id=None, trigger="manual")).changed

    assert found.evidence[0].text == (
        "gpu_xid: Xid 79: 7.0 GPUs, expected = 8 (profile), in a manual check"
    )
    assert found.evidence[0].entity == GPU


@pytest.mark.parametrize("status", [Status.PASS, Status.SKIP, Status.WARN, Status.UNKNOWN])
def test_only_a_failure_opens_an_incident(status):
    assert update_incidents(ran(finding(status)), {}, about()).changed == ()


def test_a_failure_of_the_node_blames_the_node_once():
    (found,) = update_incidents(ran(finding(Status.FAIL, NODE)), {}, about()).changed

    assert found.culprits == (NODE,)
    assert found.title == "node n1: Xid 79"


def test_without_a_runbook_nothing_is_to_be_done_and_the_machine_is_at_fault():
    (found,) = update_incidents(ran(FAILS), {}, about(runbooks={})).changed

    assert (found.side, found.actions) == (Side.INFRA, ())


def test_a_hundred_prologs_that_find_the_same_tell_it_once():
    state, told = {}, []
    for at in range(100):
        change = update_incidents(ran(finding(Status.FAIL, message=f"{at}"), at=at), state, about())
        state, told = change.open, [*told, *change.changed]

    assert len(told) == 1
    assert state[KEY].incident.id == "i1"


def test_another_check_of_the_same_thing_is_evidence_and_not_another_incident():
    other = finding(Status.FAIL, check="gpu_lost", message="is lost")
    change = update_incidents(ran(FAILS, other, at=1), opened(), about())

    (found,) = change.changed
    assert (found.id, found.rev) == ("i1", 2)
    assert [item.text.partition(":")[0] for item in found.evidence] == ["gpu_xid", "gpu_lost"]
    assert change.open[KEY].checks == ("gpu_xid", "gpu_lost")


def test_other_parts_and_other_failures_are_other_incidents():
    others = (
        finding(Status.FAIL, Entity(EntityKind.GPU, "GPU-2")),
        finding(Status.FAIL, kind=FailureClass.GPU_NVLINK),
    )

    assert len(update_incidents(ran(FAILS, *others), {}, about()).changed) == 3


def test_evidence_has_an_end():
    many = [finding(Status.FAIL, check=f"c{n}") for n in range(EVIDENCE_MAX + 5)]
    first = update_incidents(ran(*many), {}, about())
    more = update_incidents(ran(*many, finding(Status.FAIL, check="new")), first.open, about())

    assert len(first.changed[0].evidence) == EVIDENCE_MAX
    assert more.changed == ()


CLOSES = {
    "the part passes": ((PASSES,), True),
    "all parts together pass": ((WELL,), True),
    "another part warns, this one is not named": (
        (finding(Status.WARN, Entity(EntityKind.GPU, "GPU-2")),),
        True,
    ),
    "the node warns of something else": (
        (WELL, finding(Status.WARN, NODE, kind=FailureClass.GPU_CONFIG)),
        True,
    ),
    "the part only warns": ((finding(Status.WARN),), False),
    "the part passes and warns": ((PASSES, finding(Status.WARN)), False),
    "nobody could look": ((finding(Status.UNKNOWN, NODE),), False),
    "it is silenced": ((finding(Status.SKIP),), False),
    "the node warns of the same": ((finding(Status.WARN, NODE),), False),
    "another part fails": ((finding(Status.FAIL, Entity(EntityKind.GPU, "GPU-2")),), False),
    "another check passes": ((finding(Status.PASS, check="memory"),), False),
    "nothing was checked": ((), False),
}


@pytest.mark.parametrize(("findings", "closes"), CLOSES.values(), ids=CLOSES.keys())
def test_an_incident_is_closed_when_its_check_passes_again_and_not_before(findings, closes):
    change = update_incidents(ran(*findings, at=60), opened(), about())

    assert (KEY not in change.open) is closes
    if closes:
        found = change.changed[0]
        assert (found.id, found.state, found.rev) == ("i1", IncidentState.CLOSED, 2)
        assert found.resolved_us == T0 + 60 * 10**6 + 5
        assert found.resolution == "no longer found by gpu_xid, in the prolog of job 17"
        assert found.evidence


def test_a_prolog_that_asked_about_other_gpus_closes_nothing():
    some = update_incidents(ran(WELL, at=1), opened(), about(all_gpus_checked=False))
    asked = update_incidents(ran(PASSES, at=1), opened(), about(all_gpus_checked=False))

    assert KEY in some.open
    assert KEY not in asked.open


def test_an_incident_that_two_checks_found_is_closed_by_both():
    before = opened(FAILS, finding(Status.FAIL, check="gpu_lost"))
    one = update_incidents(ran(PASSES, at=1), before, about())
    both = update_incidents(ran(finding(Status.PASS, check="gpu_lost"), at=2), one.open, about())

    assert one.changed == ()
    assert one.open[KEY].checks == ("gpu_lost",)
    assert both.changed[0].state is IncidentState.CLOSED
    assert both.open == {}


def test_a_failure_that_comes_back_is_a_new_incident():
    change = update_incidents(ran(PASSES, at=1), opened(), about())
    again = update_incidents(ran(FAILS, at=2), change.open, about(new_id=lambda _key: "i9"))

    assert again.changed[0].id == "i9"


@pytest.mark.parametrize(
    ("by", "closes"),
    [
        (repair(), True),
        (repair("node", "n1"), True),
        (repair(at=0), True),
        (repair(at=-1), False),
        (repair("gpu", "GPU-2"), False),
        (repair("node", "n2"), False),
    ],
    ids=["the part", "the node", "at once", "earlier", "another part", "another node"],
)
def test_an_acknowledged_repair_closes_what_was_before_it(by, closes):
    change = acknowledge_repairs(opened(), (by,))

    assert bool(change.changed) is closes
    assert (KEY not in change.open) is closes
    if closes:
        assert change.changed[0].resolution == "repaired by ada: a new GPU"


def test_what_fails_after_the_repair_is_a_new_incident():
    change = update_incidents(
        ran(FAILS, at=60), opened(), about(repairs=(repair(),), new_id=lambda _key: "i2")
    )

    assert [(item.id, item.state.value) for item in change.changed] == [
        ("i1", "closed"),
        ("i2", "open"),
    ]
    assert change.open[KEY].incident.id == "i2"


def test_an_open_incident_survives_the_nodes_file():
    (item,) = opened(finding(Status.FAIL, value=7.0, unit="GPUs", threshold="= 8")).values()

    assert from_json(OpenIncident, to_json(item), "x") == item
    assert replace(item, checks=()) != item
