"""Proof that both keepers of a transfer are of one job, before either reads anything else.

HMAC-SHA256 with a key made of the job's token over all that must not be exchanged or replayed; the
token itself is never sent. An empty token is a job in open mode: the same proofs, which then show
only that both sides speak of the same job.
"""

import hashlib
import hmac
import secrets
import struct
import threading
from dataclasses import dataclass

NONCE_BYTES = 32
PROOF_BYTES = 32
JOB_BYTES = 16
# 128 bits: a forger who is cut off after the first mistake has one try per connection.
TAG_BYTES = 16
_COUNTER = struct.Struct(">Q")


def nonce() -> bytes:
    """Return new random bytes that no earlier connection had."""
    return secrets.token_bytes(NONCE_BYTES)


def same(left: bytes, right: bytes) -> bool:
    """Compare in a time that does not tell where they differ."""
    return hmac.compare_digest(left, right)


def _sign(key: bytes, *parts: bytes) -> bytes:
    # Each part with its length, so that none can grow into the next.
    body = b"".join(_COUNTER.pack(len(part)) + part for part in parts)
    return hmac.digest(key, body, "sha256")


class JobPass:
    """What a keeper shows and asks for: of which job it is, and which epoch it has reached.

    One object for the server and every client of a keeper: `advance` fences them all at once.
    """

    def __init__(self, job: str, token: str, *, epoch: int = 0) -> None:
        self.job = hashlib.sha256(b"gpuops transfer job\0" + job.encode()).digest()[:JOB_BYTES]
        self.key = hashlib.sha256(b"gpuops transfer token\0" + token.encode()).digest()
        self._epoch = epoch
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """Return the newest epoch that this keeper knows of."""
        return self._epoch

    def advance(self, epoch: int) -> None:
        """Refuse, from now on, whatever is of an epoch older than *epoch*; never goes back."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)


@dataclass(frozen=True, slots=True)
class Handshake:
    """What both sides of one connection know once each has sent its nonce."""

    key: bytes
    said: bytes  # the first message of each side, whole

    def proof(self, side: str) -> bytes:
        """Return what only a holder of the token can say as *side* (client or server)."""
        return _sign(self.key, b"proof", side.encode(), self.said)

    def channel(self, side: str) -> "Channel":
        """Return the tags of the frames that *side* sends."""
        return Channel(_sign(self.key, b"frames", side.encode(), self.said))


class Channel:
    """Tags for one direction of a connection: a frame left out, repeated or changed is noticed."""

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def tag(self, body: bytes) -> bytes:
        """Return the tag of the next frame."""
        self._count += 1
        return hmac.digest(self._key, _COUNTER.pack(self._count) + body, "sha256")[:TAG_BYTES]

    def is_next(self, tag: bytes, body: bytes) -> bool:
        """Say whether *tag* is that of the next frame."""
        return same(tag, self.tag(body))
