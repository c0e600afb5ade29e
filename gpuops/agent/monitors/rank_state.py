"""Diagnoses what a worker without progress is doing, from samples of it; pure.

Without sufficient evidence the diagnosis is `RankState.UNKNOWN`: a wrong one sends people to the
wrong machine.

A rank that evaluates or compiles may be silent for long; one in state T does nothing at all. So it
has the limit of a step, whatever phase it reported. A stop by a debugger (state t) is ignored.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from gpuops.agent.monitors.evidence import RankFacts, WorkerSample
from gpuops.agent.monitors.source_line import Awaited, awaited_in
from gpuops.agent.monitors.stacks import StackFrame, Stacks, ThreadStack
from gpuops.host.process.traffic import Traffic, TrafficKind
from gpuops.host.procfs import parse_stat
from gpuops.host.trust import text_of

# Number of frames that are compared between samples, and that are searched for the kind of a wait.
_COMPARED = 40
_NEAR = 4
# Below this share of a processor a thread that holds the lock does not run: it waits, holding it.
_IDLE_SHARE = 0.1
# Processes of a rank that use so much may work; on a crowded machine one that wants more gets less.
_WORK_SHARE_MIN = 0.02
# In all samples: no heartbeat of a store, no scrape of a metric; less from one connection, which a
# slow download may be. Children that only measure read much of /proc: so much a second.
_MOVED_BYTES_MIN = 2**20
_RECEIVED_BYTES_MIN = 8 * 2**10
# A main thread that waits so often a second, and computes for so long in between, goes round in a
# loop. Python that polls for a file, a queue or a child takes 30 to 80 us for it, or polls seldom.
_WAITS_PER_S_MIN = 1.0
_LOOP_SHARE_MIN = 0.005
_WORK_S_MIN = 150e-6
# Of a recording, also of a main thread that does not wait, or waits for its GPU, and goes on.
_ELSEWHERE_MIN = 0.01
_TORCH = re.compile(r"/torch/")
# Its checkpoints read and write files, and remote calls do anything; where they wait for other
# ranks, c10d is below them.
_COLLECTIVE = re.compile(
    r"/torch/distributed/(?!checkpoint/|rpc/)|/torchft/|/deepspeed/comm/|/horovod/"
)
_GRADIENTS = re.compile(r"/torch/(?:autograd/(?:graph|__init__)|nn/parallel/distributed)\.py$")
_DEVICE = re.compile(r"/torch/(?:cuda|accelerator|xpu)/")
_DATA = re.compile(r"/torch/utils/data/|/datasets/|/webdataset/")
_LOCK = re.compile(r"/torch/utils/file_baton\.py$")
_LOCK_TEXT = (
    "waits for a lock of torch's JIT builds; unless a process builds, a killed build left the file"
    " `lock` in its folder below $TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions: delete it;"
)
STOPPED = "T"
POLL_S = 1.0


class RankState(StrEnum):
    """Why a rank makes no progress."""

    EXITED = "exited"
    STOPPED = "stopped"
    D_STATE = "d_state"
    GIL_HELD = "gil_held"
    IN_COLLECTIVE = "in_collective"
    WAITS_FOR_DEVICE = "waits_for_device"
    IN_USER_CODE = "in_user_code"
    WAITS_FOR_LOCK = "waits_for_lock"
    UNKNOWN = "unknown"

    @property
    def waits_for_others(self) -> bool:
        """Return whether a rank in this state is more likely a victim than the cause."""
        return self in {RankState.IN_COLLECTIVE, RankState.WAITS_FOR_DEVICE}


@dataclass(frozen=True, slots=True)
class RankDiagnosis:
    """What one rank does: ``how`` is a clause for people; ``is_moving``: it works meanwhile.

    ``moves_bytes``: it was seen to read or write files or sockets. ``uses_cpu``: it or a
    child of it used a processor, perhaps only to wait. ``is_certain``: it waits in
    torch, or in a line that only looks at a value of its GPU.
    """

    state: RankState
    how: str
    frames: tuple[StackFrame, ...] = ()
    kernel_stack: tuple[str, ...] = ()
    is_moving: bool = False
    moves_bytes: bool = False
    uses_cpu: bool = False
    is_certain: bool = False

    @property
    def may_work(self) -> bool:
        """Return whether it may work in a way that is not seen."""
        unseen = self.state in {RankState.WAITS_FOR_DEVICE, RankState.UNKNOWN}
        return self.is_moving or self.uses_cpu or unseen


def judge_ranks(facts: Mapping[int, RankFacts]) -> dict[int, RankDiagnosis]:
    """Return the diagnosis of each rank of a node.

    Where the main threads of all wait for other ranks, no upload or log of another thread ends
    that: only what the main threads move, or what comes from other ranks, counts as work.
    """
    found = {rank: judge_rank(each) for rank, each in facts.items()}
    if all(each.state.waits_for_others and each.is_certain for each in found.values()):
        return {rank: judge_rank(each, all_wait=True) for rank, each in facts.items()}
    return found


def judge_rank(facts: RankFacts, *, all_wait: bool = False) -> RankDiagnosis:
    """Return the diagnosis of the rank of *facts*; *all_wait*: as all of its node do."""
    if not facts.samples:
        return RankDiagnosis(RankState.UNKNOWN, "could not be inspected")
    by_process = _by_process_state(facts.samples) or _by_gil(facts.samples)
    found = by_process or _by_stack(facts, all_wait=all_wait)
    return replace(found, uses_cpu=_uses_cpu(facts.samples))


def _by_process_state(samples: Sequence[WorkerSample]) -> RankDiagnosis | None:
    last = samples[-1].process
    if last is None or last.state in "ZX":
        return RankDiagnosis(RankState.EXITED, "has exited")
    if last.state in "Tt":
        by = "a signal (state T)" if last.state == "T" else "a debugger (state t)"
        return RankDiagnosis(RankState.STOPPED, f"is stopped by {by}")
    if len(samples) > 1 and all(s.process is not None and s.process.state == "D" for s in samples):
        where = f" in {last.wchan}" if last.wchan else ""
        how = f"waits inside the kernel{where} (state D); no signal ends that"
        return RankDiagnosis(RankState.D_STATE, how, kernel_stack=last.kernel_stack)
    return None


def _by_gil(samples: Sequence[WorkerSample]) -> RankDiagnosis | None:
    """Return the diagnosis of a thread that waits while it holds the interpreter lock."""
    spied = [sample for sample in samples if sample.spied is not None]
    if len(spied) < 2:
        return None
    owners = [sample.spied.gil_owner for sample in spied if sample.spied is not None]
    owner = owners[0]
    if owner is None or any(other is None or not _same(owner, other) for other in owners[1:]):
        return None
    share = _cpu_share(spied[0], spied[-1])
    if share is None or share >= _IDLE_SHARE or not owner.frames:
        return None
    who = "its main thread" if owner.is_main else f"its thread {owner.name or '?'}"
    how = f"{who} holds the interpreter lock and waits in native code called by {owner.frames[0]}"
    return RankDiagnosis(RankState.GIL_HELD, how, owner.frames)


def _by_stack(facts: RankFacts, *, all_wait: bool) -> RankDiagnosis:
    moves_bytes = (_passes_bytes if all_wait else _moves_bytes)(facts)
    stacks = next((s.stacks for s in reversed(facts.samples) if s.stacks is not None), None)
    main = stacks.main if stacks is not None else None
    if main is None or not main.frames:
        how = "has no readable stack" if stacks is None else "has no Python frame"
        last = facts.samples[-1].process
        where = f"; it waits in the kernel in {last.wchan}" if last and last.wchan else ""
        return RankDiagnosis(
            RankState.UNKNOWN, how + where, is_moving=moves_bytes, moves_bytes=moves_bytes
        )
    # torch releases the interpreter lock where it waits; who holds it computes in Python.
    line = "" if main.owns_gil else facts.source_line or ""
    state, how = _by_frames(main.frames, line)
    moving = moves_bytes or _has_moved(facts.samples)
    if state is RankState.WAITS_FOR_LOCK:
        moving = moves_bytes = False  # it only asks for the lock again
    else:
        moving = moving or _loops(facts, waits_count=state is RankState.IN_USER_CODE)
    if moving:
        how += "; it moved bytes meanwhile" if moves_bytes else "; it moved between samples"
    is_certain = _by_frames(main.frames, "")[0].waits_for_others or awaited_in(line)[1]
    return RankDiagnosis(
        state,
        how,
        main.frames,
        is_moving=moving,
        moves_bytes=moves_bytes,
        is_certain=is_certain,
    )


def _by_frames(frames: Sequence[StackFrame], line: str) -> tuple[RankState, str]:
    top = frames[0]
    lock = next((f for f in frames[:_NEAR] if _LOCK.search(f.file)), None)
    if lock is not None:
        return RankState.WAITS_FOR_LOCK, f"{_LOCK_TEXT} in {lock}"
    near = _torch_frames(frames)[:_NEAR]
    if any(_COLLECTIVE.search(frame.file) for frame in near):
        outer = next(frame for frame in near if _COLLECTIVE.search(frame.file))
        return RankState.IN_COLLECTIVE, f"waits for other ranks in {outer.function}"
    if _GRADIENTS.search(top.file):
        return RankState.IN_COLLECTIVE, "is in the backward pass, where gradients are reduced"
    if _DEVICE.search(top.file):
        return RankState.WAITS_FOR_DEVICE, f"waits for its GPU in {top.function}"
    loader = next((f for f in frames[: 2 * _NEAR] if _DATA.search(f.file)), None)
    if loader is not None:
        return RankState.IN_USER_CODE, f"waits for its data loader in {loader}"
    return _by_source_line(top, line)


def _by_source_line(top: StackFrame, line: str) -> tuple[RankState, str]:
    """Judge a frame that called native code by the text of its statement."""
    awaited, _ = awaited_in(line)
    if awaited is Awaited.RANKS:
        return RankState.IN_COLLECTIVE, f"waits for other ranks in {top}"
    if awaited is Awaited.DEVICE:
        return RankState.WAITS_FOR_DEVICE, f"waits for a value of its GPU in {top}"
    return RankState.IN_USER_CODE, f"is in {top}"


def _torch_frames(frames: Sequence[StackFrame]) -> list[StackFrame]:
    """Return the innermost frames up to the first that is not torch's."""
    found: list[StackFrame] = []
    for frame in frames:
        if not _TORCH.search(frame.file) and not _COLLECTIVE.search(frame.file):
            break
        found.append(frame)
    return found


