"""How an agent takes part in the sweep of its run's nodes: who leads, where, and what it means."""

import json
import sys
from uuid import UUID

import pytest

from gpuops.agent.monitors.preflight import PreflightCheck
from gpuops.agent.monitors.preflight_sweep import SweepPlan
from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import ControlRecord, Member, RunPhase
from gpuops.host.clock import SystemClock
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
NODE = Entity(EntityKind.NODE, "n1")
# Writes its words, its token and what the test has prepared, as the command would.
CHILD = """
import json, os, sys
print(json.dumps([*sys.argv[1:], os.environ["GPUOPS_TOKEN"]]), file=open(os.environ["TO"], "w"))
print(os.environ["ERRORS"], end="", file=sys.stderr)
print(os.environ["OUTPUT"])
sys.exit(int(os.environ["CODE"]))
"""


class Agents:
    """Agents of one run, whose children do what `CHILD` does."""

    def __init__(self, folder):
        self.words, self.script = folder / "words", folder / "child.py"
        self.script.write_text(CHILD)
        self.clock = SystemClock()
        self.store = MemoryControlStore(self.clock)

    def plan(self, number=1, *findings, output=None, errors="", code=0):
        me = Member(agent=str(UUID(int=number)), node=f"n{number}", address="h", n_workers=1)
        record = ControlRecord(
            run_id=str(UUID(int=7)),
            folder="run",
            generation=0,
            phase=RunPhase.RENDEZVOUS,
            since_s=0.0,
        )
        view = join(self.store, me, record, self.clock, lambda _s: None)
        body = json.dumps({"findings": [item.to_json() for item in findings]})
        return SweepPlan(
            env={
                "TO": str(self.words),
                "OUTPUT": body if output is None else output,
                "ERRORS": errors,
                "CODE": str(code),
            },
            command=(sys.executable, str(self.script)),
            control=ControlClient(self.store, me, view, self.clock, fence_timeout_s=None),
            place=f"10.0.0.{number}:4711",
            token="4f" * 16,
            nodes_max=8,
            join_s=30.0,
            deadline_s=60.0,
        )

    def result(self, plan):
        check = PreflightCheck(plan)
        check.start()
        return check.result(100.0)

    def given(self):
        return json.loads(self.words.read_text())


@pytest.fixture
def agents(tmp_path):
    return Agents(tmp_path)


def test_the_first_agent_leads_at_its_own_place_and_whoever_comes_late_is_not_tested(agents):
    plan = agents.plan(1)
    assert agents.result(plan).passed
    words = agents.given()
    assert words[:3] == ["sweep", "--join", "10.0.0.1:4711"]
    assert words[words.index("--name") + 1] == "n1"
    assert words[words.index("--lead") :][:4] == ["--lead", "8", "--join-limit", "30"]
    assert words[-1] == "4f" * 16

    agents.words.unlink()
    late = agents.result(agents.plan(2))
    assert (late.passed, late.reason) == (
        True,
        "the sweep failed: it was over when this node came; the node joins",
    )
    assert not agents.words.exists()


def test_the_others_take_part_where_the_first_one_leads(agents):
    plan = agents.plan(2)
    key = f"{plan.control.keys.prefix}/sweep"
    agents.store.put(key, b"10.0.0.1:4711")

    assert agents.result(plan).passed
    words = agents.given()
    assert words[:3] == ["sweep", "--join", "10.0.0.1:4711"]
    assert words[words.index("--name") + 1] == "n2"
    assert "--lead" not in words
    assert agents.store.get(key).value == b"10.0.0.1:4711"  # its leader says when it is over


def test_a_node_that_failed_stays_out_with_its_class(agents):
    failed = Finding(
        check="sweep",
        entity=NODE,
        status=Status.FAIL,
        message="failed with n2, n3",
        failure_class=FailureClass.NETWORK_NODE_FAILING,
    )
    result = agents.result(agents.plan(1, failed))
    assert (result.passed, result.failure_class) == (False, FailureClass.NETWORK_NODE_FAILING)
    assert result.reason == "the check sweep failed: failed with n2, n3"
    assert result.to_report("n1", 0).culprits == (NODE,)


def test_all_that_a_sweep_says_is_in_the_log(agents):
    warns = Finding(check="sweep", entity=NODE, status=Status.WARN, message="failed with n2")
    plan = agents.plan(1, warns, errors="gpuops: pair n1,n2: fail: slow\n")

    result = agents.result(plan)
    assert (result.passed, result.reason) == (
        True,
        "the sweep: pair n1,n2: fail: slow; warn sweep: failed with n2",
    )


def test_a_sweep_that_says_nothing_is_said_to_say_nothing(agents):
    assert agents.result(agents.plan(1)).reason == "the sweep: it says nothing of this node"


def test_a_sweep_that_was_not_finished_keeps_nobody_out(agents):
    text = "gpuops: the sweep was not finished: no answer\n"
    result = agents.result(agents.plan(1, output="", errors=text, code=75))

    assert (result.passed, result.reason) == (
        True,
        "the sweep gave no result (exit code 75: gpuops: the sweep was not finished: no answer)",
    )


def test_a_control_store_that_does_not_answer_keeps_nobody_out(agents):
    plan = agents.plan(1)
    agents.store.close()
    result = agents.result(plan)

    assert result.passed
    assert result.reason.startswith("the sweep failed: ")
