"""What keepers and agents say to each other of replicas that are compared: bounded, and lenient.

A comparison is no part of what keeps a job's state: of what is no such word nothing follows.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuops.checkpoint.replicated import spans_of
from gpuops.checkpoint.states import EPOCH_MAX, STEP_MAX, WORLD_MAX, StateId
from gpuops.checkpoint.vote import NAMED_MAX, Ballot, Difference, Outcome, Sketch, Verdict

SKETCHES_MAX = 8  # of one node, in one heartbeat: some 100 bytes each
RANKS_MAX = 64
_KEY_CHARS_MAX = 16
_NODE_CHARS_MAX = 255
_TENSORS_MAX = 10**8


@dataclass(frozen=True, slots=True)
class Told:
    """Ranks of several nodes that differ; ``number``: the only tensor of ``key`` that does.

    With the outcome ``alike`` they are equal again; the suspects are those that it was told of.
    ``nodes``: where the suspects are, one for each; () where that is not known.
    """

    key: str
    difference: Difference
    number: int | None = None
    nodes: tuple[str, ...] = ()

    @property
    def teller(self) -> int:
        """Return the rank whose node is to tell of it."""
        return min(self.difference.verdict.suspects or self.difference.ranks, default=0)


def ballots_json(ballots: Sequence[Ballot]) -> list[list[Any]]:
    """Return *ballots* as JSON; those that would be too many are left out."""
    found: list[list[Any]] = []
    for ballot in ballots:
        sides: dict[Sketch, list[int]] = {}
        for rank, sketch in sorted(ballot.sketches.items()):
            sides.setdefault(sketch, []).append(rank)
        state = [ballot.state.epoch, ballot.state.step]
        rows = [
            [*state, ballot.key, ballot.n_ranks, ballot.n_tensors, spans_of(ranks), _text(sketch)]
            for sketch, ranks in sides.items()
        ]
        if len(found) + len(rows) <= SKETCHES_MAX:
            found += rows
    return found


def ballots_from(data: object) -> tuple[Ballot, ...]:
    """Return the ballots in *data*, () where that is none."""
    if not isinstance(data, list) or len(data) > SKETCHES_MAX:
        return ()
    found: dict[tuple[StateId, str, int, int], dict[int, Sketch]] = {}
    try:
        for epoch, step, key, n_ranks, n_tensors, spans, text in data:
            name = (_state([epoch, step]), _key(key), _whole(n_ranks), _whole(n_tensors))
            sketch = Sketch.from_bytes(b64decode(text, validate=True))
            found.setdefault(name, {}).update(dict.fromkeys(_numbers(spans), sketch))
    except (TypeError, ValueError):
        return ()
    return tuple(
        Ballot(state=state, key=key, n_ranks=n_ranks, n_tensors=n_tensors, sketches=sketches)
        for (state, key, n_ranks, n_tensors), sketches in found.items()
    )


def told_json(told: Told) -> dict[str, Any]:
    """Return *told* as JSON; of very many ranks the first are named."""
    found = told.difference
    return {
        "key": told.key,
        "state": [found.state.epoch, found.state.step],
        "alike": None if found.alike is None else [found.alike.epoch, found.alike.step],
        "ranks": spans_of(found.ranks[:RANKS_MAX]),
        "suspects": spans_of(found.verdict.suspects[:RANKS_MAX]),
        "outcome": found.verdict.outcome.value,
        "number": told.number,
        **({"nodes": list(told.nodes)} if told.nodes else {}),
    }


def told_from(data: object) -> Told | None:
    """Return what *data* tells, None where that is nothing."""
    if not isinstance(data, Mapping):
        return None
    alike, number = data.get("alike"), data.get("number")
    try:
        outcome = Outcome(str(data.get("outcome")))
        found = Difference(
            state=_state(data.get("state")),
            ranks=_numbers(data.get("ranks")),
            verdict=Verdict(outcome, _numbers(data.get("suspects"))),
            alike=None if alike is None else _state(alike),
        )
        number = None if number is None else _whole(number)
        return Told(_key(data.get("key")), found, number, _nodes(data.get("nodes", [])))
    except (TypeError, ValueError):
        return None


def many_from(data: object) -> tuple[Told, ...]:
    """Return what a list tells, () where it is none."""
    items = data[:NAMED_MAX] if isinstance(data, list) else []
    return tuple(told for item in items if (told := told_from(item)) is not None)


def alike_json(alike: Mapping[str, StateId]) -> dict[str, list[int]]:
    """Return the states of *alike* by key as JSON."""
    return {key: [state.epoch, state.step] for key, state in alike.items()}


def alike_from(data: object) -> dict[str, StateId]:
    """Return the states by key in *data*, {} where that is nothing of the kind."""
    if not isinstance(data, Mapping) or len(data) > NAMED_MAX:
        return {}
    try:
        return {_key(key): _state(state) for key, state in data.items()}
    except ValueError:
        return {}


def _text(sketch: Sketch) -> str:
    return b64encode(sketch.to_bytes()).decode()


def _whole(value: object, most: int = _TENSORS_MAX) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no number up to {most}")
    return value


def _key(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _KEY_CHARS_MAX:
        raise ValueError("no key")
    return value


def _nodes(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > NAMED_MAX:
        raise ValueError("no nodes")
    if not all(isinstance(name, str) and 0 < len(name) <= _NODE_CHARS_MAX for name in value):
        raise ValueError("no names of nodes")
    return tuple(value)


def _state(value: object) -> StateId:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("no state")
    return StateId(_whole(value[0], EPOCH_MAX), _whole(value[1], STEP_MAX))


def _numbers(spans: object) -> tuple[int, ...]:
    """Return the ranks of *spans*, ascending."""
    if not isinstance(spans, list) or len(spans) % 2 or len(spans) > 2 * RANKS_MAX:
        raise ValueError("no spans")
    found: list[int] = []
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        found += range(_whole(begin, WORLD_MAX), _whole(end, WORLD_MAX))
    return tuple(sorted(set(found)))
