"""Read all GPUs from NVML in parallel, in threads, until a deadline.

ctypes releases the interpreter lock during a call, so a slow or hung GPU does not delay the others.
A thread that does not return is abandoned; its `NvmlCaller` has the call. A call that crashes takes
the answers of all GPUs with it: then each GPU is asked again in a process of its own.
"""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuops.errors import ConfigError, ProbeError
from gpuops.host.nvml.caller import GpuLostError, NvmlCaller, NvmlRefused
from gpuops.host.nvml.calls import GROUPS, Groups, identity
from gpuops.host.nvml.facts import (
    OPEN_CALL,
    UNREADABLE,
    CallError,
    GpuProcess,
    NvmlGpu,
    NvmlSnapshot,
    NvmlStatus,
)
from gpuops.host.nvml.plausible import GPUS, why_not
from gpuops.host.nvml.snapshot import snapshot_of
from gpuops.host.process import probe
from gpuops.host.process.abandoned import AbandonedProbes, abandoned
from gpuops.host.records import from_json, to_json

# The share of the child's time that is reserved for writing the results while a call hangs.
_WRITE_S = 0.3
_WRITE_SHARE = 0.25
# Less would make GPUs that are only slow look like hung ones.
_AGAIN_LEAST_S = 0.5
# The signals of a fault in the process itself. SIGKILL is the kernel's, out of memory, or ours.
CRASHES: Mapping[int, str] = {
    number: number.name
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
}


def read_nvml(deadline_s: float, root: Path = Path("/")) -> NvmlSnapshot:
    """Return what NVML reports within *deadline_s*; never raises and never hangs.

    A hung call blocks its thread, and with it the child; the results of other calls are returned
    nevertheless. Names of processes are those of *root*.
    """
    ends_s = time.monotonic() + deadline_s
    (snapshot,) = _ask([_Question(f"nvml {root}")], ends_s, root)
    return snapshot if snapshot.crash is None else _ask_each(snapshot, ends_s, root)


@dataclass(frozen=True, slots=True)
class _Question:
    """What one child reads: the GPUs in *only* (None: all), by the calls in *groups*."""

    name: str
    only: frozenset[int] | None = None
    groups: Groups = GROUPS


def _ask(questions: Sequence[_Question], ends_s: float, root: Path) -> list[NvmlSnapshot]:
    """Return the snapshot of a child for each of *questions*, until *ends_s* (monotonic)."""
    left = abandoned()
    started = [_start_child(question, ends_s, left) for question in questions]
    children = [item for item in started if isinstance(item, probe.ProbeChild)]
    outcomes = {child.pid: outcome for child, outcome in probe.watch(children)}
    return [
        item if isinstance(item, NvmlSnapshot) else snapshot_from(outcomes[item.pid], root)
        for item in started
    ]


def _start_child(
    question: _Question, ends_s: float, left: AbandonedProbes
) -> probe.ProbeChild | NvmlSnapshot:
    deadline_s = ends_s - time.monotonic()
    until_s = ends_s - min(_WRITE_S, _WRITE_SHARE * deadline_s)
    try:
        return probe.start_call(
            lambda: to_json(snapshot_here(until_s, question.only, question.groups)),
            deadline_s=deadline_s,
            question=question.name,
            left=left,
        )
    except ProbeError as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"reading NVML: {exc}")


def _ask_each(crashed: NvmlSnapshot, ends_s: float, root: Path) -> NvmlSnapshot:
    """Return what the GPUs report one by one; *crashed* if none can be asked alone."""
    (opened,) = _ask([_Question(f"nvml {root} count", frozenset())], ends_s, root)
    no_time = ends_s - time.monotonic() < _AGAIN_LEAST_S
    if opened.status is not NvmlStatus.OK or not opened.gpus or no_time:
        return crashed
    indices = range(len(opened.gpus))
    alone = [_Question(f"nvml {root} gpu {index}", frozenset({index})) for index in indices]
    answers = _ask(alone, ends_s, root)
    dead = [index for index in indices if answers[index].crash is not None]
    if len(dead) == len(answers):
        return crashed
    names: dict[int, NvmlSnapshot] = {}
    if ends_s - time.monotonic() >= _AGAIN_LEAST_S:
        named = [replace(alone[index], groups=(identity,)) for index in dead]
        names = dict(zip(dead, _ask(named, ends_s, root), strict=True))
    gpus = tuple(_gpu_alone(index, answers[index], names.get(index)) for index in indices)
    hung = next((gpu for gpu in gpus if gpu.hung_call is not None), None)
    return replace(
        opened,
        gpus=gpus,
        state=next((answer.state for answer in answers if answer.hang), None),
        hung_call=None if hung is None else hung.hung_call,
        hung_s=None if hung is None else hung.hung_s,
        crash=crashed.crash,
    )


def _gpu_alone(index: int, answer: NvmlSnapshot, named: NvmlSnapshot | None) -> NvmlGpu:
    """Return the GPU of *answer*; *named* has its identity if its other calls crash."""
    source = answer if named is None else named
    gpu = source.gpus[index] if index < len(source.gpus) else NvmlGpu(index=index)
    if answer.crash is not None:
        return replace(gpu, crash=answer.crash)
    if answer.status is NvmlStatus.OK:
        return gpu
    if answer.hang is not None:
        return replace(gpu, hung_call=answer.hang, hung_s=answer.hung_s)
    return replace(gpu, error=answer.error, error_code=answer.error_code or UNREADABLE)


