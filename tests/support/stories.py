"""Streams of events as the agents and checks of a small cluster would write them, by seed."""

import itertools
import random
import uuid
from dataclasses import replace

from sqlalchemy import select

from gpuops.model import (
    ActionKind,
    Confidence,
    Entity,
    EntityKind,
    Event,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Severity,
    Side,
    run_incident_id,
    uuid7,
)
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.schema import COORDINATION_TABLES, metadata
from gpuops.store.spool.format import SpoolLine

START_US = 1_760_000_000_000_000
VOLATILE = {"ingested_us"}


class Teller:
    """Makes events and numbers them, with all its randomness from one seed."""

    def __init__(self, seed=0):
        self.seed = seed
        self.random = random.Random(seed)
        self.now_us = START_US
        self._seq = itertools.count(1)
        self.lines = []

    def event(
        self, kind, payload=None, *, node="n1", run_id=None, attempt=None, severity=20, **more
    ):
        self.now_us += self.random.randrange(1, 5_000_000)
        return Event(
            id=uuid7(self.now_us, self.random.randbytes(10)),
            kind=kind,
            t_us=self.now_us,
            node=node,
            severity=Severity(severity),
            run_id=run_id,
            attempt=attempt,
            payload={**(payload or {}), **more},
        )

    def tell(self, kind, payload=None, *, node="n1", **rest):
        return self.add(self.event(kind, payload, node=node, **rest))

    def add(self, event):
        """Number *event* as one of its node's; return it."""
        writer = uuid.uuid5(uuid.NAMESPACE_DNS, f"{self.seed}.{event.node}").hex[:12]
        origin = f"{event.node}.{writer}"
        self.lines.append(SpoolLine(origin, f"boot-{event.node}", next(self._seq), event))
        return event

    def run_id(self):
        return uuid7(self.now_us, self.random.randbytes(10))


def incident(run_id, attempt, *, authority=2, rev=1, node="n1", **changes):
    """Return a killed rank's incident."""
    values = {
        "id": run_incident_id(run_id, str(attempt)),
        "failure_class": FailureClass.SIGKILL_PROBABLE,
        "side": Side.AMBIGUOUS,
        "confidence": Confidence.PROBABLE,
        "state": IncidentState.OPEN,
        "title": f"rank 1 on {node} was ended by SIGKILL",
        "first_us": START_US + attempt,
        "detected_us": START_US + attempt + 5,
        "run_id": run_id,
        "attempt": attempt,
        "culprits": (Entity(EntityKind.RANK, "1"), Entity(EntityKind.NODE, node)),
        "culprit_how": "earliest failure",
        "evidence": (
            Evidence(role=Role.ROOT, text="ended by SIGKILL", lines=("step 7", "step 8")),
            Evidence(role=Role.SYMPTOM, text="peer closed", lines=("Connection closed",)),
        ),
        "actions": (ActionKind.RESTART,),
        "lost_s": {"detect": 0.5},
        "authority": authority,
        "rev": rev,
    }
    return Incident(**{**values, **changes})


def node_incident(node="n1", gpu="GPU-1", **changes):
    """Return an incident of a node's GPU that a hook's check found."""
    values = {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{node}/{gpu}")),
        "failure_class": FailureClass.GPU_FELL_OFF_BUS,
        "side": Side.INFRA,
        "confidence": Confidence.CONFIRMED,
        "state": IncidentState.OPEN,
        "title": f"gpu {gpu} on {node}: Xid 79",
        "first_us": START_US,
        "detected_us": START_US,
        "culprits": (Entity(EntityKind.GPU, gpu), Entity(EntityKind.NODE, node)),
        "culprit_how": "check kernel_log",
        "evidence": (Evidence(role=Role.ROOT, text="Xid 79"),),
        "actions": (ActionKind.DRAIN,),
    }
    return Incident(**{**values, **changes})


def story(seed=0, *, nodes=("n1", "n2"), attempts=2, minutes=2):
    """Return the lines of one run on *nodes*: every kind of event, one failure an attempt."""
    teller = Teller(seed)
    run = teller.run_id()
    for rank, node in enumerate(nodes):
        teller.tell("node.seen", node=node, boot_us=START_US, kernel="6.1", driver=f"570.{rank}")
        teller.tell("check.ran", node=node, **_check(teller))
        teller.tell("run.started", node=node, run_id=run, **_run(node))
    for ordinal in range(attempts):
        last = ordinal == attempts - 1
        for rank, node in enumerate(nodes):
            _attempt(teller, run, ordinal, rank, node, minutes, failed=not last)
        if not last:
            _incident(teller, run, ordinal, nodes)
            _decision(teller, run, ordinal, nodes)
    for node in nodes:
        outcome = {"outcome": "completed", "exit_code": 0, "reason": "done"}
        teller.tell("run.ended", node=node, run_id=run, attempt=attempts - 1, **outcome)
    _repair(teller, nodes[0])
    for error in ("no library", "no library again"):
        teller.tell("tool.failed", node=nodes[0], what="nvml", error=error, traceback=None)
    _burnin(teller, nodes)
    return teller.lines


