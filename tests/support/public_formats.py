"""Files and bytes that another gpuops, a plug-in or a tool of somebody else's reads, by sample."""

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.plugins import PluginMonitor, read_verdict
from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.image import read_layout, read_metadata_blob
from gpuops.checkpoint.manifest import MANIFEST, Manifest, ShardRecord, encode_manifest
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.directory_files import (
    PINS,
    pin_name,
    quarantine_name,
    shared_name,
    temporary_name,
    trash_name,
)
from gpuops.checkpoint.types import CHUNK_BYTES, Shard, StateId
from gpuops.control.record import ControlRecord, Member, Roster, RunPhase
from gpuops.gate.drain import DrainRecord, ResumeHistory, write_drain, write_resumes
from gpuops.gate.hook import write_verdict
from gpuops.gate.node_state import state_json, state_path
from gpuops.host.node_state import (
    CounterSample,
    DriverHang,
    NodeState,
    OpenIncident,
    Repair,
    Strikes,
)
from gpuops.incident.decision import ReportKind
from gpuops.incident.override import apply_site_decision
from gpuops.model import Confidence, FailureClass, Incident, IncidentState, Side
from gpuops.wire.ring import (
    HEADER_BYTES,
    RECORD_BYTES,
    RING_BYTES,
    SLOTS,
    AgentRequest,
    Beat,
    RingHeader,
    StepSource,
    WorkerFlag,
    WorkerPhase,
    raise_flag,
    write_beat,
    write_header,
    write_request,
)
from support.decisions import cluster, decision, failure, report
from support.made_states import checkpointer_state, image_of, make_state, part, whole
from support.public_shape import shape

STATE = StateId(3, 1200)
W = torch.arange(24.0).reshape(6, 4)
PARTS = {"model.w": part(W, slice(0, 4)), "model.b": whole(torch.ones(3).bfloat16())}
RUN = "0190f6a0-0000-7000-8000-0000abcd1234"
MEMBER = Member(
    agent=RUN, node="n1", address="10.0.0.1", n_workers=8, node_rank_hint=0, master_port=29500
)


def checkpoints():
    """Return a state's files as bytes, and the names in a directory of states."""
    image = image_of(Shard(1, 2), PARTS, b'{"extra": 1}', capacity=64)
    layout = read_layout(image)
    digest = compute_digest(memoryview(image))
    record = ShardRecord(Shard(0, 1), layout.header_hash, digest)
    manifest = Manifest(
        state=STATE,
        world=1,
        shards=(record,),
        created="2026-01-02T03:04:05Z",
        version="0.1.0",
        generation=2,
        job="train",
    )
    return {
        "chunk": CHUNK_BYTES,
        "header of an image": layout.header.decode("latin-1").rstrip(" "),
        "header's bytes": len(layout.header),
        "data of an image": image[len(layout.header) :].hex(),
        "digest of an image": [digest.nbytes, digest.table.hex(), digest.root],
        "manifest": encode_manifest(manifest).decode().splitlines(),
        "names": {
            "manifest": MANIFEST,
            "shard": Shard(1, 4).file_name,
            "state": STATE.name,
            "pins": PINS,
            "pin": pin_name(STATE, "paper"),
            "being written": temporary_name(STATE, "host", 7, bytes(8)),
            "being written by several": shared_name(STATE, "session"),
            "being removed": trash_name(STATE, bytes(8)),
            "made room": quarantine_name(STATE, bytes(8)),
        },
        "directory": _directory(),
        "of a Checkpointer": _saved(),
    }


def _directory():
    with tempfile.TemporaryDirectory() as name:
        store = DirectoryStore(Path(name) / "states")
        store.pin(make_state(store, [PARTS, PARTS], step=10), "paper")
        files = sorted(Path(name).rglob("*"))
        return [f"{path.relative_to(name)} {path.stat().st_mode:o}" for path in files]