def _has_moved(samples: Sequence[WorkerSample]) -> bool:
    """Return whether the main thread was in different places."""
    by_source: dict[str, list[Stacks]] = {}
    for sample in samples:
        for stacks in (sample.spied, sample.dumped):
            if stacks is not None and stacks.main is not None:
                by_source.setdefault(stacks.source, []).append(stacks)
    for found in by_source.values():
        mains = [stacks.main for stacks in found]
        if any(a and b and not _same(a, b) for a, b in pairwise(mains)):
            return True
    return False


def _moves_bytes(facts: RankFacts) -> bool:
    """Return whether a rank or a child of it read or wrote, on files or connections."""
    grown, took_s = _grown(facts.samples)
    own = grown.get((TrafficKind.FILES, facts.target.pid), 0)
    children = sum(n for (kind, _), n in grown.items() if kind is TrafficKind.FILES) - own
    return (
        max(own, _most(grown, TrafficKind.SENT)) >= _MOVED_BYTES_MIN
        or children >= _MOVED_BYTES_MIN * max(took_s, 1.0)
        or _most(grown, TrafficKind.RECEIVED) >= _RECEIVED_BYTES_MIN
    )


def _passes_bytes(facts: RankFacts) -> bool:
    """Return whether its main thread read or wrote, or another rank sent something."""
    grown, _ = _grown(facts.samples)
    moved = (_most(grown, kind) for kind in (TrafficKind.MAIN_THREAD, TrafficKind.FROM_RANK))
    return max(moved) >= _MOVED_BYTES_MIN


