"""What a run of the preflight suite means for a node that wants to join.

A check that failed keeps the node out. A failure of gpuops itself, or of its rights, never does:
it would stop training that torchrun would have started.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuops.errors import EXIT_FAIL, EXIT_OK
from gpuops.host.process.bounded_command import CommandEnd
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    FailureClass,
    Side,
    Status,
    UnknownReason,
)

# Whether the driver answers; its findings tell which of its calls gave no answer.
_DRIVER = "gpu_driver"
_LOST = "gpu_lost"
# Judged by `gpuops.agent.monitors.gpu_memory`: our own workers may just be ending, and on a machine
# that people share a GPU may rightly be in use.
_NOT_HERE = frozenset({"gpu_processes"})
SHOWN_MAX = 5
TEXT_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """Whether the node may join.

    ``reason`` is for people: what failed, or why nothing could be judged. ``hung``: the check, or
    a call that it made to the driver, gave no answer. ``findings``: what is not well, in short.
    """

    passed: bool
    reason: str = ""
    failure_class: FailureClass = FailureClass.UNRESOLVED
    culprits: tuple[Entity, ...] = ()
    findings: tuple[str, ...] = ()
    seconds: float = 0.0
    tries: int = 1
    hung: bool = False

    def to_report(self, node: str, generation: int) -> NodeReport:
        """Return what the agent of *node* reports where this did not pass."""
        here = Entity(EntityKind.NODE, node)
        return NodeReport(
            kind=ReportKind.GATE_FAILED,
            node=node,
            generation=generation,
            failure_class=self.failure_class,
            side=Side.INFRA,
            confidence=Confidence.PROBABLE if self.hung else Confidence.CONFIRMED,
            how=self.reason,
            culprits=tuple(dict.fromkeys((*self.culprits, here))),
            blames_node=True,
        )


def judge_check(end: CommandEnd, *, listed: bool = False) -> PreflightResult:
    """Return what *end* says of the node.

    *listed*: NVML had listed the GPUs that were asked about, so one that it does not is gone.
    """
    if end.exit_code is None:
        return PreflightResult(
            passed=False,
            reason=f"the health check gave no answer in {end.seconds:.0f} s",
            failure_class=FailureClass.GPU_DRIVER_HANG,
            seconds=end.seconds,
            hung=True,
        )
    findings = _findings(end.output)
    if findings is None:
        return PreflightResult(passed=True, reason=_no_verdict(end), seconds=end.seconds)
    bad = tuple(_short(item) for item in findings if _weight(item) > Status.SKIP)[:SHOWN_MAX]
    hang = next((item for item in findings if _is_hang(item)), None)
    failed = [item for item in findings if _fails(item) or (listed and _is_gone(item))]
    if failed:
        return _failed(failed, bad, end)
    if hang is not None:
        return PreflightResult(
            passed=False,
            reason=f"the GPU driver hangs: {_text(hang)}",
            failure_class=FailureClass.GPU_DRIVER_HANG,
            culprits=_entities([hang]),
            findings=bad,
            seconds=end.seconds,
            hung=True,
        )
    note = "" if end.exit_code in {EXIT_OK, EXIT_FAIL} else f"not all was judged: {_said(bad)}"
    return PreflightResult(passed=True, reason=note, findings=bad, seconds=end.seconds)


def _failed(
    failed: Sequence[Mapping[str, Any]], bad: tuple[str, ...], end: CommandEnd
) -> PreflightResult:
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return PreflightResult(
        passed=False,
        reason=f"the check {failed[0]['check']} failed: {_text(failed[0])}{more}",
        failure_class=_class(failed[0]),
        culprits=_entities(failed),
        findings=bad,
        seconds=end.seconds,
    )


def _no_verdict(end: CommandEnd) -> str:
    code = end.exit_code or 0
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    lines = end.errors.decode("utf-8", errors="replace").strip().splitlines()
    said = f": {lines[-1][:TEXT_CHARS_MAX]}" if lines else ""
    return f"the health check gave no verdict ({how}{said})"


def _findings(output: bytes) -> list[Mapping[str, Any]] | None:
    """Return the findings in *output*, None where it is no answer of `gpuops check --json`."""
    try:
        body = json.loads(output)
        findings = body["findings"]
        return [item for item in findings if isinstance(item, Mapping) and "check" in item]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _fails(item: Mapping[str, Any]) -> bool:
    return item.get("status") == Status.FAIL.word and item["check"] not in _NOT_HERE


def _is_gone(item: Mapping[str, Any]) -> bool:
    """Say whether a GPU is no longer listed; a lost one may tell its name to nobody."""
    return item["check"] == _LOST and item.get("failure_class") == FailureClass.GPU_MISSING


def _is_hang(item: Mapping[str, Any]) -> bool:
    return item["check"] == _DRIVER and item.get("unknown_reason") == UnknownReason.TIMEOUT


def _weight(item: Mapping[str, Any]) -> Status:
    try:
        return Status.parse(str(item.get("status")))
    except KeyError:
        return Status.UNKNOWN


def _class(item: Mapping[str, Any]) -> FailureClass:
    try:
        return FailureClass(str(item.get("failure_class")))
    except ValueError:
        return FailureClass.UNRESOLVED


def _entities(items: Sequence[Mapping[str, Any]]) -> tuple[Entity, ...]:
    found = []
    for item in items:
        try:
            found.append(Entity.from_json(item["entity"]))
        except (KeyError, ValueError, TypeError):
            continue
    return tuple(dict.fromkeys(found))


def _text(item: Mapping[str, Any]) -> str:
    return str(item.get("message", ""))[:TEXT_CHARS_MAX]


def _short(item: Mapping[str, Any]) -> str:
    return f"{item.get('status')} {item['check']}: {_text(item)}"


def _said(bad: Sequence[str]) -> str:
    return "; ".join(bad) or "no check says why"