def _saved():
    """Return how a Checkpointer lays out a model, its optimizer and the rest."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as name:
        store = DirectoryStore(Path(name) / "states")
        given = {"model": model, "optimizer": optimizer, "extra": {"tokens": 7}}
        state = checkpointer_state(store, 1, **given)
        image = store.local_shard_path(state, Shard(0, 1)).read_bytes()
    layout = read_layout(image)
    return {
        "header": json.loads(layout.header[8:]),
        "extra": shape(json.loads(read_metadata_blob(memoryview(image), layout))),
    }


def ring():
    """Return a heartbeat ring of three beats and a request, up to its last beat."""
    content = bytearray(RING_BYTES)
    write_header(content, RingHeader(rank=3, generation=1, pid=77, start_mono_ns=5))
    write_beat(content, Beat(1, -1, 10, WorkerPhase.STARTING, StepSource.UNKNOWN, 0))
    write_beat(content, Beat(2, 9, 20, WorkerPhase.OTHER, StepSource.REPORTED, 4, "warm-up"))
    step = Beat(3, 10, 30, WorkerPhase.STEPPING, StepSource.OPTIMIZER_STATE, 5)
    write_beat(content, replace(step, data_us=1000, optimizer_us=200, tokens=4096))
    write_request(content, AgentRequest.DRAIN, 12)
    raise_flag(content, WorkerFlag.STOP_POLLED)
    return {
        "slots": SLOTS,
        "bytes": RING_BYTES,
        "header": bytes(content[:HEADER_BYTES]).hex(),
        "beats": [
            bytes(content[begin : begin + RECORD_BYTES]).hex()
            for begin in range(HEADER_BYTES, HEADER_BYTES + 3 * RECORD_BYTES, RECORD_BYTES)
        ],
        **{
            word: [item.value for item in kind]
            for word, kind in {
                "phases": WorkerPhase,
                "sources of steps": StepSource,
                "requests": AgentRequest,
                "flags": WorkerFlag,
            }.items()
        },
    }


def control():
    """Return what the agents of a run have agreed on, as it lies on the board."""
    record = ControlRecord(
        run_id=RUN,
        folder="20260101T000000Z-train-abcd1234",
        generation=1,
        phase=RunPhase.COLLECT,
        since_s=5.0,
        fingerprint="f",
        reason="n9: Xid 79",
        trigger=ReportKind.HANG,
        decided_by="n1",
        excluded={"n9": "Xid 79"},
        suspected={"n8": "slow"},
        history=(failure(0),),
        decision=decision(report("n9"), exclude={"n9": "Xid 79"}),
        drain_signal="SIGTERM",
        drain_step=60,
    )
    roster = Roster(generation=1, members=(MEMBER,), spares=(MEMBER,), metadata={"word": 1})
    return {
        "record": json.loads(record.to_bytes()),
        "roster": json.loads(roster.to_bytes()),
        "phases": [phase.value for phase in RunPhase],
    }


def node_files():
    """Return what a node keeps of itself below the state folder, and a hook's verdict."""
    opened = Incident(
        id="i1",
        failure_class=FailureClass.GPU_DIAGNOSTIC,
        side=Side.INFRA,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.OPEN,
        title="Xid 79",
        first_us=1,
        detected_us=2,
    )
    sample = CounterSample(boot_id="b", since_boot_s=1.5, t_us=5, values={"c:e:n": 2.0})
    who = {"entity_kind": "gpu", "entity_id": "GPU-1"}
    state = NodeState(
        samples=(sample,),
        jobs={"17": sample},
        hangs=(DriverHang(boot_id="b", t_us=5, call="nvmlInit", state="D"),),
        persistence=True,
        repairs=(Repair(**who, t_us=5, by="ada", what="a new GPU"),),
        strikes=(Strikes(**who, count=2, last_us=5, why="Xid 79"),),
        incidents={"gpu GPU-1": OpenIncident(incident=opened, checks=("gpu_xid",))},
        profile="h100-sxm",
    )
    drain = DrainRecord(
        id="d1",
        node="n1",
        hook="prolog",
        reason="gpuops: fail",
        check="gpu_xid",
        failure_class="gpu_hw.diagnostic",
        t_us=5,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_verdict(folder / "verdict")
        write_drain(folder, drain)
        write_resumes(folder, ResumeHistory().with_one("gpu_xid", 5))
        files = {path.name: path.read_text() for path in folder.iterdir()}
    kept = {key: json.loads(text) for key, text in files.items() if key.endswith(".json")}
    return {**kept, "verdict": files["verdict"], state_path(Path()).name: state_json(state)}


def plugins():
    """Return what a site's detector and its own restart decision are asked, and may answer."""
    return {"detector": _detector(), "decision": _decision()}


def _detector():
    asked = []

    def start(_name, told):
        asked.append(json.loads(told))
        return SimpleNamespace(close=lambda wait_s=0.0: None)

    sentry = PluginMonitor(("one",), start)
    workers = [SimpleNamespace(rank=2, pid=102)]
    sentry.begin(MonitoredAttempt(generation=0, node="n1", workers=workers, folder=Path("/run")))
    said = {"why": "slow", "ranks": [2], "blames_node": True, "ends": True}
    said["failure_class"] = "gpu_hw.diagnostic"
    verdict = read_verdict(json.dumps(said).encode(), {2})
    return {"asked": asked[0], "said": said, "understood": list(asdict(verdict).values())}


def _decision():
    answer = {
        "verdict": "restart",
        "reason": "we know better",
        "exclude": {"n2": "ours"},
        "exclude_checkpoint": 5,
        "backoff_s": 1.0,
    }
    with tempfile.TemporaryDirectory() as name:
        plugin, asked = Path(name) / "policy.py", Path(name) / "asked.json"
        plugin.write_text(
            "import json, pathlib\n"
            "def decide(question):\n"
            f"    pathlib.Path({str(asked)!r}).write_text(json.dumps(question))\n"
            f"    return {answer!r}\n"
        )
        said = apply_site_decision(
            decision(report("n1")),
            plugin=str(plugin),
            reports=[report("n1")],
            cluster=cluster("n1", "n2"),
            history=[failure(0)],
            now_s=5.0,
            env={"PATH": os.environ["PATH"]},
        )
        question = json.loads(asked.read_text())
    return {"asked": shape(question), "answer": answer, "stands": said.decision.to_json()}
