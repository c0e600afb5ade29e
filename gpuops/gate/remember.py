"""Record a check run: one event in the spool, and a detached flusher that takes it to the store.

No verdict waits for it: a spool that hangs costs `RECORD_S`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuops.checks.runner import CheckRun
from gpuops.errors import ProbeError
from gpuops.host import probe
from gpuops.host.abandoned import abandoned
from gpuops.host.clock import Clock
from gpuops.host.commands import spawn_detached
from gpuops.host.node import boot_id
from gpuops.log import printable
from gpuops.model import Event, Severity, Status

# Part of the sum in checks/suites/prolog.toml.
RECORD_S = 1.0

_SEVERITY = {Status.FAIL: Severity.ERROR, Status.UNKNOWN: Severity.WARNING} | {
    Status.WARN: Severity.WARNING
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where records go. ``config_file``: the one named on the command line, for the flusher."""

    spool_dir: Path
    spool_bytes_max: int
    root: Path
    config_file: Path | None
    environ: dict[str, str]


def events_of(ran: CheckRun, trigger: str, clock: Clock) -> list[Event]:
    """Return what is recorded of *ran*: the run itself, and each failure of gpuops in it."""
    from gpuops.store.new_event import new_event

    payload = {
        "suite": ran.suite,
        "trigger": trigger,
        "start_us": ran.start_us,
        "end_us": ran.end_us,
        "verdict": ran.verdict.word,
        "findings": [finding.to_json() for finding in ran.findings],
        "late": list(ran.late),
    }
    severity = _SEVERITY.get(ran.verdict, Severity.INFO)
    events = [
        new_event("check.ran", node=ran.node, clock=clock, severity=severity, payload=payload)
    ]
    for failure in ran.failures:
        payload = {
            "what": failure.what,
            "error": failure.error,
            "traceback": failure.traceback,
        }
        events.append(
            new_event(
                "tool.failed",
                node=ran.node,
                clock=clock,
                severity=Severity.WARNING,
                payload=payload,
            )
        )
    return events


def remember(ran: CheckRun, trigger: str, memory: Memory, clock: Clock) -> str | None:
    """Spool *ran* and start a flusher; return what went wrong, None where nothing did.

    The caller must have a single thread.
    """
    return record(lambda: events_of(ran, trigger, clock), ran.node, memory, clock)


def record(
    events: Callable[[], list[Event]], node: str, memory: Memory, clock: Clock
) -> str | None:
    """Spool what *events* makes and start a flusher; return what went wrong, None for nothing.

    The caller must have a single thread.
    """
    try:
        child = probe.start_call(
            lambda: _spooled(memory, node, events(), clock),
            deadline_s=RECORD_S,
            question=f"record {memory.spool_dir}",
            left=abandoned(),
        )
        outcome = probe.run(child)
        probe.answer(outcome)
    except ProbeError as exc:
        return f"gpuops: this result is not recorded: {printable(str(exc))}"
    if outcome.errors:
        return printable(outcome.errors.decode(errors="replace").rstrip("\n"))
    config = ["--config", str(memory.config_file)] if memory.config_file else []
    # -P: as root, never import from the directory in which the job happens to be.
    argv = [sys.executable, "-P", "-m", "gpuops", *config, "db", "flush", "--quiet"]
    try:
        spawn_detached(argv, memory.environ)
    except OSError as exc:
        return f"gpuops: recorded, but cannot start the flusher: {exc.strerror}"
    return None


def _spooled(memory: Memory, node: str, events: list[Event], clock: Clock) -> None:
    from gpuops.store.recorder import spool_recorder

    recorder = spool_recorder(
        memory.spool_dir,
        node=node,
        boot_id=boot_id(memory.root),
        bytes_max=memory.spool_bytes_max,
        clock=clock,
    )
    recorder.record(*events)
    recorder.close()
