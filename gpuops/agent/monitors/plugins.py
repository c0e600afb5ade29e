"""Detectors of a site: each watches a node's workers from a separate process.

A detector is a function in the entry-point group ``gpuops.detectors``. It gets one dictionary
(``node``, ``generation``, ``folder``, ``ranks``: process ids by rank) and yields verdicts, which
are dictionaries: ``why`` and optionally ``ranks``, ``blames_node``, ``failure_class``, ``ends``. A
verdict that ``ends`` ends the generation. Of the others one that blames the node is recorded, so
that the next restart excludes the node; all are logged and, if the workers hang later, are evidence
in the incident. An error of a detector never affects the training.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.plugin_process import GROUP
from gpuops.host.process.command import module_command
from gpuops.host.process.watcher import WatchingChild
from gpuops.incident.decision import TEXT_CHARS_MAX
from gpuops.incident.suspicion import Suspicion, SuspicionLevel
from gpuops.model import Confidence, Entity, EntityKind, Evidence, FailureClass, Role, Side
from gpuops.scrub import scrub

log = logging.getLogger(__name__)

LINES_PER_POLL = 20
# A detector that writes more in a generation is broken, and is ended.
LINES_MAX = 200
CLOSE_S = 0.5
_KEYS = frozenset({"why", "ranks", "blames_node", "failure_class", "ends", "error"})
# Categories that only agents can diagnose, or that would end a run that could continue.
_RESERVED = frozenset({"launcher", "node", "scheduler", "tool", "unresolved", "user_code"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginVerdict:
    """A detector's verdict. ``ends``: it ends the generation."""

    why: str
    failure_class: FailureClass = FailureClass.SITE_CHECK
    ranks: tuple[int, ...] = ()
    blames_node: bool = False
    ends: bool = False


@dataclass(slots=True)
class _Detector:
    lines: WatchingChild
    n_lines: int = 0


def find_detectors() -> tuple[str, ...]:
    """Return the names of the installed detectors; none where they cannot be listed."""
    try:
        return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))
    except Exception as exc:  # noqa: BLE001 boundary: an installed package must not stop a launch
        log.warning("cannot list the detectors: %r", exc)
        return ()


def open_detectors(env: Mapping[str, str]) -> "PluginMonitor":
    """Return a monitor of the installed detectors; *env* is the environment of their processes."""

    def start(name: str, context: str) -> WatchingChild:
        command = module_command("gpuops.agent.monitors.plugin_process", name, context)
        return WatchingChild(f"detector-{name}", command, env)

    return PluginMonitor(find_detectors(), start)


class PluginMonitor(Monitor):
    """The detectors of a site. *start* starts one by name."""

    name = "detectors"

    def __init__(self, names: Sequence[str], start: Callable[[str, str], WatchingChild]) -> None:
        self._names = tuple(names)
        self._start = start
        self._watched: MonitoredAttempt | None = None
        self._running: dict[str, _Detector] = {}
        self._verdicts: list[tuple[str, PluginVerdict]] = []
        self._warned: set[str] = set()

    def begin(self, watched: MonitoredAttempt) -> None:
        """Start the detectors for a generation; verdicts on the previous one are discarded."""
        self._stop(0.0)
        self._watched, self._verdicts = watched, []
        context = json.dumps(
            {
                "node": watched.node,
                "generation": watched.generation,
                "folder": str(watched.folder),
                "ranks": {str(worker.rank): worker.pid for worker in watched.workers},
            }
        )
        for name in self._names:
            self._running[name] = _Detector(self._start(name, context))

    def poll(self) -> list[Suspicion]:
        """Return all verdicts on this generation."""
        for name, verdict in self._read_new():
            if not verdict.ends:
                log.warning("detector %s: %s", name, verdict.why)
        node = "" if self._watched is None else self._watched.node
        return [_suspicion(name, verdict, node) for name, verdict in self._verdicts]

    def evidence(self, deadline_ns: int) -> tuple[Evidence, ...]:  # noqa: ARG002 never waits
        """Return all verdicts on this generation."""
        self._read_new()
        return tuple(_evidence(name, verdict) for name, verdict in self._verdicts)

    def close(self) -> None:
        """End the detectors."""
        self._stop(CLOSE_S)

    def _stop(self, wait_s: float) -> None:
        for detector in self._running.values():
            detector.lines.close(wait_s)
        self._running = {}

    def _read_new(self) -> list[tuple[str, PluginVerdict]]:
        """Return the verdicts since the last call."""
        found = []
        for name, detector in list(self._running.items()):
            for line in detector.lines.take(LINES_PER_POLL):
                detector.n_lines += 1
                verdict = self._read(name, line)
                found += [] if verdict is None else [(name, verdict)]
            if detector.n_lines >= LINES_MAX:
                self._warn(name, "it wrote too many lines and is ended")
                self._running.pop(name).lines.close()
        self._verdicts += found
        return found

    def _read(self, name: str, line: bytes) -> PluginVerdict | None:
        assert self._watched is not None
        try:
            return read_verdict(line, {worker.rank for worker in self._watched.workers})
        except (KeyError, TypeError, ValueError, RecursionError) as exc:
            self._warn(name, str(exc))
            return None

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("detector %s failed: %s", name, scrub(why)[:TEXT_CHARS_MAX])


