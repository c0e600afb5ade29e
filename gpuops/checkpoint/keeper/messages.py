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

from gpuops.checkpoint.keeper.api import CheckpointPolicy
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    STEP_MAX,
    WORLD_MAX,
    CheckpointError,
    RestorePoint,
    Shard,
    StateId,
    Tier,
)

VERSION = 1
MESSAGE_BYTES_MAX = 64 * 1024
FDS_MAX = 8
ID_MAX = 2**53
NUMBER_MAX = 1e9
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


def from_bytes(data: bytes) -> "MessageFields":
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
    return MessageFields(found)


@dataclass(frozen=True, slots=True)
class MessageFields:
    """The fields of a message; each is checked when it is asked for.

    All raise MessageError where the field is missing, of another type or out of bounds.
    """

    values: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return self.values.get(str(name)) is not None

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _invalid_field(name, value)
        return value

    def number(self, name: str, low: float = 0.0, high: float = NUMBER_MAX) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _invalid_field(name, value)
        if not (math.isfinite(value) and low <= value <= high):
            raise _invalid_field(name, value)
        return float(value)

    def text(self, name: str, chars_max: int) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or len(value) > chars_max or "\0" in value:
            raise _invalid_field(name, value)
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise _invalid_field(name, value)
        return value

    def items(self, name: str, n_max: int) -> list[Any]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > n_max:
            raise _invalid_field(name, value)
        return value

    def nested(self, name: str) -> "MessageFields":
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise _invalid_field(name, value)
        return MessageFields(value)

    def state(self, name: str = "state") -> StateId:
        numbers = _integer_pair(name, self.values.get(name), EPOCH_MAX, STEP_MAX)
        return StateId(*numbers)

    def shard(self, name: str = "shard") -> Shard:
        rank, world = _integer_pair(name, self.values.get(name), WORLD_MAX, WORLD_MAX)
        if rank >= world:
            raise _invalid_field(name, (rank, world))
        return Shard(rank, world)


def state_to_json(state: StateId) -> list[int]:
    """Return ``[epoch, step]``."""
    return [state.epoch, state.step]


def shard_to_json(shard: Shard) -> list[int]:
    """Return ``[rank, world]``."""
    return [shard.rank, shard.world]


def restore_point_to_json(restore_point: RestorePoint) -> dict[str, object]:
    """Return the fields of an offer."""
    return {
        "state": state_to_json(restore_point.state),
        "world": restore_point.world,
        "tier": restore_point.tier.value,
        "epoch": restore_point.epoch,
        "why": [why[:WHY_CHARS_MAX] for why in restore_point.why],
    }


def restore_point_from_json(fields: MessageFields) -> RestorePoint:
    """Return the offer; raises MessageError."""
    try:
        tier = Tier(fields.text("tier", 20))
    except ValueError as exc:
        raise MessageError("an offer names a tier that this gpuops does not know") from exc
    why = fields.items("why", 1000)
    return RestorePoint(
        fields.state(),
        fields.integer("world", 1, WORLD_MAX),
        tier,
        fields.integer("epoch", 0, EPOCH_MAX),
        tuple(str(reason) for reason in why),
    )


def policy_to_json(policy: CheckpointPolicy) -> dict[str, object]:
    """Return the fields of a policy."""
    return {
        "directory": policy.directory,
        "persist_every_s": policy.persist_every_s,
        "keep_last": policy.keep_last,
        "keep_every": policy.keep_every,
        "slots": policy.slots,
        "every_s": policy.every_s,
    }


def policy_from_json(fields: MessageFields) -> CheckpointPolicy:
    """Return the policy.

    Raises:
        CheckpointError: It is none, or asks for what cannot be.
    """
    return CheckpointPolicy(
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


def _integer_pair(name: str, value: object, first_max: int, second_max: int) -> tuple[int, int]:
    numbers = value if isinstance(value, list) else []
    is_valid = len(numbers) == 2 and all(
        isinstance(n, int) and not isinstance(n, bool) for n in numbers
    )
    if not is_valid or not (0 <= numbers[0] <= first_max and 0 <= numbers[1] <= second_max):
        raise _invalid_field(name, value)
    return numbers[0], numbers[1]


def _invalid_field(name: str, value: object) -> MessageError:
    shown = repr(value)
    return MessageError(f"a message has {name} = {shown[:60]}{'…' if len(shown) > 60 else ''}")
