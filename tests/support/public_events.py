"""What is recorded and measured: events that a short run does not make, metrics of a full state."""

from pathlib import Path

from gpuops.agent.checkpoint.api import FinalFlush
from gpuops.agent.checkpoint.keeper_events import SaveCounter, journal_event, read_events
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.status.server import metrics as agent_metrics
from gpuops.agent.status.state import RankStatus, state_json
from gpuops.burnin.measurement import Measurement
from gpuops.checkpoint.types import StateId
from gpuops.checks.core.runner import CheckFailure, CheckRun
from gpuops.cli.check.request import metrics as check_metrics
from gpuops.drill.fault import Fault, InjectionResult
from gpuops.drill.undo import ended_event, injected_event
from gpuops.gate.burnin import measured_events, measured_json
from gpuops.gate.burnin_progress import TestedTest
from gpuops.gate.record import CheckOccasion, events_of
from gpuops.host.clock import FakeClock
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason
from gpuops.store.events import drained_event, repaired_event, resumed_event
from support.agent_states import agent_state, kept
from support.checks import NODE
from support.decisions import decision, report
from support.public_shape import keys, shape
from support.stories import incident, node_incident

GPU = Entity(EntityKind.GPU, "GPU-1")
KEEPER = {
    "state": [1, 57],
    "tier": "memory",
    "rank": 0,
    "bytes": 4096,
    "seconds": 0.5,
    "why": "no room",
    "reason": "no slot",
    "directory": "/states",
    "n": 2,
}
COUNTED = ("committed", "skipped", "given_up", "replicated")
SINGLE = ("restored", "persisted", "read_back", "persist_failed", "corrupt", "replicas_differ")


def findings():
    """Return a finding of each kind."""
    seen = {"check": "gpu_ecc", "entity": GPU, "message": "seen"}
    number = {"value": 3, "unit": "errors", "threshold": "< 1", "source": "nvml"}
    return (
        Finding(status=Status.PASS, check="memory", entity=NODE, message="fine"),
        Finding(status=Status.FAIL, failure_class=FailureClass.GPU_DIAGNOSTIC, **seen, **number),
        Finding(status=Status.UNKNOWN, unknown_reason=UnknownReason.TIMEOUT, **seen),
        Finding(status=Status.WARN, **seen, **{**number, "value": "text"}),
    )


def check_run():
    """Return a run of a suite in which everything happened."""
    return CheckRun(
        suite="prolog",
        node="n1",
        start_us=1_000_000,
        end_us=3_500_000,
        findings=findings(),
        late=("load",),
        failures=(CheckFailure("nvml", "no library", "Traceback"),),
    )


def records():
    """Return the keys of findings, incidents and snapshots of an agent."""
    full = agent_state(
        excluded={"n9": "Xid 79"},
        doubted={"n8": "slow"},
        decision=decision(report("n9")),
        restarts_by_class={"crash.abort": 1},
        badput_s={"detect": 0.5},
        checkpoint=kept(skipped={"no slot": 1}, persisted_step=50, verified_step=50),
        ranks=(RankStatus(rank=0, pid=5, step=41, beat_ns=0),),
    )
    return {
        "finding": shape(*(finding.to_json() for finding in findings())),
        "incident": shape(incident("r", 0).to_json(), node_incident(resolved_us=5).to_json()),
        "check run": shape(check_run().to_json()),
        "agent": shape(state_json(full, 10**9)),
        "metrics of an agent": _metrics(agent_metrics(full, 10**9)),
        "metrics of a check": _metrics(check_metrics(check_run())),
    }


def _metrics(text):
    """Return the kinds of metrics, and each sample without its number: its name and labels."""
    lines = text.decode().splitlines()
    kinds = [line.removeprefix("# TYPE ") for line in lines if line.startswith("# TYPE")]
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    return {"kinds": sorted(kinds), "samples": sorted(samples)}


def events():
    """Return the keys of the payloads that hooks, people, drills and rarer ends of runs record."""
    clock = FakeClock()
    told = [(event.kind, event.payload) for event in _of_nodes(clock)]
    told += _of_runs(clock) + _of_checkpoints()
    kinds = sorted({kind for kind, _payload in told})
    return {kind: keys(*(payload for name, payload in told if name == kind)) for kind in kinds}


def _of_nodes(clock):
    fault = Fault(scenario="kill-rank", breaks="rank 1", undone="never", entities=(GPU,))
    to = {"node": "n1", "clock": clock, "randomness": bytes}
    occasion = CheckOccasion(
        trigger="prolog", job_id="17", gpus=frozenset({"GPU-1"}), mode="observe"
    )
    return [
        drained_event("n1", "gpuops: fail", clock=clock, failure_class=FailureClass.GPU_DIAGNOSTIC),
        resumed_event("n1", "two passes", clock=clock),
        repaired_event("n1", GPU, by="ada", what="a new GPU", clock=clock),
        injected_event(fault, uid=0, **to),
        ended_event(fault, InjectionResult(failed=("a",), not_undone=("b",)), **to),
        *events_of(check_run(), occasion, clock),
        *_of_burnin(clock),
    ]


def _of_burnin(clock):
    measured = Measurement(
        test="gemm", part=GPU, parameters={"dtype": "bf16"}, values=(1.0,), unit="TFLOP/s"
    )
    tested = TestedTest(name="gemm", measurements=(measured,))
    payload = measured_json(measured, tested, "h100-sxm", {"torch": "2.13.0"})
    return measured_events([payload], "run", "n1", clock)


def _of_runs(clock):
    told = []

    def emit(*news):
        told.extend((item.kind, item.payload) for item in news)

    chronicle = RunJournal(emit, clock, run_id="run-1", node="n1", rules=())
    chronicle.suspected(report("n1"), incident("run-1", 0))
    chronicle.excluded("sick", 5)
    chronicle.gate_failed(report("n1"), incident("run-1", 0))
    chronicle.fenced("no word from the board")
    chronicle.rejoined(2.0)
    chronicle.store_unreachable("refused")
    chronicle.store_back(2.0)
    chronicle.drain_requested("SIGTERM", 30.0)
    chronicle.tool_failed("spool", OSError("full"), "Traceback")
    chronicle.tool_failed_again("spool", 3)
    saved = FinalFlush(
        state=StateId(0, 57),
        newest=StateId(0, 57),
        fitted=True,
        seconds=1.0,
        within_s=9.0,
        directory=str(Path("/states")),
    )
    chronicle.saved_last(saved.to_json(), saved.to_text())
    return told


def _of_checkpoints():
    tally = SaveCounter()
    for event in read_events([{"kind": kind, **KEEPER} for kind in COUNTED]):
        tally.add(event)
    found = [(kind, payload) for kind, payload, _severity in tally.take()]
    alone = map(journal_event, read_events([{"kind": kind, **KEEPER} for kind in SINGLE]))
    return found + [(kind, payload) for kind, payload, _severity in alone]