def _run(node):
    return {
        "name": "train",
        "user": "ada",
        "command": ["train.py", "--lr", "0.1"],
        "cluster": "c1",
        "run_dir": f"/runs/{node}",
        "torch_version": "2.13",
        "gpuops_version": "0.1.0",
        "max_restarts": 3,
        "slurm_job_id": None,
    }


def _check(teller):
    value = teller.random.uniform(1, 100)
    finding = {
        "check": "memory",
        "entity": {"kind": "node", "id": "n1"},
        "status": "pass",
        "value": value,
        "unit": "GB",
        "threshold": "> 1",
        "source": "kernel",
        "message": f"{value} GB are free",
        "failure_class": None,
        "unknown_reason": None,
    }
    late = {**finding, "check": "mounts", "value": "ro", "status": "unknown"}
    gpu = {**finding, "check": "gpu_ecc", "entity": {"kind": "gpu", "id": "GPU-1"}}
    return {
        "suite": "prolog",
        "trigger": "prolog",
        "start_us": teller.now_us,
        "end_us": teller.now_us + 1000,
        "verdict": "unknown",
        "findings": [finding, late, gpu],
        "late": ["mounts"],
        "job_id": "17",
        "profile": "h100",
        "mode": "observe",
        "boot_us": teller.now_us - 99,
    }


def checks_again(lines):
    """Return lines that say of each check run in *lines* that a later one found the same."""
    teller = Teller("again")
    for check in (line.event for line in lines if line.event.kind == "check.ran"):
        told = {name: check.payload[name] for name in ("suite", "trigger", "verdict")}
        told |= {"first_us": check.payload["start_us"], "start_us": check.t_us + 9}
        told |= {"run": check.id, "runs": 2, "numbers": {"memory[GB]": 1.5}}
        teller.tell("check.unchanged", node=check.node, **told)
    return teller.lines


def _attempt(teller, run, ordinal, rank, node, minutes, *, failed):
    def tell(kind, severity=20, **payload):
        teller.tell(kind, node=node, run_id=run, attempt=ordinal, severity=severity, **payload)

    tell(
        "attempt.started",
        start_us=teller.now_us,
        world_size=4,
        n_nodes=2,
        group_rank=rank,
        torch_run_id="job",
        log_dir=f"/logs/{node}/{ordinal}",
        slurm_job_id=None,
        slurm_restart_count=0,
    )
    tell("attempt.first_step", first_step_us=teller.now_us, step=1, step_source="optimizer_state")
    for minute in range(minutes):
        tell(
            "attempt.progress",
            minute_us=START_US + 60_000_000 * minute,
            step_last=10 * minute + rank,
            beats=100 + rank,
            step_time_p50_us=teller.random.randrange(1000, 2000),
            step_time_max_us=teller.random.randrange(2000, 3000),
        )
    if ordinal:
        tell("attempt.caught_up", redo_done_us=teller.now_us, step=21)
    if failed:
        tell("worker.exited", severity=40, rank=rank, signal="SIGKILL", log_tail=["a", "b"])
    tell(
        "attempt.ended",
        end_us=teller.now_us,
        outcome="failed" if failed else "completed",
        last_step_us=teller.now_us - 5,
        steps_first=1,
        steps_last=20 + rank,
        beats=120 + rank,
        exit_code=-9 if failed else 0,
    )


def _burnin(teller, nodes):
    """Have each node measure one GPU, and two rounds of a sweep test the two."""
    for node in nodes:
        teller.tell("burnin.measured", measured("a-run-that-is-still-to-come"), node=node)
    for number in range(2):
        teller.tell("sweep.tested", pair(*nodes, round=number), node=nodes[0])