def _uses_cpu(samples: Sequence[WorkerSample]) -> bool:
    grown, took_s = _grown(samples)
    ticks = sum(amount for (kind, _), amount in grown.items() if kind is TrafficKind.CPU_TICKS)
    return took_s > 0 and ticks / os.sysconf("SC_CLK_TCK") >= _WORK_SHARE_MIN * took_s


def _grown(samples: Sequence[WorkerSample]) -> tuple[Traffic, float]:
    """Return by how much each counter grew, and in how many seconds."""
    known = [(each.at_s, each.traffic) for each in samples if each.traffic is not None]
    if not known:
        return {}, 0.0
    (from_s, before), (to_s, now) = known[0], known[-1]
    return {key: amount - before.get(key, 0) for key, amount in now.items()}, to_s - from_s


def _most(grown: Traffic, kind: TrafficKind) -> int:
    return max((amount for (each, _), amount in grown.items() if each is kind), default=0)


def _loops(facts: RankFacts, *, waits_count: bool) -> bool:
    """Return whether the main thread goes round in a loop and computes in between.

    It waits again and again (*waits_count*), or is recorded elsewhere again and again.
    """
    known = [(sample.at_s, sample.process) for sample in facts.samples if sample.process]
    if len(known) < 2:
        return False
    (from_s, first), (to_s, last) = known[0], known[-1]
    took_s = to_s - from_s
    waits = (last.main_waits or 0) - (first.main_waits or 0)
    cpu_s = (last.main_cpu_s or 0.0) - (first.main_cpu_s or 0.0)
    is_busy = cpu_s >= max(_LOOP_SHARE_MIN * took_s, _WORK_S_MIN * waits)
    goes_on = (facts.elsewhere or 0.0) >= _ELSEWHERE_MIN
    goes_on = goes_on or (waits_count and waits >= _WAITS_PER_S_MIN * took_s)
    return took_s > 0 and is_busy and goes_on


