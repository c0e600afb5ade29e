"""Secrets taken out of text before it is stored or printed.

Evidence is where secrets leak: tracebacks with URLs, dumped environments, command lines. A pattern
that takes too much costs a word of a log line; one that takes too little costs a password, so these
err towards the first. Every repetition is bounded: log text is hostile, and a pattern must not
backtrack without limit.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import islice

HIDDEN = "***"
DEPTH_MAX = 24
# Longer text is cut before it is searched: the time for a string is bounded as well.
TEXT_MAX = 256 * 1024

_NUMBER = re.compile(r"[-+]?\d{1,15}(?:\.\d{1,15})?(?:[eE][-+]?\d{1,3})?")
# The URL's last @ ends its password, which may itself hold a raw @ or /.
_URL_PASSWORD = re.compile(r"(://[^\s/:@\"'<>]{0,128}):[^\s\"'<>]{0,512}@")
# A key's text up to the next dashes, even where its end is missing. Possessive: a header repeated a
# thousand times is still read once.
_PEM = re.compile(r"(-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----)((?:[^-]|-(?!----)){1,16384}+)")
_KEY_LINE = re.compile(r"[^\n]+")
_AUTHORIZATION = re.compile(
    r"(authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:basic|bearer|token)\s{1,3})[^\s\"']{1,4096}",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s{1,3})[A-Za-z0-9._~+/=-]{8,4096}", re.IGNORECASE)
_SIGNED = re.compile(
    r"([?&](?:x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|signature|sig)"
    r"=)[^&\s\"']{1,4096}",
    re.IGNORECASE,
)
_KEY_STYLES = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,256}|hf_[A-Za-z0-9]{16,256}|gh[pousr]_[A-Za-z0-9]{20,256}"
    r"|github_pat_[A-Za-z0-9_]{20,256}|glpat-[A-Za-z0-9_-]{16,256}|xox[abprs]-[A-Za-z0-9-]{10,256}"
    r"|A[KS]IA[0-9A-Z]{16}|eyJ[A-Za-z0-9_-]{10,2048}\.[A-Za-z0-9_-]{10,4096}\.[A-Za-z0-9_-]{5,2048})"
)
_ALWAYS = r"password|passwd|passphrase|\bpwd|secret(?:[_-]?(?:access)?[_-]?key)?|private[_-]?key"
_UNLESS_NUMBER = r"(?<!pad_)token|api[_-]?key|access[_-]?key(?:[_-]?id)?|credentials?|auth[_-]?key"
_ASSIGNED = re.compile(
    rf"({_ALWAYS}|{_UNLESS_NUMBER})([\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?)([^\s\"'&,;)\]}}]{{1,4096}})",
    re.IGNORECASE,
)
# As in a usage error: `unrecognized arguments: --password hunter2`.
_FLAGGED = re.compile(
    rf"(?<![\w-])(--?[A-Za-z0-9_-]{{0,64}}?)({_ALWAYS}|{_UNLESS_NUMBER})"
    r"([ \t]{1,3}[\"']?)([^\s\"'-][^\s\"']{0,4095})",
    re.IGNORECASE,
)
_ALWAYS_KEY = re.compile(_ALWAYS, re.IGNORECASE)
_SECRET_NAME = re.compile(rf"(?:.{{0,256}}(?:{_ALWAYS}|{_UNLESS_NUMBER}))", re.IGNORECASE)


def scrub(text: str) -> str:
    """Return *text* with every secret that it shows replaced by ``***``.

    Of text longer than `TEXT_MAX` the rest is dropped.
    """
    if len(text) > TEXT_MAX:
        text = text[:TEXT_MAX] + "…"
    text = _PEM.sub(_without_key, text)
    text = _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    text = _SIGNED.sub(rf"\1{HIDDEN}", text)
    text = _KEY_STYLES.sub(HIDDEN, text)
    text = _FLAGGED.sub(lambda match: match[1] + _hidden(*match.groups()[1:]), text)
    return _ASSIGNED.sub(lambda match: _hidden(*match.groups()), text)


def scrub_lines(lines: Sequence[str]) -> list[str]:
    """Return as many lines, scrubbed, and without the keys that lie across several of them."""
    return [scrub(line) for line in _without_keys(lines)]


def _without_keys(lines: Sequence[str]) -> list[str]:
    whole = "\n".join(lines)
    if "PRIVATE KEY-----" not in whole:
        return list(lines)
    # Newlines are kept, so each line is found again by how many it held.
    parts = iter(_PEM.sub(_without_key, whole).split("\n"))
    return ["\n".join(islice(parts, line.count("\n") + 1)) for line in lines]


def _without_key(match: re.Match[str]) -> str:
    return match[1] + _KEY_LINE.sub(HIDDEN, match[2])


def _hidden(key: str, between: str, value: str) -> str:
    # Training logs are full of `token: 4096`; a bare number after such a word is a count.
    if not _ALWAYS_KEY.fullmatch(key) and _NUMBER.fullmatch(value):
        return f"{key}{between}{value}"
    return f"{key}{between}{HIDDEN}"


def scrub_value(value: object, depth: int = DEPTH_MAX) -> object:
    """Return *value* (JSON) scrubbed in every string, under secret keys and after secret flags.

    ``{"api_key": "x"}`` and ``["--api-key", "x"]`` are secrets by what stands next to them. Below
    *depth* levels nothing is kept.
    """
    if isinstance(value, str):
        return scrub(value)
    if depth <= 0 and isinstance(value, (Mapping, list, tuple)):
        return "…"
    if isinstance(value, Mapping):
        return {str(key): _scrub_under(str(key), item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return _scrub_list(value, depth)
    return value


def _scrub_under(key: str, value: object, depth: int) -> object:
    if isinstance(value, str) and value and _SECRET_NAME.fullmatch(key):
        return HIDDEN
    return scrub_value(value, depth - 1)


def _scrub_list(values: Sequence[object], depth: int) -> list[object]:
    scrubbed: list[object] = []
    after_flag = False
    lines = iter(_without_keys([value for value in values if isinstance(value, str)]))
    for value in (next(lines) if isinstance(v, str) else v for v in values):
        hide = after_flag and isinstance(value, str) and not value.startswith("-")
        scrubbed.append(HIDDEN if hide else scrub_value(value, depth - 1))
        after_flag = (
            isinstance(value, str)
            and value.startswith("-")
            and _SECRET_NAME.fullmatch(value) is not None
        )
    return scrubbed
