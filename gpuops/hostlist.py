"""Slurm's host lists: ``gpu[001-128,130],login1`` to names and back, and patterns of node names.

Source: slurm.conf(5), "NodeName", and scontrol(1), "show hostlist": several brackets in a name are
combined, and a range has the width of its first number. A pattern of nodes may hold ``*`` and
``?`` too; brackets are always ranges of numbers, never sets of letters.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

NAMES_MAX = 65_536
_DIGITS_MAX = 18
_LITERAL = re.compile(r"[^\[\],\s*?]+")
_WORD = re.compile(r"([^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(rf"([0-9]{{1,{_DIGITS_MAX}}})(?:-([0-9]{{1,{_DIGITS_MAX}}}))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Span:
    """Numbers from *low* to *high*, written with at least *width* digits."""

    low: int
    high: int
    width: int

    @property
    def size(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{self.width}}" for number in range(self.low, self.high + 1))

    def __contains__(self, digits: str) -> bool:
        number = int(digits)
        return self.low <= number <= self.high and digits == f"{number:0{self.width}}"


_Spans = tuple[_Span, ...]
_Piece = str | _Spans


def expand(text: str) -> tuple[str, ...]:
    """Return the names in the host list *text*, in its order, each once; none for ``""``.

    Raises:
        ValueError: Not a host list, or one of more than `NAMES_MAX` names.
    """
    found: dict[str, None] = {}
    total = 0
    for word in _words(text):
        pieces = _pieces(word, text)
        if any(piece in {"*", "?"} for piece in pieces):
            raise ValueError(f"{text!r} is a pattern, not a host list: it has a * or a ?")
        total += _size(pieces)
        if total > NAMES_MAX:
            raise ValueError(f"{_short(text)!r} has more than {NAMES_MAX} names")
        choices = [[item] if isinstance(item, str) else _numbers(item) for item in pieces]
        found |= dict.fromkeys("".join(parts) for parts in itertools.product(*choices))
    return tuple(found)


def compress(names: Iterable[str]) -> str:
    """Return the host list of *names*, each once, ranges over the last number of each name.

    Raises:
        ValueError: A name is empty or has a character that a host list gives another meaning.
    """
    groups: dict[tuple[str, str] | str, list[str]] = {}
    for name in dict.fromkeys(names):
        if _LITERAL.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no name of a host")
        match = _NUMBERED.fullmatch(name)
        if match is None or len(match[2]) > _DIGITS_MAX:
            groups.setdefault(name, [])
        else:
            groups.setdefault((match[1], match[3]), []).append(match[2])
    return ",".join(_group(key, numbers) for key, numbers in groups.items())


def matches(pattern: str, name: str) -> bool:
    """Say whether *name* is one of *pattern*: a host list that may hold ``*`` and ``?``.

    Raises:
        ValueError: *pattern* is neither a host list nor such a pattern.
    """
    words = [_pieces(word, pattern) for word in _words(pattern)]
    return any(_is_one_of(pieces, name) for pieces in words)


def _words(text: str) -> list[str]:
    """Return the parts of *text* between the commas that are outside of brackets."""
    if not text.strip():
        return []
    words, at = [], 0
    while True:
        match = _WORD.match(text, at)
        if match is None:
            raise ValueError(f"{_short(text)!r} is no host list: a name is missing at {at + 1}")
        words.append(match[0].strip())
        at = match.end()
        if at == len(text):
            return words
        if text[at] != ",":
            raise ValueError(f"{_short(text)!r} is no host list: {text[at]!r} at {at + 1}")
        at += 1


def _pieces(word: str, text: str) -> tuple[_Piece, ...]:
    """Return *word* as literal texts, ``*``, ``?`` and ranges of numbers."""
    pieces: list[_Piece] = []
    at = 0
    while at < len(word):
        if word[at] == "[":
            end = word.index("]", at)
            pieces.append(tuple(_span(part, text) for part in word[at + 1 : end].split(",")))
            at = end + 1
        elif word[at] in "*?":
            pieces.append(word[at])
            at += 1
        elif (match := _LITERAL.match(word, at)) is not None:
            pieces.append(match[0])
            at = match.end()
        else:
            raise ValueError(f"{_short(text)!r} is no host list: {word[at]!r} is in no name")
    if not pieces:
        raise ValueError(f"{_short(text)!r} is no host list: a name is empty")
    return tuple(pieces)


def _span(part: str, text: str) -> _Span:
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        raise ValueError(f"{_short(text)!r} is no host list: {part!r} is no range of numbers")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ValueError(f"{_short(text)!r} is no host list: {part!r} runs backwards")
    return _Span(low, high, len(match[1]))


def _size(pieces: Iterable[_Piece]) -> int:
    size = 1
    for piece in pieces:
        size *= 1 if isinstance(piece, str) else sum(span.size for span in piece)
    return size


def _numbers(spans: _Spans) -> list[str]:
    return [digits for span in spans for digits in span]


def _group(key: tuple[str, str] | str, numbers: list[str]) -> str:
    if isinstance(key, str):
        return key
    prefix, suffix = key
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]}{suffix}"
    return f"{prefix}[{','.join(_ranges(numbers))}]{suffix}"


def _ranges(numbers: Iterable[str]) -> Iterator[str]:
    low = high = ""
    for digits in sorted(numbers, key=lambda item: (int(item), len(item))):
        if low and int(digits) == int(high) + 1 and digits == f"{int(digits):0{len(low)}}":
            high = digits
            continue
        if low:
            yield low if low == high else f"{low}-{high}"
        low = high = digits
    yield low if low == high else f"{low}-{high}"


def _is_one_of(pieces: Iterable[_Piece], name: str) -> bool:
    """Walk all places at once at which *name* may have got to: no pattern makes this slow."""
    positions = {0}
    for piece in pieces:
        if piece == "*":
            positions = set(range(min(positions), len(name) + 1))
        elif piece == "?":
            positions = {at + 1 for at in positions if at < len(name)}
        elif isinstance(piece, str):
            positions = {at + len(piece) for at in positions if name.startswith(piece, at)}
        else:
            positions = {end for at in positions for end in _ends(piece, name, at)}
        if not positions:
            return False
    return len(name) in positions


def _ends(spans: _Spans, name: str, at: int) -> Iterator[int]:
    """Yield where in *name* a number of *spans* ends that begins at *at*."""
    for end in range(at + 1, min(at + _DIGITS_MAX, len(name)) + 1):
        if name[end - 1] not in "0123456789":
            return
        if any(name[at:end] in span for span in spans):
            yield end


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
