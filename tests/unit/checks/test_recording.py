"""A recording gets the verdict that the node got, and a broken one an error that says why."""

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checks import CASE

from gpuops.checks.core.check import Check, NoParameters, Probe
from gpuops.checks.core.probes import ProbeResult
from gpuops.checks.core.recording import Recording, parse_recording
from gpuops.checks.core.runner import RunContext, judge
from gpuops.checks.core.suite import PlannedCheck, Suite
from gpuops.errors import UsageError
from gpuops.gate.node_state import StateUpdate, judge_context_for
from gpuops.host.clock import FakeClock
from gpuops.host.node_state import BootMoment, CounterSample, DriverHang, NodeState
from gpuops.model import FailureClass, Finding, Status, UnknownReason

MOMENT = BootMoment(boot_id="b", since_boot_s=7200.0, t_us=1_700_000_000_000_000)
POLICY = MappingProxyType({UnknownReason.NOT_SUPPORTED: Status.SKIP})


@dataclass(frozen=True)
class Count:
    """The facts of these tests."""

    n: int
    words: tuple[str, ...] = ()
    ratio: float | None = None


def verdict(facts, _parameters, case):
    """Fail for a negative number, warn for a grown one: facts and memory both decide."""
    grown = case.counters.since("n", facts.n)
    status = Status.FAIL if facts.n < 0 else Status.PASS
    if status is Status.PASS and grown is not None and grown.grown > 0:
        status = Status.WARN
    return [
        Finding(
            check="x",
            entity=case.node,
            status=status,
            message=" ".join(facts.words),
            value=facts.ratio,
            failure_class=FailureClass.UNRESOLVED if status is Status.FAIL else None,
        )
    ]


def suite(*names):
    checks = [
        Check(name, "", Probe(name, Count, lambda _m, _b: Count(0)), NoParameters, verdict)
        for name in names
    ]
    return Suite(
        name="test",
        about="",
        deadline_s=5,
        unknown=POLICY,
        planned=tuple(PlannedCheck(check, NoParameters(), 5.0) for check in checks),
        path=Path("test.toml"),
    )


def recording(*probes, state=None):
    return Recording(
        node="n1",
        moment=MOMENT,
        results={item.probe: item for item in probes},
        state=state or NodeState(),
    )


def again(made):
    return parse_recording(json.dumps(made.to_json()), "it")


def found(probes, state, names):
    case = judge_context_for(state, node=CASE.node, moment=MOMENT, purpose=StateUpdate())
    return judge(suite(*names), probes, RunContext(case), FakeClock(MOMENT.t_us))


result = st.builds(
    lambda n, texts, ratio: {"n": n, "words": texts, "ratio": ratio},
    st.integers(-3, 3),
    st.lists(st.sampled_from(["GPU-1", "nvidia", "ok", "ä"]), max_size=3),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
).map(lambda facts: ("facts", facts)) | st.sampled_from(list(UnknownReason)).map(
    lambda reason: ("error", reason)
)


@given(st.dictionaries(st.sampled_from("abc"), result, min_size=1), st.integers(-3, 3))
def test_the_verdict_of_a_recording_is_that_of_the_node(given_looks, before):
    probes = [
        ProbeResult(probe=name, facts=value)
        if kind == "facts"
        else ProbeResult(probe=name, error="could not look", reason=value)
        for name, (kind, value) in given_looks.items()
    ]
    sample = CounterSample(boot_id="b", since_boot_s=10.0, t_us=0, values={"n": float(before)})
    state = NodeState(samples=(sample,))
    names = sorted(given_looks)
    live = found(probes, state, names)
    made = again(recording(*probes, state=state))
    replayed = found(made.results_for(suite(*names), "a"), made.state, names)

    assert replayed == live


def test_what_a_node_knew_of_itself_is_in_it():
    state = NodeState(persistence=True, hangs=(DriverHang(boot_id="b", t_us=1, call="c"),))
    made = replace(recording(state=state), profile="h100", gpus_expected=8)
    read = again(made)

    assert (read.node, read.moment, read.state) == ("n1", MOMENT, state)
    assert (read.profile, read.gpus_expected) == ("h100", 8)


