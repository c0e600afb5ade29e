"""How many nodes a run has and what a restart may do: the flags read together, or refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpuops.agent.launch.options import Option, Options
from gpuops.agent.launch.slurm import SlurmStep
from gpuops.config import schema
from gpuops.errors import UsageError
from gpuops.incident.decision import OnExhausted, RestartPolicy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeCount:
    """``low`` to ``high`` nodes train, ``spares`` agents wait beyond them."""

    low: int
    high: int
    spares: int
    unit: int
    is_range: bool


def read(option: Option, meaning: Callable[[str], T]) -> T:
    """Return what the text of *option* means.

    Raises:
        UsageError: It means nothing; the option is named as it was given.
    """
    try:
        return meaning(option.given)
    except ValueError as exc:
        raise UsageError(f"{option.shown}: {exc}") from None


def node_count(options: Options, step: SlurmStep | None, *, is_standalone: bool) -> NodeCount:
    """Return how many nodes the run has; a step of `srun` says it where no flag does.

    Raises:
        UsageError: A number that cannot be, or two that contradict each other.
    """
    if is_standalone or (_range(options["nnodes"])[1] == 1 and step is None):
        options = _single_node(options)
    nnodes, min_nodes = options["nnodes"], options["min_nodes"]
    spares = read(options["spares"], schema.parse_spare_count)
    unit = read(options["node_unit"], schema.parse_node_count)
    if is_standalone:
        _refuse_node_flags(options)
        return NodeCount(1, 1, 0, 1, is_range=False)
    if nnodes.text is None and step is not None:
        high = _rest_of(step, options["spares"], spares, options["node_unit"], unit)
        low, is_range, spares = high, False, len(step.nodes) - high
    else:
        low, high = _range(nnodes)
        is_range = low < high
        if step is not None and not options["spares"].is_set:
            spares = max(0, len(step.nodes) - high)
    if min_nodes.text is not None:
        low, is_range = _minimum(min_nodes, nnodes, low, high, is_range=is_range), True
    size = NodeCount(low, high, spares, unit, is_range=is_range and low < high)
    _refuse_size(size, options, step)
    return size


def restart_policy(options: Options, size: NodeCount) -> RestartPolicy:
    """Return the terms of the run's restarts.

    Raises:
        UsageError: A value that means nothing, or contradicts *size*.
    """
    restarts_max, window_s = read(options["max_restarts"], schema.parse_restarts)
    return RestartPolicy(
        nodes_min=size.low,
        nodes_max=size.high,
        node_unit=size.unit,
        restarts_max=restarts_max,
        restarts_window_s=window_s,
        on_exhausted=_on_exhausted(options, size),
        benign_exit_codes=read(options["restart_exit_codes"], schema.parse_exit_codes),
    )


def _on_exhausted(options: Options, size: NodeCount) -> OnExhausted:
    option = options["on_exhausted"]
    if option.text is None:
        return OnExhausted.SHRINK if size.is_range else OnExhausted.REQUEUE
    chosen = OnExhausted(read(option, schema.parse_on_exhausted))
    asked = options["min_nodes" if options["min_nodes"].text else "nnodes"].shown
    if chosen is OnExhausted.REQUEUE and size.is_range:
        raise UsageError(
            f"{option.shown} contradicts {asked}: that says that fewer nodes will do; "
            "leave one of them out"
        )
    if chosen is OnExhausted.SHRINK and not size.is_range and size.high > 1:
        raise UsageError(
            f"{option.shown}: shrink to how many of {size.high} nodes? Say --min-nodes=N"
        )
    return chosen


def _single_node(options: Options) -> Options:
    """Return *options* less what a site's file wants of runs that have more than one node."""
    own = {
        name: Option(text, options[name].shown, is_set=False)
        for name, text in (("spares", "0"), ("min_nodes", None), ("node_unit", "1"))
        if options[name].is_general
    }
    return {**options, **own}


def _refuse_node_flags(options: Options) -> None:
    for name, alone in (("spares", "0"), ("min_nodes", "1"), ("node_unit", "1")):
        option = options[name]
        if option.is_set and option.text != alone:
            raise UsageError(
                f"--standalone is a run on one node, and {option.shown} needs more; "
                "leave one of them out"
            )
    nnodes = options["nnodes"]
    if nnodes.text is not None and _range(nnodes)[0] > 1:
        raise UsageError(
            f"--standalone is a run on one node, and {nnodes.shown} waits for more; "
            "leave one of them out"
        )


def _rest_of(step: SlurmStep, nnodes: Option, spares: int, unit_option: Option, unit: int) -> int:
    n_nodes = len(step.nodes)
    high = (n_nodes - spares) // unit * unit
    if high < 1:
        with_unit = f" and {unit_option.shown}" if unit > 1 else ""
        raise UsageError(
            f"{nnodes.shown}{with_unit} leaves no node to train: Slurm's step has {n_nodes}"
        )
    return high


def _range(nnodes: Option) -> tuple[int, int]:
    low, colon, high = (nnodes.text or "1").partition(":")
    parts = (low, high) if colon else (low, low)
    wanted = "a number of nodes, or MIN:MAX, is wanted, 1 at least"
    if not all(part.isdecimal() and int(part) <= schema.NODES_MAX for part in parts):
        raise UsageError(f"{nnodes.shown}: {wanted}")
    if not 0 < int(parts[0]) <= int(parts[1]):
        problem = f"{parts[0]} is more than {parts[1]}; " if int(parts[0]) else ""
        raise UsageError(f"{nnodes.shown}: {problem}{wanted}")
    return int(parts[0]), int(parts[1])


def _minimum(option: Option, nnodes: Option, low: int, high: int, *, is_range: bool) -> int:
    minimum = read(option, schema.parse_node_count)
    of = nnodes.shown if nnodes.text else f"a run on {high} node{'s' * (high > 1)}"
    if minimum > high:
        raise UsageError(f"{option.shown} is more than there can be: {of}")
    if is_range and minimum != low:
        raise UsageError(f"{option.shown} and {of} name different minima; leave one of them out")
    return minimum


def _refuse_size(size: NodeCount, options: Options, step: SlurmStep | None) -> None:
    unit = options["node_unit"]
    for what, number in (("most", size.high), ("least", size.low)):
        if number % size.unit:
            raise UsageError(
                f"{unit.shown} does not divide the {number} nodes that the run has at {what}"
            )
    if step is not None and options["nnodes"].text and size.low > len(step.nodes):
        raise UsageError(
            f"{options['nnodes'].shown}, but Slurm's step has {len(step.nodes)} "
            f"node{'s' * (len(step.nodes) > 1)}; ask for more with `srun --nodes`"
        )
