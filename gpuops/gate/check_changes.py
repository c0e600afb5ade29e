"""What a check run adds to those recorded before it.

A run is recorded with its findings when its result differs from that of the last recorded run of
the same suite and caller, and once in `RECORD_EVERY_S`. Any other run only extends that record: in
the store it is one update of one row, however many checks it has. Once an hour the measured values
go with it.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.checks.core.runner import CheckFailure, CheckRun
from gpuops.gate.node_state import StateError, change_state
from gpuops.host.node_state import NodeState, RecordedRun
from gpuops.model import Entity, EntityKind, Finding, Json, Status
from gpuops.units import US_PER_S

# Below a day: by its events alone, every living node is among "those seen in the last 24 hours",
# and what a lost spool kept from the store is in it a day later.
RECORD_EVERY_S = 20 * 3600
SAMPLE_EVERY_S = 3600
_PARTS = (EntityKind.GPU, EntityKind.NIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What to record of a run. ``run``: the recorded run that it is, or extends.

    Of a new one: ``findings`` that did not pass or that changed, and ``parts`` that were seen, if
    they are not recorded yet.
    ``failures`` of gpuops that are not recorded yet; ``numbers`` only when a sample is due.
    """

    run: RecordedRun
    is_new: bool
    findings: tuple[Finding, ...] = ()
    parts: tuple[Entity, ...] = ()
    failures: tuple[CheckFailure, ...] = ()
    numbers: Mapping[str, float] | None = None

    def sample_json(self) -> Json:
        """Return the sample as a part of a payload; empty if none is due."""
        return {} if self.numbers is None else {"numbers": dict(self.numbers)}


def plan_record(
    check_run: CheckRun,
    before: RecordedRun | None,
    *,
    mode: str | None,
    all_gpus: bool,
    new_id: Callable[[], str],
) -> RunRecord:
    """Return what to record of *check_run*; *before*: the last recorded run of its suite.

    Args:
        check_run: The run.
        before: None: nothing is known, so all of it is new.
        mode: The gate's mode.
        all_gpus: It judged every GPU; a part that such a run does not see is not there.
        new_id: Makes the id of a new record.
    """
    start_us, moment = check_run.start_us, check_run.moment
    not_passed = _not_passed(check_run.findings)
    parts = {item.entity for item in check_run.findings if item.entity.kind in _PARTS}
    names = frozenset(map(_entity_name, parts))
    now = RecordedRun(
        id="",
        boot_id=moment.boot_id if moment else "",
        start_us=start_us,
        runs=1,
        status=check_run.verdict.word,
        profile=check_run.profile,
        mode=mode,
        not_passed=not_passed,
        parts=names,
        failures=frozenset(failure.what for failure in check_run.failures),
        sampled_us=start_us,
        parts_us=start_us,
    )
    empty: frozenset[str] = frozenset()
    is_due = before is None or _is_sample_due(before, start_us)
    numbers = _numbers(check_run.findings) if is_due else None
    if before is None:
        sampled_us, changed, known = start_us, empty, empty
    else:
        sampled_us = start_us if is_due else before.sampled_us
        changed, known = frozenset(before.not_passed), before.failures
    failures = tuple(item for item in check_run.failures if item.what not in known)
    if before is not None and not _differs(before, now, all_gpus=all_gpus):
        run = replace(
            before,
            runs=before.runs + 1,
            failures=known | now.failures,
            sampled_us=sampled_us,
        )
        return RunRecord(run=run, is_new=False, failures=failures, numbers=numbers)
    parts_us = start_us
    if before is not None and before.parts == names and not _is_old(before.parts_us, start_us):
        parts, parts_us = set(), before.parts_us
    return RunRecord(
        run=replace(now, id=new_id(), sampled_us=sampled_us, parts_us=parts_us),
        is_new=True,
        findings=tuple(
            item
            for item in check_run.findings
            if (name := _finding_name(item)) in not_passed or name in changed
        ),
        parts=tuple(sorted(parts, key=_entity_name)),
        failures=failures,
        numbers=numbers,
    )


def is_new_decision(state_dir: Path, uid: int, decision: str) -> bool:
    """Return whether *decision* about the node differs from the one before, and save it."""
    is_new = True

    def change(state: NodeState) -> NodeState:
        nonlocal is_new
        is_new = state.decided != decision
        return replace(state, decided=decision)

    with contextlib.suppress(StateError):
        change_state(state_dir, uid, change)
    return is_new


def _differs(before: RecordedRun, now: RecordedRun, *, all_gpus: bool) -> bool:
    same_parts = now.parts == before.parts if all_gpus else now.parts <= before.parts
    return (
        _is_old(before.start_us, now.start_us)
        or not same_parts
        or replace(before, **_UNCOMPARED) != replace(now, **_UNCOMPARED)
    )


def _is_old(recorded_us: int, now_us: int) -> bool:
    """Return whether it is time to record again, also after the clock was set far back."""
    age_s = (now_us - recorded_us) / US_PER_S
    return not -SAMPLE_EVERY_S < age_s < RECORD_EVERY_S


_UNCOMPARED: Json = {
    "id": "",
    "start_us": 0,
    "runs": 0,
    "parts": frozenset(),
    "failures": frozenset(),
    "sampled_us": 0,
    "parts_us": 0,
}


def _is_sample_due(before: RecordedRun, start_us: int) -> bool:
    every_us = SAMPLE_EVERY_S * US_PER_S
    return start_us // every_us != before.sampled_us // every_us


def _not_passed(findings: Iterable[Finding]) -> dict[str, str]:
    """Return what did not pass, by check and entity, without the words and numbers that vary."""
    found: dict[str, set[str]] = {}
    for item in findings:
        if item.status not in (Status.PASS, Status.SKIP):
            why = (item.failure_class and item.failure_class.value, item.unknown_reason)
            text = " ".join([item.status.word, *(str(word) for word in why if word)])
            found.setdefault(_finding_name(item), set()).add(text)
    return {name: ", ".join(sorted(texts)) for name, texts in sorted(found.items())}


def _numbers(findings: Iterable[Finding]) -> dict[str, float]:
    """Return the measured values by check and unit, and by entity if it is not the node."""
    numbers: dict[str, float] = {}
    for item in findings:
        if type(item.value) in (int, float) and item.status is not Status.SKIP:
            about = "" if item.entity.kind is EntityKind.NODE else f" {_entity_name(item.entity)}"
            unit = f"[{item.unit}]" if item.unit else ""
            numbers.setdefault(f"{item.check}{unit}{about}", item.value)  # type: ignore[arg-type] # a number
    return numbers


def _finding_name(finding: Finding) -> str:
    return f"{finding.check} {_entity_name(finding.entity)}"


def _entity_name(entity: Entity) -> str:
    return f"{entity.kind.value}:{entity.id}"