def read_verdict(line: bytes, ranks: set[int]) -> PluginVerdict:
    """Return the verdict in *line* on a node that has *ranks*.

    Raises:
        KeyError, TypeError, ValueError, RecursionError: It is malformed; the message says why.
    """
    body = json.loads(line)
    if not isinstance(body, dict):
        raise TypeError(f"a verdict is an object, not {type(body).__name__}")
    if unknown := sorted(body.keys() - _KEYS):
        raise ValueError(f"unknown keys: {', '.join(unknown)[:100]}")
    if "error" in body:
        raise ValueError(f"it raised {body['error']}")
    why = body.get("why")
    if not isinstance(why, str) or not why.strip():
        raise ValueError("a verdict without `why`")
    failure_class = FailureClass(body.get("failure_class", FailureClass.SITE_CHECK))
    if failure_class.category in _RESERVED:
        raise ValueError(f"a detector may not report {failure_class.value}")
    return PluginVerdict(
        why=scrub(" ".join(why.split()))[:TEXT_CHARS_MAX],
        failure_class=failure_class,
        ranks=_blamed(body.get("ranks", []), ranks),
        blames_node=_flag(body, "blames_node"),
        ends=_flag(body, "ends"),
    )


def _flag(body: Mapping[str, object], key: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise TypeError(f"`{key}` must be true or false")
    return value


def _blamed(named: object, ranks: set[int]) -> tuple[int, ...]:
    if not isinstance(named, list) or not all(type(rank) is int for rank in named):
        raise TypeError("`ranks` must be a list of integers")
    if unknown := sorted(set(named) - ranks):
        raise ValueError(f"no ranks of this node: {str(unknown)[:100]}")
    return tuple(sorted(set(named)))


def _suspicion(name: str, verdict: PluginVerdict, node: str) -> Suspicion:
    level = SuspicionLevel.SUSPECT if verdict.blames_node else SuspicionLevel.NOTE
    entity, *also = _entities(verdict) or [Entity(EntityKind.NODE, node)]
    return Suspicion(
        entity=entity,
        also=tuple(also),
        failure_class=verdict.failure_class,
        confidence=Confidence.PROBABLE,
        level=SuspicionLevel.END if verdict.ends else level,
        source=name,
        why=f"{name}: {verdict.why}",
        node=node if verdict.blames_node else None,
        side=Side.INFRA if verdict.blames_node else Side.AMBIGUOUS,
    )


def _entities(verdict: PluginVerdict) -> list[Entity]:
    return [Entity(EntityKind.RANK, str(rank)) for rank in verdict.ranks]


def _evidence(name: str, verdict: PluginVerdict) -> Evidence:
    return Evidence(
        role=Role.SYMPTOM,
        text=f"detector {name}: {verdict.why}",
        entity=next(iter(_entities(verdict)), None),
    )
