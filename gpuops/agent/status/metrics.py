"""An agent's state as Prometheus reads it. Names and labels are a contract.

Labels are bounded: ranks of this node, classes of failures, the phases of a run.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpuops.agent.status.state import RANKS_MAX, SKIP_REASONS_MAX, AgentState
from gpuops.control.record import RunPhase
from gpuops.units import NS_PER_S

_CLASSES_MAX = 100


class _State(Collector):
    """One state; its moments are judged at *now_ns*."""

    def __init__(self, state: AgentState, now_ns: int) -> None:
        self._state = state
        self._now_ns = now_ns

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily(
            "gpuops_run_generation", "Generation of the run, from 0.", value=state.generation
        )
        phase = GaugeMetricFamily(
            "gpuops_run_phase", "1 for the phase that the run is in.", labels=["phase"]
        )
        for known in RunPhase:
            phase.add_metric([known.value], float(known.value == state.phase))
        yield phase
        yield _counter(
            "gpuops_run_restarts",
            "Restarts that this agent saw, by the class of the failure.",
            "failure_class",
            dict(sorted(state.restarts_by_class.items())[:_CLASSES_MAX]),
        )
        yield _counter(
            "gpuops_run_lost_seconds",
            "Seconds lost to failures, by the phase of the recovery.",
            "phase",
            state.badput_s,
        )
        yield from self._ranks()
        yield from self._checkpoints()
        yield from self._agent()

    def _ranks(self) -> Iterator[Metric]:
        ranks = self._state.ranks[:RANKS_MAX]
        steps = GaugeMetricFamily(
            "gpuops_rank_step", "Last step of a rank of this node.", labels=["rank"]
        )
        silent = GaugeMetricFamily(
            "gpuops_rank_silent_seconds",
            "Seconds since the last heartbeat of a rank of this node.",
            labels=["rank"],
        )
        for rank in ranks:
            if rank.step is not None:
                steps.add_metric([str(rank.rank)], rank.step)
            if rank.beat_ns is not None:
                silent.add_metric([str(rank.rank)], self._seconds_since(rank.beat_ns))
        yield steps
        yield silent

    def _checkpoints(self) -> Iterator[Metric]:
        kept = self._state.checkpoint
        if kept is None:
            return
        yield GaugeMetricFamily(
            "gpuops_checkpoint_keeper_up",
            "1 while the process that keeps checkpoints in this node's memory runs.",
            value=float(kept.is_alive),
        )
        yield GaugeMetricFamily(
            "gpuops_checkpoint_copies",
            "Nodes that have this node's part of the newest checkpoint, itself among them.",
            value=kept.copies,
        )
        if kept.step is not None:
            yield GaugeMetricFamily(
                "gpuops_checkpoint_step",
                "Step of the newest checkpoint that all ranks of this node can resume from.",
                value=kept.step,
            )
        if kept.since_ns is not None:
            yield GaugeMetricFamily(
                "gpuops_checkpoint_age_seconds",
                "Seconds since that checkpoint was committed.",
                value=self._seconds_since(kept.since_ns),
            )
        if kept.persisted_step is not None:
            yield GaugeMetricFamily(
                "gpuops_checkpoint_persisted_step",
                "Step of the newest checkpoint in the persistent directory.",
                value=kept.persisted_step,
            )
        yield CounterMetricFamily(
            "gpuops_checkpoints_committed", "Checkpoints committed in memory.", kept.committed
        )
        yield _counter(
            "gpuops_checkpoints_skipped",
            "Saves that were skipped so that training did not wait, by reason.",
            "reason",
            dict(sorted(kept.skipped.items())[:SKIP_REASONS_MAX]),
        )

    def _agent(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily(
            "gpuops_control_round_trip_seconds",
            "Last round trip to the board, without the time it was asked to wait.",
            value=state.round_trip_s,
        )
        yield GaugeMetricFamily(
            "gpuops_control_silent_seconds",
            "Seconds since the last round trip to the board.",
            value=self._seconds_since(state.control_ns),
        )
        yield CounterMetricFamily(
            "gpuops_agent_fences", "Times that this agent ended its own workers.", state.fences
        )
        yield CounterMetricFamily(
            "gpuops_agent_cpu_seconds", "CPU seconds that supervision has used.", state.cpu_s
        )

    def _seconds_since(self, then_ns: int) -> float:
        return max(0, self._now_ns - then_ns) / NS_PER_S


def metrics(state: AgentState, now_ns: int) -> bytes:
    """Return *state* in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_State(state, now_ns))
    return generate_latest(registry)


def _counter(
    name: str, help_text: str, label: str, values: Mapping[str, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
