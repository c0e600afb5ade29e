"""What the job's token protects: connections to the control store, and values others can reach."""

import struct

from gpuops.host.net.job_proof import PROOF_BYTES, derived, same, sign

_COUNTER = struct.Struct(">Q")


def token_key(token: str) -> bytes:
    """Return the key that everything else is derived from."""
    return derived("gpuops board token", token)


def run_digest(run_key: str) -> bytes:
    """Return *run_key* at a fixed length."""
    return derived("gpuops board run", run_key)


class SignatureError(ValueError):
    """The bytes were not signed with this token for this key."""


_UNSIGNED, _SIGNED_PUT, _SIGNED_CAS = b"\x00", b"\x01", b"\x02"


class ValueSigner:
    """Values that lie where others can write: with the proof of who wrote them, and for which key.

    A value written by compare-and-swap is also bound to its version, so that an old one cannot be
    brought back as the newest; and each value to ``instance``, the name of the run's rows, so that
    one of an earlier run with the same key and token cannot. An empty token seals nothing.
    """

    def __init__(self, run_key: str, token: str) -> None:
        self.instance = b""
        self._key = token_key(token) if token else None
        self._run = run_key.encode()

    def sign_value(self, key: str, value: bytes, version: int = 0) -> bytes:
        """Return *value* with its seal; *version* is 0 where it is not known."""
        if self._key is None:
            return _UNSIGNED + value
        kind = _SIGNED_CAS if version else _SIGNED_PUT
        return kind + self._signature(kind, key, version, value) + value

    def verify_value(self, key: str, signed: bytes, version: int) -> bytes:
        """Return the value in *signed*.

        Raises:
            SignatureError: It was not signed with this token for this key and version.
        """
        kind = signed[:1]
        if self._key is None:
            if kind != _UNSIGNED:
                raise SignatureError("it is signed with a token, and this agent has none")
            return signed[1:]
        value = signed[1 + PROOF_BYTES :]
        expected = self._signature(kind, key, version if kind == _SIGNED_CAS else 0, value)
        if kind not in (_SIGNED_PUT, _SIGNED_CAS) or not same(
            signed[1 : 1 + PROOF_BYTES], expected
        ):
            raise SignatureError("it was not written with the job's token")
        return value

    def _signature(self, kind: bytes, key: str, version: int, value: bytes) -> bytes:
        assert self._key is not None
        place = (self._run, self.instance if key else b"", key.encode())  # "" holds the instance
        return sign(self._key, b"value", kind, *place, _COUNTER.pack(version), value)
