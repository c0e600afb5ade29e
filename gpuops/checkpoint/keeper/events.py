"""What happened in a keeper, until its agent takes it; bounded."""

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuops.checkpoint.types import Shard, StateId
from gpuops.wire.messages import plain

EVENTS_MAX = 1000
_TEXT_CHARS_MAX = 500
_ITEM_CHARS_MAX = 200
_ITEMS_MAX = 8
# Of these there may be one each step: those that follow one another become one with a count.
_COUNTED = ("committed", "skipped", "given_up", "whole", "replicated")
# What each save brings where there are several nodes: these take turns.
_PER_SAVE = ("whole", "replicated", "committed")


@dataclass(slots=True)
class EventQueue:
    """Mappings with a ``kind``, oldest first; *on_event* hears of each that is not one of many."""

    on_event: Callable[[Mapping[str, object]], None] = lambda _event: None
    dropped: int = 0
    _waiting: deque[dict[str, object]] = field(default_factory=deque)

    def add(self, kind: str, **fields: object) -> None:
        """Add an event; text in it is cut to a bound."""
        event: dict[str, object] = {"kind": kind}
        event |= {name: _bounded(value) for name, value in fields.items()}
        if kind in _COUNTED:
            event["n"] = 1
            last = self._find_mergeable(kind, event.get("holder"))
            if last is not None:
                n = last["n"]
                assert isinstance(n, int)
                event["n"] = n + 1
                self._waiting.remove(last)
        else:
            self.on_event(event)
        if len(self._waiting) >= EVENTS_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(event)

    def _find_mergeable(self, kind: str, holder: object) -> dict[str, object] | None:
        """Return the event that one more of *kind* is to be counted with."""
        for event in reversed(self._waiting):
            if event["kind"] == kind and event.get("holder") == holder:
                return event
            if not {kind, event["kind"]} <= set(_PER_SAVE):
                return None
        return None

    def take(self, chars_max: int) -> list[dict[str, object]]:
        """Return, and forget, the oldest, at least one and as many as *chars_max* of JSON hold.

        The first says how many were lost, if any.
        """
        found: list[dict[str, object]] = []
        if self.dropped:
            found.append({"kind": "events_lost", "n": self.dropped})
            self.dropped = 0
        n_chars = 0
        while self._waiting:
            n_chars += len(json.dumps(self._waiting[0]))
            if found and n_chars > chars_max:
                break
            found.append(self._waiting.popleft())
        return found

    def __len__(self) -> int:
        return len(self._waiting)


def _bounded(value: object) -> object:
    if isinstance(value, StateId | Shard):
        return plain(value)
    if isinstance(value, str):
        return value[:_TEXT_CHARS_MAX]
    if isinstance(value, list | tuple):
        items = value[:_ITEMS_MAX]
        return [item[:_ITEM_CHARS_MAX] if isinstance(item, str) else plain(item) for item in items]
    return value
