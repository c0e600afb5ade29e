"""What a node saves from one check to the next (`gpuops.host.node_state`), and its file.

`judge_context_for` and `state_after` are pure. The file, ``node.json``, is writable only by its
owner. No verdict depends on it: what cannot be read or trusted is left out with a note, and a disk
that hangs costs `READ_S` and `SAVE_S`. Nothing is synced: after a power cut the file may be old or
torn, and both are handled.
"""

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.kernel_rules import PROBE as KERNEL_LOG_PROBE
from gpuops.checks.core.kernel_rules import KernelFacts, memory_after
from gpuops.checks.core.runner import CheckRun
from gpuops.errors import ConfigError, ProbeError
from gpuops.host.gpu_names import Gpus
from gpuops.host.node_state import (
    BootMoment,
    Counters,
    CounterSample,
    DriverCrash,
    DriverHang,
    NodeState,
    boot_id,
    since_boot_s,
)
from gpuops.host.nvml.facts import HANG_S, NvmlSnapshot, NvmlStatus
from gpuops.host.process import probe
from gpuops.host.process.abandoned import AbandonedProbes
from gpuops.host.records import from_json, to_json
from gpuops.host.trust import atomic_write, refuse_foreign_file, why_not_ours
from gpuops.model import Entity, Json

READ_S = 0.5
SAVE_S = 0.5
LOCK_S = 0.3
VERSION = 1
_SCHEMA = "gpuops.node-state/"
# Eight GPUs and eight ports come to 1 MB in a day; a probe's answer may be 8 MiB.
_BYTES_MAX = 7 * 2**20
_POLL_S = 0.005

Change = Callable[[NodeState], NodeState]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNodeState:
    """What a node saved; ``boot_id`` as in `gpuops.host.node_state.BootMoment`.

    ``note``: why something is missing, or None.
    """

    state: NodeState = field(default_factory=NodeState)
    boot_id: str = ""
    since_boot_s: float = 0.0
    note: str | None = None


class StateError(Exception):
    """The file must not be used, or cannot be written; the message says why."""


class NewerStateError(StateError):
    """A later gpuops wrote the file; it stays as it is."""


def state_path(state_dir: Path) -> Path:
    """Return the path of the file below *state_dir*."""
    return state_dir / "node.json"


def load_state(
    state_dir: Path,
    root: Path,
    uid: int,
    left: AbandonedProbes,
    *,
    deadline_s: float = READ_S,
) -> StoredNodeState:
    """Return the saved state and which boot this is, within *deadline_s*.

    *left*: see `gpuops.host.process.probe.start_call`. The caller must have a single thread.
    """
    path = state_path(state_dir)
    try:
        boot, uptime_s, text, note = probe.ask(
            lambda: _read_all(path, root, uid), deadline_s, question=f"read {path}", left=left
        )
    except ProbeError as exc:
        return StoredNodeState(note=f"{path} is left out: {exc}")
    state = NodeState()
    if text is not None:
        try:
            state = parse_state(text)
        except StateError as exc:
            note = f"{path} is left out: {exc}"
    return StoredNodeState(state=state, boot_id=boot, since_boot_s=uptime_s, note=note)


def _read_all(path: Path, root: Path, uid: int) -> tuple[str, float, str | None, str | None]:
    boot, uptime_s = boot_id(root), since_boot_s(root)
    boot = "" if boot == "unknown" else boot
    try:
        return boot, uptime_s, _read(path, uid), None
    except StateError as exc:
        return boot, uptime_s, None, f"{path} is left out: {exc}"


def read_state(state_dir: Path, uid: int) -> NodeState:
    """Return the state in the file below *state_dir*, an empty one if there is none.

    Raises:
        StateError: It is not to be trusted, or is not a state of this or an earlier gpuops.
    """
    text = _read(state_path(state_dir), uid)
    return NodeState() if text is None else parse_state(text)


def _read(path: Path, uid: int) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StateError(_why(exc)) from exc
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StateError("it is not a file")
        if found.st_uid != uid:
            raise StateError(f"it belongs to user {found.st_uid}, not to {uid}")
        refuse_foreign_file(path, uid=uid)
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read(_BYTES_MAX + 1)
    except (ConfigError, OSError) as exc:
        raise StateError(str(exc)) from exc
    finally:
        os.close(fd)
    if len(content) > _BYTES_MAX:
        raise StateError(f"it is larger than {_BYTES_MAX} bytes")
    return content.decode("utf-8", errors="replace")


def _why(error: OSError) -> str:
    # The error of O_NOFOLLOW for a link.
    return "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)


