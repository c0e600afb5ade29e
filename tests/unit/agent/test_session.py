"""What one agent keeps of its run, and that it never waits for where it keeps it."""

import threading
import time

from support.decisions import report
from support.exits import RULES
from support.recorders import ListRecorder

from gpuops.agent.journal.payloads import NodeFacts
from gpuops.agent.journal.session import NodeContext, RunSession
from gpuops.agent.launch.identity import RunIdentity
from gpuops.host.clock import FakeClock
from gpuops.incident.cause import judge_exits
from gpuops.incident.decision import ReportKind

NODE = NodeFacts(boot_id="b", boot_us=None, kernel="6", driver=None, gpuops_version="0")


class Held(ListRecorder):
    """A run directory on a file system that does not answer until *go*."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def record(self, *events):
        assert self.go.wait(10)
        super().record(*events)


class Sent:
    """A flush that found nothing to do."""

    remaining = 0
    note = None


def session(folder, recorder):
    around = NodeContext(
        node="n1",
        clock=FakeClock(),
        root=folder,
        run_parent=folder,
        rules=(),
        node_facts=NODE,
        run_facts=lambda _path: None,
        make_recorder=lambda _journal: recorder,
        flush=lambda _deadline_s: Sent(),
    )
    return RunSession(around, RunIdentity("run-1", "20260101T000000Z-x-1"), leads=False)


def payloads(recorder, kind):
    return [event.payload for event in recorder.events if event.kind == kind]


def test_neither_events_nor_the_state_wait_for_the_file_system(tmp_path):
    held = Held()
    made = session(tmp_path, held)
    start = time.monotonic()
    for _ in range(100):
        made.journal.node_seen(NODE)
    made.write_state({"phase": "running"}, group_rank=0)

    assert time.monotonic() - start < 5
    assert held.events == []
    assert not (made.directory.path / "state.json").exists()
    held.go.set()
    made.close("completed", 0, "")
    assert len(payloads(held, "node.seen")) == 101
    assert "running" in (made.directory.path / "state.json").read_text()
    assert held.closed


def test_a_state_that_cannot_be_written_is_a_failure_of_ours(tmp_path):
    recorder = ListRecorder()
    made = session(tmp_path, recorder)
    made.directory.path.rmdir()
    made.directory.path.write_text("in the way")
    made.write_state({}, group_rank=0)
    made.close("completed", 0, "")

    assert payloads(recorder, "tool.failed")[0]["what"] == "writing the run's state"


def test_a_failure_of_ours_that_comes_again_and_again_is_told_once_and_counted(tmp_path, caplog):
    recorder = ListRecorder()
    made = session(tmp_path, recorder)
    for _ in range(1000):
        made.safely("reading heartbeats", lambda: 1 // 0)
    made.safely("something else", lambda: int("x"))
    made.close("completed", 0, "")

    first, other, again = payloads(recorder, "tool.failed")
    assert "ZeroDivisionError" in first["traceback"]
    assert other["what"] == "something else"
    assert (again["what"], again["times"]) == ("reading heartbeats", 999)
    assert again["traceback"] is None
    assert len(caplog.records) == 2


def test_an_agent_that_does_not_lead_closes_what_it_reported(tmp_path):
    recorder = ListRecorder()
    made = session(tmp_path, recorder)
    refused = report("n1", ReportKind.START_FAILED, how="no such program", ends=(), culprits=())
    made.journal.attempt_failed(judge_exits([], RULES), report=refused)
    made.close("failed", 1, "")

    assert [p["state"] for p in payloads(recorder, "incident.recorded")] == ["open", "closed"]
    assert payloads(recorder, "run.ended") == []
