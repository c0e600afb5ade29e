"""What the results of one test mean: findings. Pure.

A part is compared with the other parts of its node, which ran the same work at the same time. That
finds one that is slower than its equals, never a node whose parts are all slow; a floor of the
machine's baseline does. A wrong result fails whatever the speed.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpuops.burnin.baseline import WILKS_RESULTS, Floor, FloorStatus, find_floor
from gpuops.burnin.measurement import Measurement
from gpuops.burnin.plan import BurninTest
from gpuops.burnin.results import (
    NotMeasured,
    ProgramNote,
    ProgramOutput,
    ResultDigest,
    WrongResult,
    shown,
)
from gpuops.detect.spread import robust_sigma
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason

PEERS_MIN = 3
_SIGMAS = 3
# Disks of a node differ, and are not compared with each other.
_COMPARED = frozenset({EntityKind.GPU, EntityKind.CPU, EntityKind.LINK})
_WRONG = {
    EntityKind.GPU: FailureClass.GPU_WRONG_RESULT,
    EntityKind.LINK: FailureClass.GPU_WRONG_RESULT,
    EntityKind.MOUNT: FailureClass.HOST_DISK,
}
_BAD_FLOORS = {FloorStatus.WARN: Status.WARN, FloorStatus.FAIL: Status.FAIL}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """From which percentage below the other parts a part warns, is suspect, or fails.

    It also has to be farther from them than 3 of their (robust) standard deviations. A spread of
    5 % is normal (stas00/ml-engineering, compute/accelerator); the limits are a judgement, so that
    only a site's own setting fails.
    """

    warn_percent: float = 7.0
    suspect_percent: float = 12.0
    fail_percent: float | None = None
    source: str = "gpuops judgement; 5 % spread is normal: stas00/ml-engineering"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTerms:
    """What a test is judged by: the node, the limits against its other parts, floors in force."""

    node: Entity
    limits: PeerLimits = PeerLimits()
    floors: tuple[Floor, ...] = ()

    def floor_of(self, item: Measurement) -> Floor | None:
        """Return the floor that *item* is held against, if any."""
        parameters = item.parameters_text
        return find_floor(self.floors, test=item.test, parameters=parameters, unit=item.unit)


def judge_test(
    test: BurninTest, outputs: Sequence[ProgramOutput], terms: JudgeTerms
) -> list[Finding]:
    """Return the findings about *test*: each fault, else one for each kind of measurement."""
    findings = [*_programs(test, outputs), *_diagnostics(test, outputs, terms.node)]
    findings += _wrong_results(test, outputs)
    findings += _digests(test, outputs, terms.node)
    measured = [item for output in outputs for item in output.of(Measurement)]
    for group in _grouped(measured):
        findings += _group(test, group, terms, outputs)
    findings = findings or [_nothing(test, terms.node)]
    return [*findings, *_not_measured(test, measured, terms)]


def _programs(test: BurninTest, outputs: Iterable[ProgramOutput]) -> Iterator[Finding]:
    """Yield what could not be measured, and which program did not come to its end."""
    for output in outputs:
        for item in output.of(NotMeasured):
            skipped = item.reason is UnknownReason.NOT_SUPPORTED
            yield Finding(
                check=test.check,
                entity=item.part,
                status=Status.SKIP if skipped else Status.UNKNOWN,
                message=f"not measured: {shown(item.message)}",
                unknown_reason=item.reason,
            )
        if output.reason is not None or not output.has_ended:
            more = f"; {output.garbage} lines were no results" if output.garbage else ""
            text = output.problem or "its program ended before the test did"
            yield Finding(
                check=test.check,
                entity=output.part,
                status=Status.UNKNOWN,
                message=shown(text) + more,
                unknown_reason=output.reason or UnknownReason.CRASH,
            )


def _diagnostics(
    test: BurninTest, outputs: Iterable[ProgramOutput], node: Entity
) -> Iterator[Finding]:
    """Yield a finding for each result of NCCL: ``[OK]``, or ``[INFO]`` for what needs a review."""
    for text in (text for output in outputs for text in output.diagnostics):
        is_good = text.startswith("[OK]")
        yield Finding(
            check=test.check,
            entity=node,
            status=Status.PASS if is_good else Status.WARN,
            source="NCCL user guide, Active Diagnostics",
            message=f"NCCL diagnostics: {shown(text)}",
            failure_class=None if is_good else FailureClass.GPU_DIAGNOSTIC,
            hardware_reported=not is_good,
        )


def wrong_class(part: Entity) -> FailureClass:
    """Return the failure class of a wrong result of *part*."""
    return _WRONG.get(part.kind, FailureClass.HOST_CPU)


def _wrong_results(test: BurninTest, outputs: Iterable[ProgramOutput]) -> Iterator[Finding]:
    for output in outputs:
        for item in output.of(WrongResult):
            yield _wrong(test, item.part, f"{shown(item.parameters)}: {shown(item.message)}")


def _wrong(test: BurninTest, part: Entity, message: str) -> Finding:
    return Finding(
        check=test.check,
        entity=part,
        status=Status.FAIL,
        value="wrong result",
        threshold="= the same bits",
        source="the computation itself",
        message=message,
        failure_class=wrong_class(part),
        hardware_reported=True,
    )


def _digests(test: BurninTest, outputs: Iterable[ProgramOutput], node: Entity) -> Iterator[Finding]:
    """Yield a failure for each part whose result differs from that of most of its equals.

    Two that differ cannot say which is wrong: the node fails, and both are named.
    """
    groups: dict[tuple[str, str], list[ResultDigest]] = {}
    for output in outputs:
        for item in output.of(ResultDigest):
            groups.setdefault((item.parameters, item.model), []).append(item)
    for (parameters, _model), group in groups.items():
        counts = Counter(item.digest for item in group)
        if len(counts) < 2:
            continue
        (best, votes), *_others = counts.most_common()
        if votes * 2 <= len(group):
            names = ", ".join(sorted(str(item.part) for item in group))
            text = f"{shown(parameters)}: the same work has {len(counts)} different results on"
            found = _wrong(test, group[0].part, f"{text} {names}; none has a majority")
            yield replace(found, entity=node)
            continue
        for item in group:
            if item.digest != best:
                text = f"its result differs from that of {votes} others ({item.digest[:12]})"
                yield _wrong(test, item.part, f"{shown(parameters)}: {text}")


def _notes(outputs: Sequence[ProgramOutput], parameters: str, part: Entity | None = None) -> str:
    """Return what to add to the finding about *parameters*: same results, notes of programs.

    *part*: only what the program of this part says.
    """
    digests = [item for out in outputs for item in out.of(ResultDigest)]
    same = [] if part else [item.digest for item in digests if item.parameters == parameters]
    texts = [f"the same bits on {len(same)}"] if len(same) > 1 and len({*same}) == 1 else []
    notes = (note for out in outputs for note in out.of(ProgramNote) if part in {None, note.part})
    texts += dict.fromkeys(shown(note.message) for note in notes)
    return "".join(f"; {text}" for text in texts[:2])


def _grouped(measured: Iterable[Measurement]) -> list[list[Measurement]]:
    """Return the measurements of the same work, by kind of part and parameters."""
    groups: dict[tuple[str, EntityKind, str, str], list[Measurement]] = {}
    for item in measured:
        key = item.test, item.part.kind, item.parameters_text, item.unit
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def _group(
    test: BurninTest,
    group: Sequence[Measurement],
    terms: JudgeTerms,
    outputs: Sequence[ProgramOutput],
) -> Iterator[Finding]:
    good = [item for item in group if item.is_measured]
    for item in group:
        if not item.is_measured:
            yield Finding(
                check=test.check,
                entity=item.part,
                status=Status.UNKNOWN,
                unit=item.unit,
                message=f"{item.parameters_text}: zero or no number: it did not measure",
                unknown_reason=UnknownReason.CRASH,
            )
    slow = []
    for item in good:
        found = _against_floor(test, item, terms.floor_of(item))
        if found is None and _has_peers(good):
            found = _against_peers(test, item, good, terms.limits)
        if found is not None:
            notes = _notes(outputs, item.parameters_text, item.part)
            slow.append(replace(found, message=found.message + notes))
    yield from slow
    if good and not slow:
        yield _passed(test, good, terms, _notes(outputs, good[0].parameters_text))


def _against_floor(test: BurninTest, item: Measurement, floor: Floor | None) -> Finding | None:
    """Return the finding about *item* if *floor* says that no healthy part is so slow."""
    status = None if floor is None else _BAD_FLOORS.get(floor.judge(item.values))
    if floor is None or status is None:
        return None
    side = "below" if floor.higher_is_better else "above"
    text = f"{item.parameters_text}: {side} the floor"
    if floor.median is None:
        text += "; a quoted floor only warns"
    else:
        text += f" and far from the median of healthy parts, {_rounded(floor.median):g}"
        if not floor.may_fail:
            text += f"; learned from {floor.parts} parts it only warns ({WILKS_RESULTS} may fail)"
    return _slow(test, item, status, (_wanted(floor), floor.source), text)


def _slow(
    test: BurninTest, item: Measurement, status: Status, wanted: tuple[str, str], message: str
) -> Finding:
    """Return the finding about *item*; *wanted* is the threshold and its source."""
    is_gpu = item.part.kind in {EntityKind.GPU, EntityKind.LINK}
    return Finding(
        check=test.check,
        entity=item.part,
        status=status,
        value=_rounded(item.median),
        unit=item.unit,
        threshold=wanted[0],
        source=wanted[1],
        message=message,
        failure_class=FailureClass.GPU_SLOW if is_gpu else FailureClass.HOST_SLOW,
    )


def _wanted(floor: Floor) -> str:
    sign = ">=" if floor.higher_is_better else "<="
    return f"{sign} {_rounded(floor.value):g} {floor.unit}"


def _not_measured(
    test: BurninTest, measured: Sequence[Measurement], terms: JudgeTerms
) -> Iterator[Finding]:
    """Yield a finding for each floor of *test* that nothing was measured for."""
    good = [item for item in measured if item.is_measured]
    for floor in terms.floors:
        is_met = any(floor.covers(x.test, x.parameters_text, x.unit) for x in good)
        if floor.test == test.name and not is_met:
            yield Finding(
                check=test.check,
                entity=terms.node,
                status=Status.SKIP,
                unit=floor.unit,
                threshold=_wanted(floor),
                source=floor.source,
                message=f"{floor.parameters or floor.test}: not measured",
            )


def _has_peers(good: Sequence[Measurement]) -> bool:
    return len(good) >= PEERS_MIN and good[0].part.kind in _COMPARED


def _against_peers(
    test: BurninTest, item: Measurement, group: Sequence[Measurement], limits: PeerLimits
) -> Finding | None:
    """Return the finding about *item* if it is worse than the others of *group*, else None."""
    others = [other.median for other in group if other is not item]
    typical = statistics.median(others)
    worse = percent_worse(item, typical)
    sigma = robust_sigma(others)
    if worse < limits.warn_percent or worse < _SIGMAS * 100 * sigma / typical:
        return None
    failed = limits.fail_percent is not None and worse >= limits.fail_percent
    text = (
        f"{item.parameters_text}: {worse:.1f} % worse than the median of {len(others)} others"
        f" ({_rounded(typical):g} {item.unit}){', suspect' * (worse >= limits.suspect_percent)}"
    )
    status = Status.FAIL if failed else Status.WARN
    wanted = _bound(item, typical, limits.warn_percent), limits.source
    return _slow(test, item, status, wanted, text)


def percent_worse(item: Measurement, typical: float) -> float:
    """Return by how many percent of *typical* the median of *item* is worse; below 0: better."""
    difference = typical - item.median if item.higher_is_better else item.median - typical
    return 100 * difference / typical


def _bound(item: Measurement, typical: float, percent: float) -> str:
    """Return what is still good against *typical*."""
    share = (-percent if item.higher_is_better else percent) / 100
    sign = ">" if item.higher_is_better else "<"
    return f"{sign} {_rounded(typical * (1 + share)):g} {item.unit}"


def _passed(
    test: BurninTest, good: Sequence[Measurement], terms: JudgeTerms, notes: str
) -> Finding:
    """Return the one finding about all of *good*: the worst of them, and what it was held to."""
    worst = (min if good[0].higher_is_better else max)(good, key=lambda item: item.median)
    spread = f"median of {len(worst.values)}, spread {worst.spread_percent:.1f} %"
    text = f"{worst.parameters_text}: {spread}"
    if len(good) > 1:
        text += f"; the worst of {len(good)} ({worst.part})"
    threshold = source = None
    floor = terms.floor_of(worst)
    if floor is not None:
        threshold, source = _wanted(floor), floor.source
        if floor.judge(worst.values) is FloorStatus.NOTE:
            text += "; below the floor, as one in fifty healthy results is"
    elif _has_peers(good):
        typical = statistics.median(item.median for item in good)
        threshold = _bound(worst, typical, terms.limits.warn_percent)
        source = terms.limits.source
    elif worst.part.kind in _COMPARED:
        text += f"; not compared: {PEERS_MIN} parts of a kind are needed"
    return Finding(
        check=test.check,
        entity=terms.node if len(good) > 1 else worst.part,
        status=Status.PASS,
        value=_rounded(worst.median),
        unit=worst.unit,
        threshold=threshold,
        source=source,
        message=text + notes,
    )


def _nothing(test: BurninTest, node: Entity) -> Finding:
    return Finding(
        check=test.check,
        entity=node,
        status=Status.UNKNOWN,
        message="it measured nothing",
        unknown_reason=UnknownReason.CRASH,
    )


def _rounded(value: float) -> float:
    """Return *value* with four significant digits."""
    return float(f"{value:.4g}")