def parse_state(text: str) -> NodeState:
    """Return the state that *text* holds.

    Raises:
        StateError: See `read_state`.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise StateError("it is not JSON: torn, or not ours") from None
    if not isinstance(body, dict) or not str(body.get("schema", "")).startswith(_SCHEMA):
        raise StateError("it is not a node's state")
    version = str(body["schema"]).removeprefix(_SCHEMA)
    if version != str(VERSION):
        newer = version.isdecimal() and int(version) > VERSION
        kind = NewerStateError if newer else StateError
        raise kind(f"it is of version {version}; this gpuops knows {VERSION}")
    try:
        return from_json(NodeState, body.get("state"), "the state")
    except (ConfigError, ValueError) as exc:
        raise StateError(str(exc)) from exc


def state_json(state: NodeState) -> Json:
    """Return *state* as the file holds it."""
    return {"schema": f"{_SCHEMA}{VERSION}", "state": to_json(state)}


def change_state(state_dir: Path, uid: int, change: Change, *, lock_s: float = LOCK_S) -> NodeState:
    """Apply *change* to the saved state under a lock, and return the new state.

    A file that cannot be read as a state is replaced, except one of a later gpuops.

    Raises:
        StateError: It cannot be written, is a later gpuops', or was locked for *lock_s*.
    """
    problem = why_not_ours(state_dir, private=False)
    if problem is not None:
        raise StateError(f"{state_dir}: {problem}")
    path = state_path(state_dir)
    try:
        with _locked(path.with_suffix(".lock"), lock_s):
            try:
                before = read_state(state_dir, uid)
            except NewerStateError:
                raise
            except StateError:
                before = NodeState()
            after = change(before)
            if after != before:
                text = json.dumps(state_json(after), separators=(",", ":"))
                atomic_write(path, text.encode(), 0o600)
            return after
    except OSError as exc:
        raise StateError(f"{exc.filename or path}: {exc.strerror}") from exc


@contextmanager
def _locked(path: Path, lock_s: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until_s = time.monotonic() + lock_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise StateError(f"{path} is locked by another for {lock_s:g} s") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def save_state(
    state_dir: Path,
    uid: int,
    change: Change,
    left: AbandonedProbes,
    *,
    deadline_s: float = SAVE_S,
) -> Callable[[], str | None]:
    """Start `change_state` in a child; call the result for what went wrong, or None.

    That takes at most *deadline_s* from now. *left*: see `gpuops.host.process.probe.start_call`.
    The caller must have a single thread.
    """
    try:
        child = probe.start_call(
            lambda: _changed(state_dir, uid, change),
            deadline_s=deadline_s,
            question=f"save {state_path(state_dir)}",
            left=left,
        )
    except ProbeError as exc:
        text = str(exc)
        return lambda: text

    def wait() -> str | None:
        try:
            problem: str | None = probe.answer_of(child)
        except ProbeError as exc:
            return str(exc)
        return problem

    return wait


def _changed(state_dir: Path, uid: int, change: Change) -> str | None:
    try:
        change_state(state_dir, uid, change)
    except StateError as exc:
        return str(exc)
    return None


GPUS_PROBE = "gpus"
PROLOG = "prolog"

SAMPLE_EVERY_S = 3600.0
SAMPLE_AGE_MAX_S = 26 * 3600.0
SAMPLES_MAX = 104
JOBS_MAX = 32
JOB_AGE_MAX_S = 30 * 86400.0
HANGS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUpdate:
    """What a check is for: its caller (``prolog``, ``epilog``, …), and its Slurm job."""

    trigger: str = "manual"
    job_id: str | None = None


def judge_context_for(
    state: NodeState,
    *,
    node: Entity,
    moment: BootMoment,
    purpose: StateUpdate,
    gpus: frozenset[str] | None = None,
) -> JudgeContext:
    """Return what judges know of *node* at *moment*.

    After a job the counters' baseline is their value at that job's prolog, if that is known.
    """
    own = None if purpose.trigger == PROLOG else state.jobs.get(purpose.job_id or "")
    counters = Counters(
        boot_id=moment.boot_id,
        since_boot_s=moment.since_boot_s,
        t_us=moment.t_us,
        samples=(own,) if own is not None else state.samples,
    )
    return JudgeContext(
        node=node,
        counters=counters if moment.boot_id else Counters(),
        gpus=gpus,
        hangs=tuple(hang for hang in state.hangs if hang.boot_id == moment.boot_id != ""),
        crashes=tuple(item for item in state.crashes if item.boot_id == moment.boot_id != ""),
        persistence=state.persistence,
        repairs=state.repairs,
        strikes=state.strikes,
        boot_us=moment.t_us - round(moment.since_boot_s * 1e6),
    )


def state_after(
    state: NodeState, check_run: CheckRun, *, moment: BootMoment, purpose: StateUpdate
) -> NodeState:
    """Return the state to save after *check_run*, which started at *moment*."""
    if not moment.boot_id:
        return state
    gpus = check_run.facts.get(GPUS_PROBE)
    if isinstance(gpus, Gpus):
        state = _after_crash(_after_nvml(state, gpus.nvml, moment), gpus.nvml, moment)
        state = replace(state, profile=check_run.profile)
    log = check_run.facts.get(KERNEL_LOG_PROBE.name)
    if isinstance(log, KernelFacts):
        state = replace(state, kernel=memory_after(state.kernel, log, moment.boot_id))
    sample = CounterSample(
        boot_id=moment.boot_id,
        since_boot_s=moment.since_boot_s,
        t_us=moment.t_us,
        values=dict(check_run.counters),
    )
    return replace(
        state,
        samples=_samples(state.samples, sample, moment),
        jobs=_jobs(state.jobs, sample, moment, purpose),
    )


def _samples(
    samples: tuple[CounterSample, ...], now: CounterSample, moment: BootMoment
) -> tuple[CounterSample, ...]:
    """Return *samples* and those counters of *now* that have no sample of the last hour.

    By counter, so that a suite that reads few does not delay the others' samples.
    """
    kept = tuple(item for item in samples if _is_kept(item, moment))
    recent = {
        name
        for item in kept
        if item.boot_id == now.boot_id and moment.age_s(item) < SAMPLE_EVERY_S
        for name in item.values
    }
    due = {name: value for name, value in now.values.items() if name not in recent}
    if due:
        kept = (*kept, replace(now, values=due))
    return kept[-SAMPLES_MAX:]


def _is_kept(sample: CounterSample, moment: BootMoment) -> bool:
    """Return whether *sample* is still useful; a future one only if the boot was another."""
    age_s = moment.age_s(sample)
    return age_s <= SAMPLE_AGE_MAX_S and (age_s >= 0 or sample.boot_id != moment.boot_id)


def _jobs(
    jobs: Mapping[str, CounterSample], now: CounterSample, moment: BootMoment, purpose: StateUpdate
) -> Mapping[str, CounterSample]:
    """Return *jobs* with this prolog's or without this epilog's, and only of this boot."""
    kept = {
        job_id: sample
        for job_id, sample in jobs.items()
        if sample.boot_id == moment.boot_id
        and 0 <= moment.age_s(sample) <= JOB_AGE_MAX_S
        and not (purpose.trigger == "epilog" and job_id == purpose.job_id)
    }
    if purpose.trigger == PROLOG and purpose.job_id:
        kept.pop(purpose.job_id, None)
        kept[purpose.job_id] = now
    return dict(list(kept.items())[-JOBS_MAX:])


def _after_nvml(state: NodeState, nvml: NvmlSnapshot, moment: BootMoment) -> NodeState:
    """Return *state* with one more hang of the driver, or with none if it answered."""
    reported = [gpu.modes.persistence for gpu in nvml.gpus if gpu.modes.persistence is not None]
    if reported:
        state = replace(state, persistence=all(reported))
    silent = [(nvml.hang, nvml.hung_s), *((gpu.hung_call, gpu.hung_s) for gpu in nvml.gpus)]
    calls = [(call, waited_s) for call, waited_s in silent if call is not None]
    hung = [call for call, waited_s in calls if waited_s is None or waited_s >= HANG_S]
    if hung:
        hang = DriverHang(boot_id=moment.boot_id, t_us=moment.t_us, call=hung[0], state=nvml.state)
        earlier = tuple(item for item in state.hangs if item.boot_id == moment.boot_id)
        return replace(state, hangs=(*earlier, hang)[-HANGS_MAX:])
    if not calls and nvml.status in {NvmlStatus.OK, NvmlStatus.ERROR}:
        return replace(state, hangs=())
    return state


def _after_crash(state: NodeState, nvml: NvmlSnapshot, moment: BootMoment) -> NodeState:
    """Return *state* with one more crash of NVML, or with none if every GPU answered."""
    found = [gpu.crash for gpu in nvml.gpus if gpu.crash is not None]
    if nvml.status is NvmlStatus.CRASH and nvml.crash is not None:
        found = [nvml.crash]
    if found:
        crash = DriverCrash(boot_id=moment.boot_id, t_us=moment.t_us, signal=found[0])
        earlier = tuple(item for item in state.crashes if item.boot_id == moment.boot_id)
        return replace(state, crashes=(*earlier, crash)[-HANGS_MAX:])
    if nvml.hang is None and nvml.status in {NvmlStatus.OK, NvmlStatus.ERROR}:
        return replace(state, crashes=())
    return state
