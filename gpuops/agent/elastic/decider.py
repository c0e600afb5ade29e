"""How a run decides: by our table, which the site's own function may overrule.

The site is asked in a thread of its own, so that no heartbeat waits for it. A bug of ours must not
leave a run without a decision: all its agents would wait for one.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from gpuops.control.step import Decide
from gpuops.errors import EXIT_FAIL
from gpuops.incident.decide import decide
from gpuops.incident.decision import (
    ClusterState,
    NodeReport,
    PastFailure,
    ReportKind,
    RestartDecision,
    RunAction,
)
from gpuops.incident.override import apply_site_decision
from gpuops.model import FailureClass, Side
from gpuops.scrub import scrub

log = logging.getLogger(__name__)

Table = Callable[
    [Sequence[NodeReport], ClusterState, Sequence[PastFailure], float], RestartDecision
]
Answer = tuple[RestartDecision, str | None]


def decider(plugin: str | None, env: Mapping[str, str], table: Table = decide) -> Decide:
    """Return how to decide; *plugin* is ``--decide``."""
    ours = _OurTable(table)
    return ours if plugin is None else _Asking(ours, plugin, env)


class _OurTable:
    """Asks *table*; where it fails, on no reports; where it fails then too, the run is given up."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __call__(
        self,
        reports: Sequence[NodeReport],
        cluster: ClusterState,
        history: Sequence[PastFailure],
        now_s: float,
    ) -> Answer:
        try:
            return self._table(reports, cluster, history, now_s), None
        except Exception as exc:  # boundary: see above
            log.exception("our rule failed on these reports")
            note = f"our rule failed: {scrub(repr(exc))}"
        try:
            return self._table((), cluster, history, now_s), f"{note}; decided without the reports"
        except Exception:  # boundary: see above
            log.exception("our rule failed on no reports")
            return _given_up(cluster, now_s), note


def _given_up(cluster: ClusterState, now_s: float) -> RestartDecision:
    failure = PastFailure(
        generation=cluster.generation,
        at_s=now_s,
        failure_class=FailureClass.UNRESOLVED,
        side=Side.TOOL,
        is_counted=True,
        rule="tool.failed",
    )
    return RestartDecision(
        action=RunAction.FAIL,
        rule="tool.failed",
        reason="gpuops cannot decide what to do: a bug in gpuops",
        failure=failure,
        exit_code=EXIT_FAIL,
    )


class _Asking:
    """Asks once for each generation and set of nodes that failed their check; answers later."""

    def __init__(self, ours: _OurTable, plugin: str, env: Mapping[str, str]) -> None:
        self._ours = ours
        self._plugin = plugin
        self._env = env
        self._asked: tuple[int, frozenset[str]] | None = None
        self._answer: Answer | None = None

    def __call__(
        self,
        reports: Sequence[NodeReport],
        cluster: ClusterState,
        history: Sequence[PastFailure],
        now_s: float,
    ) -> Answer | None:
        failed_gates = frozenset(r.node for r in reports if r.kind is ReportKind.GATE_FAILED)
        asked = cluster.generation, failed_gates
        if self._asked == asked:
            return self._answer
        self._asked, self._answer = asked, None
        ours = self._ours(reports, cluster, history, now_s)

        def ask() -> None:
            answer = ours
            try:
                found = apply_site_decision(
                    ours[0],
                    plugin=self._plugin,
                    reports=reports,
                    cluster=cluster,
                    history=history,
                    now_s=now_s,
                    env=self._env,
                )
                notes = [note for note in (ours[1], found.note) if note]
                if found.note and found.decision is ours[0]:
                    log.warning("%s", found.note)
                answer = found.decision, "; ".join(notes) or None
            except Exception:  # boundary: the run waits for this answer
                log.exception("the site cannot be asked for its decision")
            if self._asked == asked:  # nobody has decided that one since
                self._answer = answer

        try:
            threading.Thread(target=ask, name="gpuops-decide", daemon=True).start()
        except RuntimeError as exc:
            log.warning("the site cannot be asked for its decision: %s", exc)
            self._answer = ours
        return self._answer
