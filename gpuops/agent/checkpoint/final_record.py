"""What agents say, and agree on, of the last state of a run; pure, and bounded.

A state that was refused on one node, and dropped by all for that, is wanted after all where it is
the last one. And whoever waits for it must hear that it will not come: a node whose ranks are gone
does not have it, or cannot write it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.agent.checkpoint.keeper_events import pair, whole
from gpuops.checkpoint.types import StateId
from gpuops.model import Json

WHY_CHARS_MAX = 200
BEHIND_MAX = 4
_NAME_CHARS_MAX = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStatus:
    """What a node says. ``state``: a rank of it asked for that as the last one.

    ``is_over``: its ranks have ended. ``waits``: for the newest state to persist; ``trouble`` has
    kept it from writing its part of ``failed`` since, "" where nothing has. ``pieces`` were written
    so far.
    """

    state: StateId | None = None
    is_over: bool = False
    waits: bool = False
    trouble: str = ""
    failed: StateId | None = None
    pieces: int = 0

    def is_stuck_at(self, persist: StateId) -> bool:
        """Say whether it cannot write *persist*; that an older one failed does not say that."""
        return bool(self.trouble) and (self.failed is None or self.failed >= persist)

    def to_json(self) -> Json:
        """Return it as it lies on the board, {} where there is nothing to say."""
        if self.state is None and not self.is_over and not self.waits:
            return {}
        return {
            "state": None if self.state is None else [self.state.epoch, self.state.step],
            "over": self.is_over,
            "waits": self.waits,
            "trouble": self.trouble[:WHY_CHARS_MAX],
            "failed": None if self.failed is None else [self.failed.epoch, self.failed.step],
            "pieces": self.pieces,
        }


def last_word(data: object) -> FinalStatus:
    """Return what a node said; what cannot be read was not said."""
    body = data if isinstance(data, Mapping) else {}
    return FinalStatus(
        state=pair(body.get("state")),
        is_over=body.get("over") is True,
        waits=body.get("waits") is True,
        trouble=_text(body.get("trouble")),
        failed=pair(body.get("failed")),
        pieces=whole(body.get("pieces")) or 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalCommitRecord:
    """What is agreed on. ``missed`` will not be persistent, for ``why``.

    While somebody waits, ``pieces`` says how much all have written and ``behind`` who has not
    written its part: whoever sees neither change for long enough waits no more.
    """

    missed: StateId | None = None
    why: str = ""
    pieces: int = 0
    behind: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """Return it as it lies on the board, {} where nothing was agreed on."""
        if self == FinalCommitRecord():
            return {}
        return {
            "missed": None if self.missed is None else [self.missed.epoch, self.missed.step],
            "why": self.why[:WHY_CHARS_MAX],
            "pieces": self.pieces,
            "behind": list(self.behind),
        }


def last_mark(data: object) -> FinalCommitRecord:
    """Return what was agreed on; what cannot be read was not."""
    body = data if isinstance(data, Mapping) else {}
    behind = body.get("behind")
    return FinalCommitRecord(
        missed=pair(body.get("missed")),
        why=_text(body.get("why")),
        pieces=whole(body.get("pieces")) or 0,
        behind=tuple(map(_text, behind[:BEHIND_MAX])) if isinstance(behind, list) else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSaveState:
    """How far one node is: ``lacks`` of the last states, and whether its part is written."""

    node: str
    word: FinalStatus
    lacks: frozenset[StateId] = frozenset()
    has_written: bool = True


def judge_last(
    before: FinalCommitRecord, parts: list[FinalSaveState], persist: StateId | None
) -> FinalCommitRecord:
    """Return the mark after *before*. *persist* is being written by all, None where none is."""
    missed, why = before.missed, before.why
    for part in parts:
        gone = max(part.lacks, default=None) if part.word.is_over else None
        if gone is not None and (missed is None or gone > missed):
            missed, why = gone, f"not all ranks of {part.node} saved it"
        is_stuck = persist is not None and part.word.is_stuck_at(persist)
        if is_stuck and persist is not None and (missed is None or persist > missed):
            missed, why = persist, f"{part.node}: {part.word.trouble}"
    if not any(part.word.waits for part in parts):
        return FinalCommitRecord(missed=missed, why=why[:WHY_CHARS_MAX])
    return FinalCommitRecord(
        missed=missed,
        why=why[:WHY_CHARS_MAX],
        pieces=sum(part.word.pieces for part in parts),
        behind=tuple(part.node for part in parts if not part.has_written)[:BEHIND_MAX],
    )


def _text(data: object) -> str:
    return data[:_NAME_CHARS_MAX] if isinstance(data, str) else ""
