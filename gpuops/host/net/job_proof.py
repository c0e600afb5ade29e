"""Proof that both sides of a connection are of one job, before either reads anything else.

HMAC-SHA256 with a key derived from the job's token, over all data that must not be replaced or
replayed; the token itself is never sent. An empty token is a job in open mode: the same proofs,
which then prove only that both sides mean the same job.

Each side sends a greeting with its nonce, then the client its proof, then the server a
`ProofWelcome` with its proof. From then on each frame carries a tag of its direction's
`ProofChannel`.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from gpuops.host.net.frames import WireError, framed

NONCE_BYTES = 32
PROOF_BYTES = 32
# 128 bits: an attacker has one attempt per connection, which is closed after the first error.
TAG_BYTES = 16
_COUNTER = struct.Struct(">Q")


def nonce() -> bytes:
    """Return new random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def derived(label: str, text: str) -> bytes:
    """Return the SHA-256 of *text* (a token, a name) for the one use that *label* names."""
    return hashlib.sha256(label.encode() + b"\0" + text.encode()).digest()


def sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of *parts*, each with its length, so that their boundaries are fixed."""
    body = b"".join(_COUNTER.pack(len(part)) + part for part in parts)
    return hmac.digest(key, body, "sha256")


def same(left: bytes, right: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(left, right)


class ProofWelcome(IntEnum):
    """The first byte of the server's last message of the handshake."""

    ACCEPTED = 1
    OTHER_JOB = 2
    WRONG_TOKEN = 3
    BUSY = 4


def welcome(code: ProofWelcome, proof: bytes = bytes(PROOF_BYTES)) -> bytes:
    """Return the server's last message of the handshake."""
    return bytes([code]) + proof


def read_welcome(data: bytes) -> tuple[ProofWelcome, bytes]:
    """Return the code and proof in the server's last message; raises `WireError` if malformed."""
    if len(data) != 1 + PROOF_BYTES:
        raise WireError("not a welcome")
    try:
        return ProofWelcome(data[0]), data[1:]
    except ValueError as exc:
        raise WireError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class JobHandshake:
    """The state of one connection once both sides have sent their nonces."""

    key: bytes = field(repr=False)
    transcript: bytes  # the complete first message of each side

    def proof(self, side: str) -> bytes:
        """Return the proof of *side* (client or server), which requires the token."""
        return sign(self.key, b"proof", side.encode(), self.transcript)

    def channel(self, side: str) -> "ProofChannel":
        """Return the tags of the frames that *side* sends."""
        return ProofChannel(sign(self.key, b"frames", side.encode(), self.transcript))


class ProofChannel:
    """Tags for one direction of a connection: detect dropped, repeated or changed frames."""

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def frame(self, message: bytes) -> bytes:
        """Return *message* as the next outgoing frame."""
        return framed(self.tag(message), message)

    def message(self, body: bytes) -> bytes:
        """Return the message in *body*, the next incoming frame.

        Raises:
            WireError: The other side did not send it, or not as the next frame.
        """
        message = body[TAG_BYTES:]
        if not same(body[:TAG_BYTES], self.tag(message)):
            raise WireError("a frame that the other side did not send")
        return message

    def tag(self, message: bytes) -> bytes:
        """Return the tag of the next frame."""
        self._count += 1
        # This avoids another copy of a large message after the counter.
        digest = hmac.new(self._key, _COUNTER.pack(self._count), "sha256")
        digest.update(message)
        return digest.digest()[:TAG_BYTES]