def test_a_probe_that_was_not_recorded_was_not_run():
    (result,) = again(recording()).results_for(suite("a"), "gpus")

    assert (result.error, result.reason) == ("the recording has no 'a'", "not_supported")


def test_without_the_gpus_nothing_is_known_of_them():
    (result,) = again(recording()).results_for(suite("gpus"), "gpus")

    assert (result.error, result.reason) == ("the recording has no 'gpus'", "not_recorded")


def test_the_probe_that_chooses_the_profile_comes_first():
    made = recording(*(ProbeResult(probe=name, facts={"n": 1}) for name in ("a", "b", "gpus")))

    assert [item.probe for item in made.results_for(suite("a", "b", "gpus"), "gpus")] == [
        "gpus",
        "a",
        "b",
    ]


def test_secrets_that_facts_show_are_not_in_it():
    made = recording(ProbeResult(probe="a", facts={"words": ["password=hunter2"]}))

    assert "hunter2" not in json.dumps(made.to_json())


GOOD = recording(ProbeResult(probe="a", facts={"n": 1})).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a recording of `gpuops facts`: not JSON"),
        ("[]", "its schema is not gpuops.facts/"),
        ('{"schema": "gpuops.check/1"}', "its schema is not gpuops.facts/"),
        (json.dumps({**GOOD, "schema": "gpuops.facts/2"}), "is of version 2, made by gpuops"),
        (json.dumps({**GOOD, "node": 3}), "node is a name and looks a table"),
        (json.dumps({**GOOD, "looks": []}), "node is a name and looks a table"),
        (json.dumps({**GOOD, "state": {"x": 1}}), "unknown key 'x'"),
        (json.dumps({**GOOD, "looks": {"a": {}}}), "'error' is missing"),
        (json.dumps({**GOOD, "looks": {"a": {"error": "x", "reason": "odd"}}}), "odd"),
        (json.dumps({key: GOOD[key] for key in GOOD if key != "t_us"}), "'t_us' is missing"),
        (json.dumps({**GOOD, "node": " "}), "node is empty"),
        (json.dumps({**GOOD, "looks": {"a": None}}), "probe 'a' must be a table, got None"),
        (json.dumps({**GOOD, "profile": ["h100"]}), "profile is a name, got ['h100']"),
        (json.dumps({**GOOD, "gpus_expected": "8"}), "from 0 to 1024, got '8'"),
        (json.dumps({**GOOD, "gpus_expected": 1025}), "from 0 to 1024, got 1025"),
        (json.dumps({**GOOD, "gpus_expected": True}), "from 0 to 1024, got True"),
        (json.dumps({**GOOD, "gpus_expected": float("inf")}), "from 0 to 1024, got inf"),
        (json.dumps({**GOOD, "since_boot_s": float("nan")}), "must be a finite number, got nan"),
        (json.dumps({**GOOD, "since_boot_s": 1e300}), "t_us or since_boot_s is out of range"),
        (json.dumps({**GOOD, "t_us": -1}), "t_us or since_boot_s is out of range"),
        (json.dumps({**GOOD, "t_us": 2**63}), "t_us or since_boot_s is out of range"),
        (json.dumps({**GOOD, "t_us": 2**64}), "must be a number of at most 64 bits"),
        ("[" * 200_000, "is not a recording of `gpuops facts`: not JSON"),
    ],
)
def test_what_is_no_recording_is_said_to_be_none(text, message):
    with pytest.raises(UsageError) as raised:
        parse_recording(text, "n1.json")

    assert message in str(raised.value)
    assert "n1.json" in str(raised.value)


def test_facts_of_another_form_are_refused_with_who_made_them():
    made = again(recording(ProbeResult(probe="a", facts={"m": 1})))

    with pytest.raises(UsageError, match=r"recorded by gpuops 0\..*unknown key 'm'"):
        list(made.results_for(suite("a"), "gpus"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GOOD)), values)
def test_any_key_may_be_anything_and_the_error_is_ours(key, value):
    with contextlib.suppress(UsageError):
        assert isinstance(parse_recording(json.dumps({**GOOD, key: value}), "it"), Recording)
