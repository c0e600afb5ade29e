"""How far one node's keeper is, in a few words, for whoever decides for all nodes."""

from dataclasses import dataclass

from gpuops.checkpoint.messages import Fields, MessageError, state_to_json
from gpuops.checkpoint.states import EPOCH_MAX, STEP_MAX, StateId
from gpuops.checkpoint.vote import Ballot
from gpuops.checkpoint.vote_words import ballots_from, ballots_json

WHOLE_MAX = 4
REFUSED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """States are newest first, and few.

    ``whole``: all of this node's shards are in its memory, verified. ``replicated``: and every
    holder that lives has them. ``refused``: skipped or given up here; these are the newest of them
    only, so to know whether any state was: one that is neither whole nor ``in_flight`` and is not
    after ``decided`` (of its epoch) was. ``newest`` committed one. ``persisted``: lies whole in the
    directory. ``parts``: of these this node's shards lie there. ``is_due``: by the policy of the
    job the newest is to be persisted. ``ballots``: of a committed state, for others to compare.
    ``last``: a rank asked for it as the last one.
    """

    whole: tuple[StateId, ...] = ()
    replicated: tuple[StateId, ...] = ()
    refused: tuple[StateId, ...] = ()
    newest: StateId | None = None
    persisted: StateId | None = None
    parts: tuple[StateId, ...] = ()
    in_flight: StateId | None = None
    decided: StateId | None = None
    last: StateId | None = None
    is_due: bool = False
    ballots: tuple[Ballot, ...] = ()


_LISTS = ("whole", "replicated", "refused", "parts")
_SINGLE = ("newest", "persisted", "in_flight", "decided", "last")


def progress_to_json(progress: Progress) -> dict[str, object]:
    """Return the fields of *progress*."""
    found: dict[str, object] = {
        "is_due": progress.is_due,
        "ballots": ballots_json(progress.ballots),
    }
    for name in _LISTS:
        found[name] = [state_to_json(state) for state in getattr(progress, name)]
    for name in _SINGLE:
        state = getattr(progress, name)
        found[name] = None if state is None else state_to_json(state)
    return found


def progress_from_json(fields: Fields) -> Progress:
    """Return the progress; raises MessageError."""
    lists = {name: _states(fields, name) for name in _LISTS}
    single = {name: fields.state(name) if name in fields else None for name in _SINGLE}
    return Progress(
        whole=lists["whole"],
        replicated=lists["replicated"],
        refused=lists["refused"],
        parts=lists["parts"],
        newest=single["newest"],
        persisted=single["persisted"],
        in_flight=single["in_flight"],
        decided=single["decided"],
        last=single["last"],
        is_due=fields.flag("is_due"),
        ballots=ballots_from(fields.values.get("ballots")),
    )


def _states(fields: Fields, name: str) -> tuple[StateId, ...]:
    pairs = fields.items(name, REFUSED_MAX)
    found = []
    for pair in pairs:
        sound = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not sound or not (0 <= pair[0] <= EPOCH_MAX and 0 <= pair[1] <= STEP_MAX):
            raise MessageError(f"a message has {name} with {str(pair)[:40]}")
        found.append(StateId(*pair))
    return tuple(found)
