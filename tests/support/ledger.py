"""What a job really trained, from the lines its ranks wrote, and whether that makes sense.

A run with restarts is right if every step was trained exactly once, or redone from a recorded
point, and if no two generations trained at the same time. So is a job that was requeued.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One line of a job's diary; ``number`` is the step, ``run`` the name of the run's folder."""

    what: str
    generation: int
    rank: int
    number: int
    mono_ns: int
    pid: int
    run: str = ""


def read_lines(path):
    """Return the whole lines of the diary *path*, by time; none where there is no file."""
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text().rpartition("\n")[0]
    lines = [line.split() for line in text.splitlines()]
    found = [
        Line(words[0], *map(int, words[1:6]), *words[6:]) for words in lines if len(words) in {6, 7}
    ]
    return sorted(found, key=lambda line: line.mono_ns)


def in_one_row(lines):
    """Return *lines* with the generations of later runs after those of earlier ones."""
    runs = list(dict.fromkeys(line.run for line in lines))
    found = sorted({(runs.index(line.run), line.generation) for line in lines})
    if len(runs) < 2:
        return lines
    return [replace(x, generation=found.index((runs.index(x.run), x.generation))) for x in lines]


def problems(lines, steps):
    """Return what is wrong with a run of *steps* steps; an empty list where nothing is.

    Only runs that came to their end: the last step must be there.
    """
    generations = sorted({line.generation for line in lines})
    found = []
    for generation in generations:
        found += _gaps(generation, [line for line in lines if line.generation == generation])
    found += _points(lines)
    found += overlaps(lines)
    found += _missing(lines, generations, steps)
    return found


def _gaps(generation, lines):
    """Each rank trains each step after its starting point once, in order; all from one point."""
    found, starts = [], {line.number for line in lines if line.what == "load"}
    if len(starts) > 1:
        found.append(f"generation {generation} starts from several points: {sorted(starts)}")
    by_rank = defaultdict(list)
    for line in lines:
        if line.what == "step":
            by_rank[line.rank].append(line.number)
    for rank, trained in sorted(by_rank.items()):
        first = min(starts, default=0) + 1
        if trained != list(range(first, first + len(trained))):
            found.append(f"generation {generation}, rank {rank}: not in order: {trained}")
    return found


def _points(lines):
    """A generation starts from nothing, or from a step that was saved before."""
    found, saved = [], {0}
    for line in lines:
        if line.what == "load" and line.number not in saved:
            found.append(f"generation {line.generation} starts at {line.number}, saved nowhere")
        if line.what == "save":
            saved.add(line.number)
    return found


def overlaps(lines):
    """Return where a step of a generation ended after one of a later generation had."""
    found, generations = [], sorted({line.generation for line in lines})
    trained = {g: [x for x in lines if x.what == "step" and x.generation == g] for g in generations}
    for generation in generations:
        later = [line.mono_ns for g in generations if g > generation for line in trained[g]]
        mine = [line.mono_ns for line in trained[generation]]
        if mine and later and max(mine) > min(later):
            by_s = (max(mine) - min(later)) / 1e9
            found.append(f"generation {generation} trains on {by_s:.3f} s into a later one")
    return found


def _missing(lines, generations, steps):
    """Every step is there, from every rank of one generation."""
    ranks = {g: {x.rank for x in lines if x.generation == g} for g in generations}
    whole = set()
    for generation in generations:
        by_step = defaultdict(set)
        for line in lines:
            if line.what == "step" and line.generation == generation:
                by_step[line.number].add(line.rank)
        whole |= {step for step, seen in by_step.items() if seen == ranks[generation]}
    missing = sorted(set(range(1, steps + 1)) - whole)
    return [f"never trained by all ranks: {missing}"] if missing else []


def redone(lines):
    """Return how many (rank, step) were trained more than once."""
    times = defaultdict(int)
    for line in lines:
        if line.what == "step":
            times[line.rank, line.number] += 1
    return sum(count - 1 for count in times.values())
