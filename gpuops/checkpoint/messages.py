"""What is said on a keeper's socket: one JSON object a message, versioned, bounded, checked.

A request is ``{"v": 1, "id": n, "what": word, …}``; its answer has the same id and either ``"ok"``
or ``"error"`` (a sentence) with ``"kind"``; a request with the id 0 has no answer. Descriptors go
beside an answer only.
"""

import json
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuops.checkpoint.keeper import Policy
from gpuops.checkpoint.states import (
    EPOCH_MAX,
    STEP_MAX,
    WORLD_MAX,
    CheckpointError,
    Offer,
    Shard,
    StateId,
    Tier,
)

VERSION = 1
MESSAGE_BYTES_MAX = 64 * 1024
FDS_MAX = 8
ID_MAX = 2**53
SECONDS_MAX = 1e9
WHY_CHARS_MAX = 300


class MessageError(CheckpointError):
    """A message that this version does not know, or that is none."""


def to_bytes(message: Mapping[str, object]) -> bytes:
    """Return *message* as it goes over the socket.

    Raises:
        MessageError: It is too long.
    """
    data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message has {len(data)} bytes, more than {MESSAGE_BYTES_MAX}")
    return data


def from_bytes(data: bytes) -> "Fields":
    """Return the fields of a message.

    Raises:
        MessageError: It is no JSON object, too long, or of another version.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise MessageError("a message is no JSON") from exc
    if not isinstance(found, dict):
        raise MessageError("a message is no JSON object")
    if type(found.get("v")) is not int or found["v"] != VERSION:
        version = str(found.get("v"))[:20]
        raise MessageError(
            f"a message is of version {version}, and this gpuops speaks {VERSION}: all processes "
            "of a job must run the same release"
        )
    return Fields(found)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a message; each is checked when it is asked for.

    All raise MessageError where the field is missing, of another type or out of bounds.
    """

    values: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return self.values.get(str(name)) is not None

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(name, value)
        return value

    def number(self, name: str, low: float = 0.0, high: float = SECONDS_MAX) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, value)
        if not (math.isfinite(value) and low <= value <= high):
            raise _wrong(name, value)
        return float(value)

    def text(self, name: str, chars_max: int) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or len(value) > chars_max or "\0" in value:
            raise _wrong(name, value)
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise _wrong(name, value)
        return value

    def items(self, name: str, n_max: int) -> list[Any]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > n_max:
            raise _wrong(name, value)
        return value

    def part(self, name: str) -> "Fields":
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise _wrong(name, value)
        return Fields(value)

    def state(self, name: str = "state") -> StateId:
        pair = _whole_pair(name, self.values.get(name), EPOCH_MAX, STEP_MAX)
        return StateId(*pair)

    def shard(self, name: str = "shard") -> Shard:
        rank, world = _whole_pair(name, self.values.get(name), WORLD_MAX, WORLD_MAX)
        if rank >= world:
            raise _wrong(name, (rank, world))
        return Shard(rank, world)


def state_to_json(state: StateId) -> list[int]:
    """Return ``[epoch, step]``."""
    return [state.epoch, state.step]


def shard_to_json(shard: Shard) -> list[int]:
    """Return ``[rank, world]``."""
    return [shard.rank, shard.world]


def offer_to_json(offer: Offer) -> dict[str, object]:
    """Return the fields of an offer."""
    return {
        "state": state_to_json(offer.state),
        "world": offer.world,
        "tier": offer.tier.value,
        "epoch": offer.epoch,
        "why": [why[:WHY_CHARS_MAX] for why in offer.why],
    }


def offer_from_json(fields: Fields) -> Offer:
    """Return the offer; raises MessageError."""
    try:
        tier = Tier(fields.text("tier", 20))
    except ValueError as exc:
        raise MessageError("an offer names a tier that this gpuops does not know") from exc
    why = fields.items("why", 1000)
    return Offer(
        fields.state(),
        fields.integer("world", 1, WORLD_MAX),
        tier,
        fields.integer("epoch", 0, EPOCH_MAX),
        tuple(str(reason) for reason in why),
    )


def policy_to_json(policy: Policy) -> dict[str, object]:
    """Return the fields of a policy."""
    return {
        "directory": policy.directory,
        "persist_every_s": policy.persist_every_s,
        "keep_last": policy.keep_last,
        "keep_every": policy.keep_every,
        "slots": policy.slots,
        "every_s": policy.every_s,
    }


def policy_from_json(fields: Fields) -> Policy:
    """Return the policy.

    Raises:
        CheckpointError: It is none, or asks for what cannot be.
    """
    return Policy(
        directory=fields.text("directory", 4096) if "directory" in fields else None,
        persist_every_s=fields.number("persist_every_s") if "persist_every_s" in fields else None,
        keep_last=fields.integer("keep_last", 0, ID_MAX),
        keep_every=fields.integer("keep_every", 0, ID_MAX),
        slots=fields.integer("slots", 0, ID_MAX),
        every_s=fields.number("every_s"),
    )


def receive(sock: socket.socket) -> bytes:
    """Return the next message, b"" where the other side is gone.

    Descriptors that come with it are dropped by the kernel. Raises OSError as `recvmsg` does,
    MessageError where the message is longer than any can be.
    """
    data, _, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX)
    if flags & socket.MSG_TRUNC:
        raise MessageError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
    return data


def _whole_pair(name: str, value: object, most: int, second_most: int) -> tuple[int, int]:
    pair = value if isinstance(value, list) else []
    sound = len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not sound or not (0 <= pair[0] <= most and 0 <= pair[1] <= second_most):
        raise _wrong(name, value)
    return pair[0], pair[1]


def _wrong(name: str, value: object) -> MessageError:
    shown = repr(value)
    return MessageError(f"a message has {name} = {shown[:60]}{'…' if len(shown) > 60 else ''}")
