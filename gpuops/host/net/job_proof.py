"""Proof that both sides of a connection are of one job, before either reads anything else.

HMAC-SHA256 with a key made of the job's token, over all that must not be exchanged or replayed; the
token itself is never sent. An empty token is a job in open mode: the same proofs, which then show
only that both sides speak of the same job.

Each side sends a greeting with a nonce of its own, the client its proof, the server a
`ProofWelcome` with its proof. From then on each frame carries a tag of its direction's
`ProofChannel`.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

from gpuops.host.net.frames import WireError, framed

NONCE_BYTES = 32
PROOF_BYTES = 32
# 128 bits: a forger who is cut off after the first mistake has one try per connection.
TAG_BYTES = 16
_COUNTER = struct.Struct(">Q")


def nonce() -> bytes:
    """Return new random bytes that no earlier connection had."""
    return secrets.token_bytes(NONCE_BYTES)


def derived(label: str, text: str) -> bytes:
    """Return the SHA-256 of *text* (a token, a name) for the one use that *label* names."""
    return hashlib.sha256(label.encode() + b"\0" + text.encode()).digest()


def sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of *parts*, each with its length, so that none can grow into the next."""
    body = b"".join(_COUNTER.pack(len(part)) + part for part in parts)
    return hmac.digest(key, body, "sha256")


def same(left: bytes, right: bytes) -> bool:
    """Compare in a time that does not tell where they differ."""
    return hmac.compare_digest(left, right)


class ProofWelcome(IntEnum):
    """The first byte of the server's last word of the opening."""

    COME_IN = 1
    OTHER_JOB = 2
    WRONG_TOKEN = 3
    BUSY = 4


def welcome(code: ProofWelcome, proof: bytes = bytes(PROOF_BYTES)) -> bytes:
    """Return the server's last word of the opening."""
    return bytes([code]) + proof


def read_welcome(data: bytes) -> tuple[ProofWelcome, bytes]:
    """Return the server's last word and its proof; raises `WireError` where it is neither."""
    if len(data) != 1 + PROOF_BYTES:
        raise WireError("not a welcome")
    try:
        return ProofWelcome(data[0]), data[1:]
    except ValueError as exc:
        raise WireError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class JobHandshake:
    """What both sides of one connection know once each has sent its nonce."""

    key: bytes
    said: bytes  # the first message of each side, whole

    def proof(self, side: str) -> bytes:
        """Return what only a holder of the token can say as *side* (client or server)."""
        return sign(self.key, b"proof", side.encode(), self.said)

    def channel(self, side: str) -> "ProofChannel":
        """Return the tags of the frames that *side* sends."""
        return ProofChannel(sign(self.key, b"frames", side.encode(), self.said))


class ProofChannel:
    """Tags for one direction of a connection: a frame left out, repeated or changed is noticed."""

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def frame(self, message: bytes) -> bytes:
        """Return *message* as the next frame that goes out."""
        return framed(self.tag(message), message)

    def message(self, body: bytes) -> bytes:
        """Return the message in *body*, the next frame that came in.

        Raises:
            WireError: The other side did not send it, or not now.
        """
        message = body[TAG_BYTES:]
        if not same(body[:TAG_BYTES], self.tag(message)):
            raise WireError("a frame that the other side did not send")
        return message

    def tag(self, message: bytes) -> bytes:
        """Return the tag of the next frame."""
        self._count += 1
        # A large message would otherwise be copied once more only to stand behind the counter.
        digest = hmac.new(self._key, _COUNTER.pack(self._count), "sha256")
        digest.update(message)
        return digest.digest()[:TAG_BYTES]
