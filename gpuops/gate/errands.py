"""What a health check does, and the helpers that hooks start in their own session: they may wait.

A health check keeps within the 54 s that slurm/health_check.sh grants.
"""

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gpuops.checks.runner import CheckRun
from gpuops.config import Mode
from gpuops.errors import SlurmError
from gpuops.gate.drain_record import DrainRecord
from gpuops.gate.health import Acted, Bench, Did, act, reason_to_leave
from gpuops.gate.hook import Scene, Settled, settle, tell_decision
from gpuops.gate.publish import Patience, Published, conclude, publish, recorded
from gpuops.gate.remember import record
from gpuops.gate.session import check_node, keeping
from gpuops.gate.sync import sync
from gpuops.incident.gate import Course, Step
from gpuops.model import Event, FailureClass
from gpuops.slurm.nodes import NodeView, Scontrol

HEALTH_PUBLISH_S = 6.0
_JITTER_STEPS = 1000

FindScontrol = Callable[[], Scontrol]


def publish_drain(scene: Scene, drain_id: str, find: FindScontrol) -> Published:
    """Bring the recorded drain *drain_id* to slurmctld, for `gpuops.gate.publish.PUBLISH_S`.

    Raises:
        SlurmError: There is no scontrol.
    """
    drain = recorded(scene.gate.state_dir, uid=scene.gate.uid)()
    if drain is None or drain.id != drain_id:
        return Published(None, f"no drain {drain_id} is recorded on this node")
    tell_decision(scene.memory, drain, Course.DRAIN, scene.clock)
    return _publish(scene, drain, find)


def follow_up(scene: Scene, find: FindScontrol) -> Settled | None:
    """Look once more at a driver that gave a hook no answer; drain where that fails the node.

    None: another one is at it.

    Raises:
        SlurmError: There is no scontrol.
    """
    with _alone(scene.gate.state_dir / "followup.lock") as alone:
        if not alone:
            return None
        ran = check_node(scene.plan, scene.clock)
        kept = keeping(scene.plan, ran)
        settled = settle(scene, ran)
        kept()
        if settled.drain is not None:
            tell_decision(scene.memory, settled.drain, Course.DRAIN, scene.clock)
            _publish(scene, settled.drain, find)
        return settled


def check_health(scene: Scene, find: FindScontrol, jitter_s: float) -> tuple[Settled, Acted]:
    """Check this node after its share of *jitter_s*, and do what that asks for.

    slurmd starts all nodes' health checks at the same instant: their shares differ.
    """
    time.sleep(jitter_s * share(scene.gate.node))
    gate = scene.gate
    amiss = sync(
        gate.store_url,
        cluster=gate.cluster,
        node=gate.node,
        state_dir=gate.state_dir,
        uid=gate.uid,
        clock=scene.clock,
    )
    ran = check_node(scene.plan, scene.clock)
    kept = keeping(scene.plan, ran)
    settled, acted = _settled_and_acted(scene, ran, find)
    trouble = (*settled.trouble, *filter(None, [amiss, kept()]))
    return replace(settled, trouble=trouble), acted


def _settled_and_acted(scene: Scene, ran: CheckRun, find: FindScontrol) -> tuple[Settled, Acted]:
    if scene.gate.mode is Mode.OBSERVE:
        return settle(scene, ran), Acted(Did.NOTHING, "gate.mode is observe")
    try:
        scontrol = find()
        view = scontrol.node(scene.gate.node)
    except SlurmError as exc:
        return settle(scene, ran, str(exc)), Acted(Did.NOTHING, str(exc))
    settled = settle(scene, ran, reason_to_leave(view))
    if settled.drain is not None:
        tell_decision(scene.memory, settled.drain, Course.DRAIN, scene.clock)
    return settled, _act(scene, settled, view, scontrol)


def share(node: str) -> float:
    """Return a number from 0 to 1 that is the same for *node* each time."""
    return zlib.crc32(node.encode()) % _JITTER_STEPS / _JITTER_STEPS


def _act(scene: Scene, settled: Settled, view: NodeView, scontrol: Scontrol) -> Acted:
    before = recorded(scene.gate.state_dir, uid=scene.gate.uid)()
    patience = Patience(limit_s=HEALTH_PUBLISH_S, pause=time.sleep)
    bench = Bench(gate=scene.gate, scontrol=scontrol, patience=patience, clock=scene.clock)
    try:
        acted = act(settled, before, view, bench)
    except SlurmError as exc:
        return Acted(Did.NOTHING, str(exc))
    drain = acted.drain
    if drain is not None and acted.did is Did.KEPT:
        told = replace(drain, why=acted.why)
        tell_decision(scene.memory, told, Course.KEPT, scene.clock)
    if drain is not None and acted.did in {Did.DRAINED, Did.RESUMED}:
        tell = _drained if acted.did is Did.DRAINED else _resumed
        record(lambda: [tell(scene, drain, acted.why)], drain.node, scene.memory, scene.clock)
    return acted


def _publish(scene: Scene, drain: DrainRecord, find: FindScontrol) -> Published:
    read = recorded(scene.gate.state_dir, uid=scene.gate.uid)
    ended = publish(drain, find(), read, Patience(pause=time.sleep), scene.clock)
    conclude(drain, ended, scene.gate.state_dir)
    if ended.step is Step.DONE:
        record(lambda: [_drained(scene, drain, "")], drain.node, scene.memory, scene.clock)
    return ended


def _drained(scene: Scene, drain: DrainRecord, _why: str) -> Event:
    from gpuops.store.node_events import drained

    return drained(
        drain.node,
        drain.reason,
        clock=scene.clock,
        check=drain.check,
        failure_class=FailureClass(drain.failure_class),
        job_id=drain.job_id,
    )


def _resumed(scene: Scene, drain: DrainRecord, why: str) -> Event:
    from gpuops.store.node_events import resumed

    return resumed(drain.node, f"{why}; was {drain.reason}", clock=scene.clock)


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Say whether this is the only process that holds *lock*."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)
