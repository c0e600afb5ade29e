"""From the outcomes of a sweep's pair tests to what they name: a node, a pair, or the fabric.

A test that failed speaks against both ends. It speaks against *node* if the other end passed with
somebody else. The node with the most such partners is blamed first, and explains all of its tests;
what remains is judged again. So a healthy node that met two bad ones is not blamed for them.

* **node**: it failed with two or more partners that passed elsewhere. ``fail`` if it failed with
  both of the last two partners, and with more than it passed with; else ``warn``: it fails now and
  then.
* **pair**: neither end is blamed, and both passed elsewhere. ``fail`` if it failed each of two or
  more times, ``warn`` if it was tested once.
* **fabric**: more than a third of the nodes, and at least three, passed with nobody: nobody is
  blamed. The same for a leaf switch, if its nodes pass below it and fail with all others.
* **inconclusive**: a test failed, and the tests do not say more.

That only another partner can convict is oci-hpc's
and cluster-health-scanner's rule; the numbers are judgement, simulated by
``tests/benchmarks/bench_sweep_sim.py``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuops.burnin.pair_graph import PairGraph
from gpuops.burnin.pairs import NodePair, PairTest, node_pair
from gpuops.burnin.schedule import CONFIRMATION_ROUNDS, RANDOM_ROUNDS, OpenQuestions
from gpuops.model import Entity, EntityKind, Status

FABRIC = "fabric"
FABRIC_NODES_MIN = 3
_PARTNERS = RANDOM_ROUNDS + CONFIRMATION_ROUNDS
_NAMED_MAX = 6


class BlameKind(StrEnum):
    """What a sweep can name; ``inconclusive``: it cannot say."""

    FABRIC = "fabric"
    NODE = "node"
    PAIR = "pair"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameVerdict:
    """What the tests in ``evidence`` (the bad ones) name, and why, for people.

    ``entity`` is a node, a pair (``a,b``: a host list) or a switch (a leaf's name, or `FABRIC`).
    """

    kind: BlameKind
    entity: Entity
    status: Status
    why: str
    evidence: tuple[PairTest, ...]


def blame(
    tests: Iterable[PairTest], domains: Mapping[str, str] | None = None
) -> tuple[BlameVerdict, ...]:
    """Return what the *tests* of one sweep name, the worst first; empty if all of them passed.

    Slow tests must be marked before (`gpuops.burnin.speed`). *domains*: the leaf switch of each
    node, where known.
    """
    found, order = _blame_one(PairGraph(tests), domains or {}), list(BlameKind)
    return tuple(sorted(found, key=lambda v: (-v.status, order.index(v.kind), v.entity)))


def open_questions(
    tests: Iterable[PairTest], domains: Mapping[str, str] | None = None
) -> OpenQuestions:
    """Return what a confirmation round should find out after *tests*; nothing if all is clear.

    A blamed node needs partners until it has met four that passed elsewhere (two of the first
    rounds, two to confirm). The ends of a failed pair that no node explains need partners until
    each passed with two others; then the pair is tested once more. So do the nodes that failed with
    a blamed one that passed with somebody: perhaps it met two bad ones.
    """
    graph = PairGraph(tests)
    blamed, unexplained = _attributed(graph, domains or {})
    unsure = [other for node in blamed if graph.passed[node] for other in graph.failed[node]]
    ends = [end for pair in unexplained for end in pair]
    suspects = {
        node: len(graph.failed[node]) - len(graph.passed[node])
        for node in dict.fromkeys([*blamed, *ends, *unsure])
        if _needs_partner(graph, node, is_blamed=node in blamed)
    }
    trust = {node: _trust(graph, node, blamed) for node in graph.nodes}
    return OpenQuestions(
        suspects=tuple(sorted(suspects, key=lambda node: (-suspects[node], node))),
        repeat=tuple(pair for pair in unexplained if _is_to_repeat(graph, pair)),
        partners={node: worth for node, worth in trust.items() if worth > -_PARTNERS},
        met={node: graph.passed[node] | graph.failed[node] for node in graph.nodes},
    )


def _attributed(
    graph: PairGraph, domains: Mapping[str, str]
) -> tuple[dict[str, set[str]], list[NodePair]]:
    """Return whom *graph* blames and which failed pairs remain; nothing for a shared cause."""
    if _fabric_wide(graph):
        return {}, []
    for pairs in _bad_leaves(graph, domains).values():
        graph.drop_failures(pairs)
    return graph.attribute()


def _is_to_repeat(graph: PairGraph, pair: NodePair) -> bool:
    others = min(2, len(graph.nodes) - 2)  # two nodes have no others
    good = (len(graph.passed[node] - set(pair)) >= others for node in pair)
    return len(graph.tests[pair]) == 1 and all(good)


def _needs_partner(graph: PairGraph, node: str, *, is_blamed: bool) -> bool:
    if not is_blamed and len(graph.passed[node]) >= 2:
        return False
    return len(graph.witnesses(node) | graph.passed[node]) < _PARTNERS


def _trust(graph: PairGraph, node: str, blamed: Mapping[str, object]) -> int:
    """Return how good a partner *node* is: one that only passed first; -4: none."""
    if not graph.passed[node] or node in blamed:
        return -_PARTNERS
    return max(min(len(graph.passed[node]), 2) - 2 * len(graph.failed[node]), 1 - _PARTNERS)


def _blame_one(graph: PairGraph, domains: Mapping[str, str]) -> Iterator[BlameVerdict]:
    if nobody := _fabric_wide(graph):
        evidence = [test for pair in graph.tests for test in graph.bad(pair)]
        why = f"{len(nobody)} of {len(graph.nodes)} nodes passed with nobody; the cause is shared"
        yield _verdict(BlameKind.FABRIC, FABRIC, Status.FAIL, f"{why}; no node is blamed", evidence)
        return
    for leaf, pairs in _bad_leaves(graph, domains).items():
        evidence = [test for pair in pairs for test in graph.bad(pair)]
        why = f"its nodes pass below it and fail with nodes of other leaves ({len(pairs)} pairs)"
        yield _verdict(BlameKind.FABRIC, leaf, Status.FAIL, f"{why}; no node is blamed", evidence)
    blamed, unexplained = _attributed(graph, domains)
    for node, witnesses in blamed.items():
        yield _node_verdict(graph, node, witnesses)
    for pair in unexplained:
        yield _pair_verdict(graph, pair)


def _fabric_wide(graph: PairGraph) -> list[str]:
    """Return the nodes that passed with nobody, if they are too many to be to blame."""
    nobody = [node for node in graph.nodes if not graph.passed[node]]
    is_wide = len(nobody) >= FABRIC_NODES_MIN and 3 * len(nobody) > len(graph.nodes)
    return nobody if is_wide else []


def _bad_leaves(graph: PairGraph, domains: Mapping[str, str]) -> dict[str, list[NodePair]]:
    """Return the failed pairs of each leaf of which nodes pass below it and never across leaves."""
    across: dict[str, list[NodePair]] = {}
    cut_off: dict[str, int] = {}
    members: dict[str, int] = {}
    for node in graph.nodes:
        leaf = domains.get(node)
        if leaf is None:
            continue
        near = {n for n in graph.passed[node] if domains.get(n) == leaf}
        failed = [node_pair(node, n) for n in graph.failed[node] if domains.get(n) != leaf]
        passed_far = graph.passed[node] - near
        if failed or passed_far:
            members[leaf] = members.get(leaf, 0) + 1
        if failed and near and not passed_far:
            cut_off[leaf] = cut_off.get(leaf, 0) + 1
            across.setdefault(leaf, []).extend(failed)
    return {
        leaf: pairs
        for leaf, pairs in across.items()
        if cut_off[leaf] >= FABRIC_NODES_MIN and 3 * cut_off[leaf] > 2 * members[leaf]
    }


def _node_verdict(graph: PairGraph, node: str, witnesses: set[str]) -> BlameVerdict:
    outcomes = graph.last_outcomes(node)
    n_passed = len(graph.passed[node])
    is_sure = all(outcomes[-2:]) and len(witnesses) > n_passed
    status = Status.FAIL if is_sure else Status.WARN
    passed = (
        f"with {n_passed} of {len(outcomes)} it passed" if n_passed else "it passed with nobody"
    )
    why = f"failed with {_names(witnesses)}, which passed elsewhere; {passed}"
    if not is_sure:
        why += ": it fails now and then, or several of its links are bad"
    evidence = [
        test for other in sorted(graph.failed[node]) for test in graph.bad(node_pair(node, other))
    ]
    return _verdict(BlameKind.NODE, node, status, why, evidence)


def _pair_verdict(graph: PairGraph, pair: NodePair) -> BlameVerdict:
    bad, n_tests = graph.bad(pair), len(graph.tests[pair])
    a, b = pair
    others = {node: len(graph.passed[node] - set(pair)) for node in pair}
    text = f"failed {len(bad)} of {n_tests} times"
    if len(graph.nodes) == 2:
        why = f"{text}; of two nodes nobody can say which is bad: sweep them with a third one"
        status = Status.FAIL if len(bad) == n_tests else Status.WARN
        return _verdict(BlameKind.PAIR, ",".join(pair), status, why, bad)
    kind, status = BlameKind.INCONCLUSIVE, Status.WARN
    if len(bad) < n_tests:
        why = f"{text}; it passed when it was repeated, and neither node failed with two others"
    elif not all(others.values()):
        stuck = a if not others[a] else b
        why = f"{text}; {stuck} passed with nobody, and met too few partners that pass"
    else:
        kind = BlameKind.PAIR
        status = Status.FAIL if n_tests > 1 else Status.WARN
        why = f"{text}; {a} passed with {others[a]} others and {b} with {others[b]}"
    return _verdict(kind, ",".join(pair), status, why, bad)


def _verdict(
    kind: BlameKind, name: str, status: Status, why: str, evidence: Sequence[PairTest]
) -> BlameVerdict:
    kinds = {BlameKind.NODE: EntityKind.NODE, BlameKind.FABRIC: EntityKind.SWITCH}
    entity = Entity(kinds.get(kind, EntityKind.PAIR), name)
    return BlameVerdict(kind=kind, entity=entity, status=status, why=why, evidence=tuple(evidence))


def _names(nodes: Iterable[str]) -> str:
    names = sorted(nodes)
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
