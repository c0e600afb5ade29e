"""A synchronous job that is computed: when its ranks call collectives, and end their steps."""

import random
from dataclasses import dataclass

from gpuops.detect.own_time import RankTrace, StepSpan
from gpuops.detect.recorder_dump import CollectiveCall, RankDump

WALL_OFFSET_NS = 1_795_000_000 * 10**9
OPTIMIZER_S = 0.001


@dataclass(frozen=True)
class Call:
    """A collective of a step, after *compute_s* of work; ``groups``: the ranks of each group."""

    operation: str
    compute_s: float
    blocks: bool = False
    groups: tuple = ()
    sizes: tuple = ((100,),)


def ddp(n_buckets=4, step_s=0.1):
    """Return a step whose gradients are reduced while it goes on computing."""
    return [Call("all_reduce", step_s / n_buckets) for _ in range(n_buckets)]


def fsdp(n_layers=4, step_s=0.1):
    """Return a step that gathers each layer before it computes it."""
    part = step_s / n_layers / 2
    forward = [Call("_all_gather_base", part, blocks=True) for _ in range(n_layers)]
    backward = [Call("_reduce_scatter_base", part) for _ in range(n_layers)]
    return forward + backward


def run(program, n_ranks=3, n_steps=30, *, slow=None, noise=0.01, seed=1, first_step=1):
    """Return the calls and spans of each rank: (rank, step) to a list of (call, seconds), and ends.

    *slow*: the factor by which a rank computes longer, as a number or as a function of the step.
    """
    draw = random.Random(seed)
    now = dict.fromkeys(range(n_ranks), 100.0)
    called = {rank: [] for rank in range(n_ranks)}
    ends = {rank: [(first_step - 1, 100.0)] for rank in range(n_ranks)}
    for step in range(first_step, first_step + n_steps):
        done = dict.fromkeys(range(n_ranks), 0.0)
        for call in program:
            for rank in now:
                factor = (slow or {}).get(rank, 1.0)
                factor = factor(step) if callable(factor) else factor
                now[rank] += call.compute_s * factor * draw.gauss(1, noise)
                called[rank].append((call, now[rank]))
            for group in call.groups or (tuple(now),):
                last = max(now[rank] for rank in group)
                for rank in group:
                    done[rank] = max(done[rank], last)
                    now[rank] = last if call.blocks else now[rank]
        for rank in now:
            now[rank] = max(now[rank], done[rank]) + OPTIMIZER_S
            ends[rank].append((step, now[rank]))
    return called, ends


def traces(program, n_ranks=3, n_steps=30, *, backend="gloo", offset_ns=WALL_OFFSET_NS, **how):
    """Return what an agent reads of such a job."""
    called, ends = run(program, n_ranks, n_steps, **how)
    names = {}
    for call in program:
        for group in call.groups or (tuple(range(n_ranks)),):
            names.setdefault(group, str(len(names)))
    found = {}
    for rank in range(n_ranks):
        numbers, calls = {}, []
        for call, at_s in called[rank]:
            group = next(g for g in call.groups or (tuple(range(n_ranks)),) if rank in g)
            numbers[group] = numbers.get(group, 0) + 1
            calls.append(
                CollectiveCall(
                    group=names[group],
                    number=numbers[group],
                    operation=call.operation,
                    sizes=call.sizes,
                    backend=backend,
                    is_complete=True,
                    created_ns=offset_ns + round(at_s * 1e9),
                )
            )
        members = {name: group for group, name in names.items() if rank in group}
        spans = [
            StepSpan(step=step, start_ns=round(before * 1e9), end_ns=round(at_s * 1e9))
            for (_, before), (step, at_s) in zip(ends[rank], ends[rank][1:], strict=False)
        ]
        dump = RankDump(rank=rank, calls=tuple(calls), members=members)
        found[rank] = RankTrace(dump=dump, spans=spans, wall_offset_ns=offset_ns)
    return found
