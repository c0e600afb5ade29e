"""The pairs of a sweep as a matrix of text: nodes by nodes, and the worst pairs below it."""

from collections.abc import Iterable, Mapping, Sequence

from gpuops.burnin.pairs import NodePair, PairOutcome, PairTest

ROWS_MAX = 64
WORST_MAX = 10
# The worst outcome of a pair counts, in this order.
_SIGNS = {
    PairOutcome.TIMEOUT: "T",
    PairOutcome.FAIL: "X",
    PairOutcome.SLOW: "s",
    PairOutcome.UNKNOWN: "?",
    PairOutcome.PASS: ".",
}
_LEGEND = ". passed   s slow   X failed   T timed out   ? not measured   blank: not tested"
_GROUP_LEGEND = ". all passed   1-9, + (more): bad pairs   blank: not tested"
_ORDER = list(_SIGNS)


def matrix_lines(tests: Iterable[PairTest]) -> list[str]:
    """Return the lines of the matrix of *tests*, its legend, and the worst pairs.

    Up to 64 nodes each has a row; more are grouped by name. A column has the number of its row,
    read from top to bottom.
    """
    by_pair: dict[NodePair, list[PairTest]] = {}
    for test in tests:
        by_pair.setdefault(test.nodes, []).append(test)
    if not by_pair:
        return ["no pair was tested"]
    worst = {
        pair: min((test.outcome for test in group), key=_ORDER.index)
        for pair, group in by_pair.items()
    }
    nodes = sorted({node for pair in by_pair for node in pair})
    if len(nodes) <= ROWS_MAX:
        signs = {pair: _SIGNS[outcome] for pair, outcome in worst.items()}
        lines = [*_grid(nodes, signs), "", _LEGEND]
    else:
        group_of = _groups(nodes)
        labels = list(dict.fromkeys(group_of[node] for node in nodes))
        lines = [*_grid(labels, _group_signs(worst, group_of)), "", _GROUP_LEGEND]
    bad = sorted(
        (pair for pair, outcome in worst.items() if outcome.is_bad),
        key=lambda pair: (_ORDER.index(worst[pair]), _lowest(by_pair[pair]), pair),
    )
    return [*lines, *_worst_lines(bad, worst, by_pair)]


def _grid(labels: Sequence[str], signs: Mapping[tuple[str, str], str]) -> list[str]:
    """Return one line for each label; the columns are numbered above, tens over ones."""
    width = max(map(len, labels))
    numbers = [f"{number:2d}" for number in range(1, len(labels) + 1)]
    margin = " " * (width + 5)
    header = [margin + " ".join(number[digit] for number in numbers) for digit in (0, 1)]
    lines = [line.rstrip() for line in header if line.strip()]  # no tens: no line
    for number, row in zip(numbers, labels, strict=True):
        cells = [
            "\\"
            if row == column and (row, column) not in signs
            else signs.get((row, column), signs.get((column, row), " "))
            for column in labels
        ]
        lines.append(f"{row:{width}}  {number} {' '.join(cells)}".rstrip())
    return lines


def _groups(nodes: Sequence[str]) -> dict[str, str]:
    size = -(-len(nodes) // ROWS_MAX)
    found: dict[str, str] = {}
    for start in range(0, len(nodes), size):
        part = nodes[start : start + size]
        found |= dict.fromkeys(part, f"{part[0]}..{part[-1]}")
    return found


def _group_signs(
    worst: Mapping[NodePair, PairOutcome], group_of: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    counts: dict[tuple[str, str], int] = {}
    for (a, b), outcome in worst.items():
        key = (min(group_of[a], group_of[b]), max(group_of[a], group_of[b]))
        counts[key] = counts.get(key, 0) + outcome.is_bad
    return {key: "." if not n else str(n) if n < 10 else "+" for key, n in counts.items()}


def _lowest(tests: Iterable[PairTest]) -> float:
    return min((test.value for test in tests if test.value is not None), default=0.0)


def _worst_lines(
    bad: Sequence[NodePair],
    worst: Mapping[NodePair, PairOutcome],
    by_pair: Mapping[NodePair, Sequence[PairTest]],
) -> list[str]:
    lines = [""] if bad else []
    for pair in bad[:WORST_MAX]:
        tests = by_pair[pair]
        rates = any(test.value is not None for test in tests)
        rate = f"  {_lowest(tests):.4g} {tests[0].unit}" if rates else ""
        n_bad = sum(test.outcome.is_bad for test in tests)
        word = worst[pair].value
        lines.append(f"{','.join(pair)}  {word}{rate}  ({n_bad} of {len(tests)} tests)")
    if len(bad) > WORST_MAX:
        lines.append(f"and {len(bad) - WORST_MAX} more bad pairs")
    return lines
