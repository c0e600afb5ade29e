"""What NVML says of the GPUs, asked in a child: a sick driver blocks, and can crash its caller."""

import time
from dataclasses import replace
from pathlib import Path

from gpuops.errors import ConfigError, ProbeError
from gpuops.host.nvml.facts import GpuProcess, NvmlGpu, NvmlSnapshot, NvmlStatus
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned
from gpuops.host.records import from_json, to_json

# Of the child's time, kept for writing what there is down while a call still hangs.
_WRITE_S = 0.3
_WRITE_SHARE = 0.25


def read_nvml(deadline_s: float, root: Path = Path("/")) -> NvmlSnapshot:
    """Return what NVML says within *deadline_s*; never raises and never hangs.

    A call that hangs keeps its thread, and with it the child; what the others were told is here
    all the same. Names of processes are those of *root*.
    """
    until_s = time.monotonic() + deadline_s - min(_WRITE_S, _WRITE_SHARE * deadline_s)
    try:
        child = probe.start_call(
            lambda: to_json(snapshot_here(until_s)),
            deadline_s=deadline_s,
            question=f"nvml {root}",
            left=abandoned(),
        )
    except ProbeError as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"asking NVML: {exc}")
    return snapshot_from(probe.run(child), root)


def snapshot_from(outcome: probe.ProbeOutcome, root: Path) -> NvmlSnapshot:
    """Return what the child of *outcome* said of NVML, or what its silence means.

    What it said counts although it could not end: a thread in the kernel keeps its process.
    """
    try:
        said = from_json(NvmlSnapshot, probe.last_words(outcome), "the NVML snapshot")
    except ProbeError as exc:
        late = outcome.ending is not probe.ProbeEnd.ENDED
        return NvmlSnapshot(
            status=NvmlStatus.TIMEOUT if late else NvmlStatus.CRASH,
            error=f"NVML {exc}" if late else f"asking NVML: {exc}",
            state=outcome.state,
            hung_s=round(outcome.elapsed_s, 3) if late else None,
        )
    except (ConfigError, ValueError) as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"asking NVML: {exc}")
    return _named(replace(said, state="D" if outcome.state == "D" else said.state), root)


def snapshot_here(until_s: float) -> NvmlSnapshot:
    """Return what NVML says to this very process until *until_s* (monotonic).

    Call it in a child: threads that hang outlive it, and loading the library can block.
    """
    import pynvml

    from gpuops.host.nvml.session import NvmlSession

    return NvmlSession(pynvml).run(until_s)


def _named(snapshot: NvmlSnapshot, root: Path) -> NvmlSnapshot:
    return replace(snapshot, gpus=tuple(_with_names(gpu, root) for gpu in snapshot.gpus))


def _with_names(gpu: NvmlGpu, root: Path) -> NvmlGpu:
    if not gpu.processes:
        return gpu
    named = tuple(replace(process, name=_name(process, root)) for process in gpu.processes)
    return replace(gpu, processes=named)


def _name(process: GpuProcess, root: Path) -> str | None:
    """Return what the kernel calls it; a container sees no other processes, or all as pid 0."""
    try:
        text = (root / f"proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.strip() or None
