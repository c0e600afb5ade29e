"""The reasons of drains by gpuops, which it recognises by their text.

``gpuops: fail gpu_xid GPU-1a2b 79 -> reboot #4f3c2a1b``: the check, the entity, the value, the
action, and the last digits of the incident's id.
"""

PREFIX = "gpuops: "
LENGTH_MAX = 80
# The reason that slurmd sets when a hook ends with anything but zero (slurmd/req.c).
OF_SLURMD = {"prolog": "Prolog error", "epilog": "Epilog error"}
_SHOWN_ID = 8


def reason_text(
    check: str, entity_id: str, value: str | None, action: str, incident: str | None
) -> str:
    """Return the reason of a drain, at most `LENGTH_MAX` printable characters.

    If it is too long, the value is dropped first, then the entity.
    """
    tail = f" -> {action}" + (f" #{incident[-_SHOWN_ID:]}" if incident else "")
    words = ["fail", check, _short(entity_id), value or ""]
    for kept in (words, words[:3], words[:2]):
        text = PREFIX + _plain(" ".join(word for word in kept if word) + tail)
        if len(text) <= LENGTH_MAX:
            return text
    return text[:LENGTH_MAX]


def is_ours(reason: str | None) -> bool:
    """Return whether *reason* begins like those of gpuops."""
    return reason is not None and reason.startswith(PREFIX)


def _short(entity_id: str) -> str:
    return entity_id[:_SHOWN_ID] if entity_id.startswith("GPU-") else entity_id


def _plain(text: str) -> str:
    """Return *text* without what could end the reason's line or be read as more of the record."""
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in text)