def _same(one: ThreadStack, other: ThreadStack) -> bool:
    return one.frames[:_COMPARED] == other.frames[:_COMPARED]


def _cpu_share(first: WorkerSample, last: WorkerSample) -> float | None:
    took_s = last.at_s - first.at_s
    if first.process is None or last.process is None or took_s <= 0:
        return None
    return (last.process.cpu_s - first.process.cpu_s) / took_s


class StoppedRanks:
    """For how long each rank has been stopped in every poll.

    Time in which this agent did not poll is not counted.
    """

    def __init__(self) -> None:
        self._since_ns: dict[int, int] = {}
        self._polled_ns: int | None = None

    def is_due(self, now_ns: int) -> bool:
        """Return whether it is time for the next poll."""
        return self._polled_ns is None or now_ns - self._polled_ns >= POLL_S * 1e9

    def update(self, states: Mapping[int, str | None], now_ns: int) -> None:
        """Take in the state letters by rank."""
        gap_ns = 0 if self._polled_ns is None else now_ns - self._polled_ns
        if gap_ns > 5 * POLL_S * 1e9:
            self._since_ns.clear()
        self._polled_ns = now_ns
        stopped = {rank for rank, state in states.items() if state == STOPPED}
        self._since_ns = {rank: self._since_ns.get(rank, now_ns) for rank in stopped}

    def clear(self, ranks: Iterable[int]) -> None:
        """Count *ranks*, which have sent a heartbeat, as running."""
        for rank in ranks:
            self._since_ns.pop(rank, None)

    def longer_than(self, limit_s: float, now_ns: int) -> dict[int, float]:
        """Return the ranks that have been stopped for *limit_s*, with their seconds."""
        lasted = {rank: (now_ns - since) / 1e9 for rank, since in self._since_ns.items()}
        return {rank: seconds for rank, seconds in lasted.items() if seconds >= limit_s}


def state_of(pid: int, root: Path = Path("/")) -> str | None:
    """Return the state letter of the main thread of *pid* (proc(5)), None where it is gone."""
    found = parse_stat(text_of(root / f"proc/{pid}/stat") or "")
    return None if found is None else found.state