def measured(check_run, **changes):
    """Return the payload of a measurement of a GPU in the run *check_run*."""
    return {
        "check_run": check_run,
        "suite": "burnin",
        "test": "gemm",
        "part": {"kind": "gpu", "id": "GPU-1"},
        "parameters": "dtype=bf16 size=8192",
        "value": 790.5,
        "spread_percent": 0.5,
        "repeats": 5,
        "unit": "TFLOP/s",
        "higher_is_better": True,
        "status": "pass",
        "shape": "h100-sxm",
        "software": {"driver": "570.124", "nccl": "2.27.7"},
        **changes,
    }


def burnin(teller, node="n1", status="pass", values=(790.0, 780.0), findings=(), **changes):
    """Tell of a run with one measurement for each of *values*; return the run's id."""
    run_id = teller.run_id()
    for number, value in enumerate(values):
        part = {"kind": "gpu", "id": f"GPU-{number}"}
        teller.tell(
            "burnin.measured", measured(run_id, part=part, value=value, **changes), node=node
        )
    check = {"suite": "burnin", "trigger": "manual", "verdict": status, "parts": []}
    check["findings"] = [finding.to_json() for finding in findings]
    event = teller.event(
        "check.ran", check, node=node, start_us=teller.now_us, end_us=teller.now_us
    )
    teller.add(replace(event, id=run_id))
    return run_id


def pair(first="n1", second="n2", **changes):
    """Return the payload of a test of two nodes."""
    return {
        "sweep": "sweep-1",
        "round": 0,
        "nodes": [first, second],
        "rail": None,
        "outcome": "pass",
        "value": 365.0,
        "unit": "GB/s",
        "parameters": "collective=all_reduce size=4294967296",
        **changes,
    }


def _repair(teller, node):
    gpu = {"kind": "gpu", "id": "GPU-1"}
    for rev, state in enumerate((IncidentState.OPEN, IncidentState.CLOSED), start=1):
        told = node_incident(node, first_us=teller.now_us, rev=rev, state=state)
        teller.tell("incident.recorded", told.to_json(), node=node, severity=40)
    drain = {"reason": "gpuops:FAIL kernel_log GPU-1", "actor": "gpuops", "job_id": "17"}
    teller.tell("node.drained", drain, node=node, severity=40)
    teller.tell("node.repaired", node=node, entity=gpu, by="ada", what="a new GPU")
    teller.tell("node.resumed", node=node, reason="two passes", actor="gpuops")


def _incident(teller, run, ordinal, nodes):
    for authority, node in zip((2, 1), nodes, strict=False):
        for rev, state in enumerate((IncidentState.OPEN, IncidentState.CLOSED), start=1):
            snapshot = incident(
                run,
                ordinal,
                authority=authority,
                rev=rev,
                node=node,
                state=state,
                lost_s={"detect": 0.5, "restart": 1.25 * rev},
            )
            teller.tell(
                "incident.recorded",
                snapshot.to_json(),
                node=node,
                run_id=run,
                attempt=ordinal,
                severity=40,
            )


def _decision(teller, run, ordinal, nodes):
    """Have the last node decide, and each node tell that it is left out."""
    teller.tell(
        "decision.made",
        decision_payload(ordinal),
        node=nodes[-1],
        run_id=run,
        attempt=ordinal,
        severity=40,
    )
    for node in nodes:
        told = {"excluded": nodes[0], "reason": f"sick, says {node}"}
        teller.tell("node.excluded", told, node=node, run_id=run, attempt=ordinal)


def decision_payload(ordinal, **changes):
    """Return the payload of a decision; *changes* are to the decision itself."""
    made = {
        "verdict": "restart",
        "rule": "worker-failed",
        "reason": "a worker failed and the budget is not spent",
        "exclude": {"n1": "sick"},
        "backoff_s": 1.5,
        "exit_code": None,
        **changes,
    }
    return {
        "decision": made,
        "reports": [{"node": "n1", "kind": "workers_failed", "generation": ordinal}],
        "reports_total": 1,
        "cluster": {"generation": ordinal, "members": ["n1", "n2"]},
        "history": [],
        "budget": {"used": 1 + ordinal, "max": 3, "window_s": None},
        "note": "site: agreed",
    }


def envelopes(lines, *, cluster="c1", uid=0):
    """Return *lines* on their way into a store."""
    return [EventEnvelope(line, cluster, uid) for line in lines]


def dump(connection):
    """Return every row of the tables that events make, as plain tuples without times of arrival."""
    rows = {}
    for table in (t for t in metadata.sorted_tables if t not in COORDINATION_TABLES):
        columns = [column for column in table.columns if column.name not in VOLATILE]
        found = connection.execute(select(*columns))
        rows[table.name] = sorted(repr(tuple(row)) for row in found)
    return rows
