"""Proofs of the job's token: HMAC-SHA256 over everything that must not be exchanged or replayed.

The token itself is never sent. An empty token is a run in open mode: the same proofs, which then
show only that both sides speak of the same run.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

NONCE_BYTES = 32
PROOF_BYTES = 32
# 128 bits: a forger who is cut off after the first mistake has one try per connection.
TAG_BYTES = 16
_COUNTER = struct.Struct(">Q")


def nonce() -> bytes:
    """Return new random bytes that no earlier connection had."""
    return secrets.token_bytes(NONCE_BYTES)


def token_key(token: str) -> bytes:
    """Return the key that everything else is derived from."""
    return hashlib.sha256(b"gpuops board token\0" + token.encode()).digest()


def run_digest(run_key: str) -> bytes:
    """Return *run_key* at a fixed length."""
    return hashlib.sha256(b"gpuops board run\0" + run_key.encode()).digest()


def sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of *parts*, each with its length, so that none can grow into the next."""
    body = b"".join(_COUNTER.pack(len(part)) + part for part in parts)
    return hmac.digest(key, body, "sha256")


def same(left: bytes, right: bytes) -> bool:
    """Compare in a time that does not tell where they differ."""
    return hmac.compare_digest(left, right)


@dataclass(frozen=True, slots=True)
class Handshake:
    """What both sides of one connection know once each has sent its nonce."""

    key: bytes
    said: bytes  # the first message of each side, whole

    def proof(self, side: str) -> bytes:
        """Return what only a holder of the token can say as *side* (client or server)."""
        return sign(self.key, b"proof", side.encode(), self.said)

    def channel(self, side: str) -> "Channel":
        """Return the tags of the frames that *side* sends."""
        return Channel(sign(self.key, b"frames", side.encode(), self.said))


class Channel:
    """Tags for one direction of a connection: a frame left out, repeated or changed is noticed."""

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def tag(self, body: bytes) -> bytes:
        """Return the tag of the next frame."""
        self._count += 1
        # A large value would otherwise be copied once more only to stand behind the counter.
        digest = hmac.new(self._key, _COUNTER.pack(self._count), "sha256")
        digest.update(body)
        return digest.digest()[:TAG_BYTES]

    def is_next(self, tag: bytes, body: bytes) -> bool:
        """Say whether *tag* is that of the next frame."""
        return same(tag, self.tag(body))


class SealError(ValueError):
    """The bytes were not sealed with this token for this place."""


_BARE, _PUT, _SWAPPED = b"\x00", b"\x01", b"\x02"


class Sealed:
    """Values that lie where others can write: with the proof of who wrote them, and for which key.

    A value written by compare-and-swap is also bound to its version, so that an old one cannot be
    brought back as the newest. An empty token seals nothing.
    """

    def __init__(self, run_key: str, token: str) -> None:
        self._key = token_key(token) if token else None
        self._run = run_key.encode()

    def close(self, key: str, value: bytes, version: int = 0) -> bytes:
        """Return *value* with its seal; *version* is 0 where it is not known."""
        if self._key is None:
            return _BARE + value
        kind = _SWAPPED if version else _PUT
        return kind + self._seal(kind, key, version, value) + value

    def open(self, key: str, sealed: bytes, version: int) -> bytes:
        """Return the value in *sealed*.

        Raises:
            SealError: It was not sealed with this token for this key and version.
        """
        kind = sealed[:1]
        if self._key is None:
            if kind != _BARE:
                raise SealError("it is sealed with a token, and this side has none")
            return sealed[1:]
        value = sealed[1 + PROOF_BYTES :]
        expected = self._seal(kind, key, version if kind == _SWAPPED else 0, value)
        if kind not in (_PUT, _SWAPPED) or not same(sealed[1 : 1 + PROOF_BYTES], expected):
            raise SealError("it was not written with the job's token")
        return value

    def _seal(self, kind: bytes, key: str, version: int, value: bytes) -> bytes:
        assert self._key is not None
        return sign(
            self._key, b"value", kind, self._run, key.encode(), _COUNTER.pack(version), value
        )