def snapshot_from(outcome: probe.ProbeOutcome, root: Path) -> NvmlSnapshot:
    """Return the snapshot of the child of *outcome*, or what its timeout means.

    A snapshot counts even if the child could not exit: a thread in the kernel blocks its process.
    """
    try:
        snapshot = from_json(NvmlSnapshot, probe.read_answer(outcome), "the NVML snapshot")
    except ProbeError as exc:
        signal_name = CRASHES.get(-(outcome.exit_code or 0))
        late = outcome.ending is not probe.ProbeEnd.ENDED
        return NvmlSnapshot(
            status=NvmlStatus.TIMEOUT if late else NvmlStatus.CRASH,
            error=f"NVML {exc}" if late else f"reading NVML: {exc}",
            state=outcome.state,
            crash=None if late else signal_name,
            hung_s=round(outcome.elapsed_s, 3) if late else None,
        )
    except (ConfigError, ValueError) as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"reading NVML: {exc}")
    return _named(replace(snapshot, state="D" if outcome.state == "D" else snapshot.state), root)


def snapshot_here(
    until_s: float, only: frozenset[int] | None = None, groups: Groups = GROUPS
) -> NvmlSnapshot:
    """Return what NVML reports to this process until *until_s* (monotonic).

    Only the GPUs of the indices *only* are asked (None: all), by the calls in *groups*. Call it in
    a child: hung threads continue after it, and loading the library can block.
    """
    import pynvml

    return NvmlSession(pynvml, only, groups).run(until_s)


def _named(snapshot: NvmlSnapshot, root: Path) -> NvmlSnapshot:
    return replace(snapshot, gpus=tuple(_with_names(gpu, root) for gpu in snapshot.gpus))


def _with_names(gpu: NvmlGpu, root: Path) -> NvmlGpu:
    if not gpu.processes:
        return gpu
    named = tuple(replace(process, name=_name(process, root)) for process in gpu.processes)
    return replace(gpu, processes=named)


def _name(process: GpuProcess, root: Path) -> str | None:
    """Return its name in the kernel; a container sees no other processes, or all as pid 0."""
    try:
        text = (root / f"proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.strip() or None


class NvmlSession:
    """One read of all GPUs, or of those in *only*, through pynvml."""

    def __init__(
        self,
        nvml: Any,  # noqa: ANN401 a module without types
        only: frozenset[int] | None = None,
        groups: Groups = GROUPS,
    ) -> None:
        self._nvml = nvml
        self._only = only
        self._groups = groups
        self._opening = NvmlCaller(nvml)
        self._system = NvmlCaller(nvml)
        self._gpus: list[list[NvmlCaller]] = []
        self._threads: list[threading.Thread] = []
        self._until_s = 0.0

    def run(self, until_s: float) -> NvmlSnapshot:
        """Return the results until *until_s* (monotonic)."""
        self._until_s = until_s
        self._start(self._opening, self._open)
        # A thread starts others before it ends, so the list has grown when its `join` returns.
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return snapshot_of(self._opening, self._system, self._gpus, time.monotonic())

    def _start(self, caller: NvmlCaller, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=_run_calls, args=(caller, work), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No more threads can be started: calls in sequence are slower and equally correct.
            _run_calls(caller, work)
        else:
            self._threads.append(thread)

    def _open(self) -> None:
        self._opening.call_nvml("nvmlInit")
        count = self._opening.call_nvml("nvmlDeviceGetCount")
        if (problem := why_not(count, GPUS)) is not None:
            raise NvmlRefused(*problem)
        self._gpus.extend([NvmlCaller(self._nvml)] for _ in range(count))
        self._start(self._system, self._read_system)
        for index in range(count):
            if self._only is None or index in self._only:
                self._start(self._gpus[index][0], partial(self._read_gpu, index))
            else:
                self._gpus[index][0].finished = True

    def _read_system(self) -> None:
        for place, call in (
            ("driver", "nvmlSystemGetDriverVersion"),
            ("nvml_version", "nvmlSystemGetNVMLVersion"),
        ):
            try:
                self._system.found[place] = self._system.call_nvml(call)
            except NvmlRefused:
                continue

    def _read_gpu(self, index: int) -> None:
        callers = self._gpus[index]
        handle = callers[0].call_nvml(OPEN_CALL, index)
        groups = [
            (group, NvmlCaller(self._nvml, handle, until_s=self._until_s)) for group in self._groups
        ]
        callers.extend(caller for _, caller in groups)
        for group, caller in groups:
            self._start(caller, partial(group, caller))


def _run_calls(caller: NvmlCaller, work: Callable[[], None]) -> None:
    try:
        work()
    except GpuLostError:
        return
    except NvmlRefused as refused:
        caller.errors.append(CallError(caller.call, refused.code, refused.text))
    except Exception as exc:  # noqa: BLE001 boundary: a bug in one reader must not lose the others
        text = f"{type(exc).__name__}: {exc}"
        caller.errors.append(CallError(caller.call, UNREADABLE, text))
    finally:
        caller.finished = True
