"""The manifest completes a directory of shards: it is written last and contains its own digest.

The file is readable JSON. Its first line has the BLAKE3 of all that follows, so that a manifest
that was edited by hand, or damaged on disk, is detected. It has no lists and one object per shard,
so that counting commas and brackets bounds the memory that parsing a hostile file takes.
"""

import base64
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from blake3 import blake3

from gpuops.checkpoint.digest import check_digest
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    IMAGE_BYTES_MAX,
    STEP_MAX,
    WORLD_MAX,
    CheckpointError,
    CorruptError,
    Digest,
    Shard,
    StateId,
)
from gpuops.wire.messages import Limit, MessageFormatError, read

MANIFEST = "manifest.json"
SCHEMA = "gpuops.checkpoint/1"
MANIFEST_BYTES_MAX = 64 * 2**20
TEXT_MAX = 256
GENERATION_MAX = 10**9

_FAMILY, _, _VERSION = SCHEMA.partition("/")
_DIGEST_START = b'{"digest": "'
_DIGEST_END = b'",\n'
_BODY_AT = len(_DIGEST_START) + 64 + len(_DIGEST_END)
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_SHARD_FILE = re.compile(r"shard-([0-9]{5})-of-([0-9]{5,6})\.safetensors\Z")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = "%Y-%m-%dT%H:%M:%SZ"
# One comma separates two members, and a shard has five at most.
_COMMAS_MAX = 6 * WORLD_MAX + 1000
_OBJECTS_MAX = WORLD_MAX + 100
_BRACKETS_MAX = 2 * TEXT_MAX  # only in names
_Text = Annotated[str, Limit(TEXT_MAX)]
_Hex = Annotated[str, Limit(64)]
_ENTRY = {
    "nbytes": Annotated[int, Limit(IMAGE_BYTES_MAX)],
    "layout": _Hex,
    "root": _Hex,
    "table": Annotated[bytes, Limit(MANIFEST_BYTES_MAX)],
}
_STATE = {"epoch": Annotated[int, Limit(EPOCH_MAX)], "step": Annotated[int, Limit(STEP_MAX)]}
_MEMBERS = {
    "digest": _Hex,
    "schema": _Text,
    "state": dict,
    "world": Annotated[int, Limit(WORLD_MAX)],
    "created": _Text,
    "version": _Text,
    "generation": Annotated[int, Limit(GENERATION_MAX)],
    "job": _Text,
    "shards": Annotated[dict[str, Any], Limit(WORLD_MAX)],
}


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard of a state, the hash of its image's header, and the digest of its bytes."""

    shard: Shard
    layout_hash: str
    digest: Digest

    def __post_init__(self) -> None:
        digest = self.digest
        _require(_HEX64.match(self.layout_hash), f"{self.layout_hash!r} is not a layout hash")
        _require(_HEX64.match(digest.root), f"{digest.root!r} is not a digest root")
        _require(0 < digest.nbytes <= IMAGE_BYTES_MAX, f"a shard cannot have {digest.nbytes} bytes")
        try:
            check_digest(digest)
        except CorruptError as exc:
            raise ValueError(str(exc)) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All shards of one state of a world of so many ranks, in the order of their ranks.

    ``created`` is UTC to the second, ``generation`` that of the workers that saved it,
    ``job`` names the run and ``version`` the gpuops that wrote it.

    Raises:
        ValueError: A shard is missing, duplicate or of another world; a value is out of bounds.
    """

    state: StateId
    world: int
    shards: tuple[ShardRecord, ...]
    created: str
    version: str
    generation: int
    job: str

    def __post_init__(self) -> None:
        _require(1 <= self.world <= WORLD_MAX, f"a world cannot have {self.world} ranks")
        _require(
            tuple(record.shard for record in self.shards)
            == tuple(Shard(rank, self.world) for rank in range(self.world)),
            f"its {len(self.shards)} shards are not those of a world of {self.world}",
        )
        _require(
            self.created == format_utc(_epoch_us(self.created)),
            f"{self.created!r} is not a time in UTC",
        )
        _require(0 <= self.generation <= GENERATION_MAX, f"invalid generation {self.generation}")
        for text in (self.version, self.job):
            _require(len(text) <= TEXT_MAX and text.isprintable(), f"{text[:40]!r} is not a name")

    @property
    def nbytes(self) -> int:
        return sum(record.digest.nbytes for record in self.shards)

    @property
    def created_s(self) -> int:
        """Return the time of creation, in seconds since the epoch."""
        return _epoch_us(self.created) // 1_000_000

    def record(self, shard: Shard) -> ShardRecord:
        """Return the record of *shard*.

        Raises:
            CheckpointError: It is not one of this state's.
        """
        if shard.world != self.world:
            raise CheckpointError(
                f"{self.state} was saved by {self.world} ranks, not by {shard.world}"
            )
        return self.shards[shard.rank]

    def has_same_shards(self, other: "Manifest") -> bool:
        return (self.state, self.world, self.shards) == (other.state, other.world, other.shards)


def format_utc(now_us: int) -> str:
    """Return *now_us*, microseconds since the epoch, in a manifest's format."""
    return (_EPOCH + timedelta(seconds=now_us // 1_000_000)).strftime(_TIME)


def _epoch_us(created: str) -> int:
    made = datetime.strptime(created, _TIME).replace(tzinfo=UTC)
    return (made - _EPOCH) // timedelta(microseconds=1)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file.

    Raises:
        CheckpointError: It would be larger than readers accept.
    """
    head = {
        "schema": SCHEMA,
        "state": {"epoch": manifest.state.epoch, "step": manifest.state.step},
        "world": manifest.world,
        "created": manifest.created,
        "version": manifest.version,
        "generation": manifest.generation,
        "job": manifest.job,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items()]
    shards = ",\n".join(
        f"{json.dumps(record.shard.file_name)}: {json.dumps(record_to_json(record))}"
        for record in manifest.shards
    )
    body = ("".join(lines) + '"shards": {\n' + shards + "\n}}\n").encode()
    content = _DIGEST_START + blake3(body).hexdigest().encode() + _DIGEST_END + body
    if len(content) > MANIFEST_BYTES_MAX:
        raise CheckpointError(
            f"the manifest of {manifest.state} ({manifest.nbytes} bytes, {manifest.world} shards) "
            f"would have {len(content)} bytes; the limit is {MANIFEST_BYTES_MAX}"
        )
    return content


def parse_manifest(content: bytes, source: str) -> Manifest:
    """Parse *content*; *source* names it in errors.

    Raises:
        CorruptError: Too large, damaged, edited by hand, or of another kind.
        CheckpointError: Written by a later version of gpuops.
    """
    try:
        values = parse_object(content)
        schema = values.get("schema")
        _check_schema(schema, source)
        if not _matches_own_digest(content):
            raise CorruptError(
                f"{source} was edited or damaged after it was written: its digest is not that of "
                "its content. Nothing in it can be trusted; restore the file, or use another state"
            )
        return _build_manifest(values)
    except ValueError as exc:
        raise CorruptError(f"{source} is not a checkpoint manifest: {exc}") from exc


def record_to_json(record: ShardRecord) -> dict[str, Any]:
    """Return a manifest's entry for one shard."""
    return {
        "nbytes": record.digest.nbytes,
        "layout": record.layout_hash,
        "root": record.digest.root,
        "table": base64.b64encode(record.digest.table).decode(),
    }


def verified_file_name(shard: Shard) -> str:
    """Return the name of the empty file next to *shard* once it was read back."""
    return f"{shard.file_name}.verified"


def damaged_file_name(shard: Shard) -> str:
    """Return the name of the empty file next to *shard* once it was found to be damaged."""
    return f"{shard.file_name}.damaged"


def names_verify(names: Collection[str], manifest: Manifest) -> bool:
    """Return whether the files *names* next to *manifest* say that each shard was read back."""
    return all(verified_file_name(record.shard) in names for record in manifest.shards)


def names_tell_damage(names: Collection[str], manifest: Manifest) -> bool:
    """Return whether a shard is not among the files *names*, or one of them says it is damaged."""
    return any(
        record.shard.file_name not in names or damaged_file_name(record.shard) in names
        for record in manifest.shards
    )


def record_file_name(shard: Shard) -> str:
    """Return the name of the file in which a node of a session records *shard*."""
    return f"{shard.file_name}.record.json"


def encode_record(record: ShardRecord) -> bytes:
    """Return the content of that file; `parse_record` reads it."""
    return json.dumps(record_to_json(record)).encode()


def parse_record(shard: Shard, content: bytes) -> ShardRecord | None:
    """Return the record of *shard* in *content*, None where it is invalid."""
    try:
        return record_from_json(shard.file_name, parse_object(content))
    except ValueError:
        return None


def record_from_json(file: str, value: Any) -> ShardRecord:  # noqa: ANN401 parsed JSON
    """Return the record of the shard that *value* describes.

    Raises:
        ValueError: It is invalid.
    """
    named = _SHARD_FILE.match(file)
    _require(named, f"{file[:80]!r} is not a shard file name")
    assert named is not None
    shard = Shard(int(named[1]), int(named[2]))
    _require(shard.file_name == file, f"{file[:80]!r} is not a shard file name")
    entry = _read_members(value, _ENTRY)
    digest = Digest(entry["nbytes"], entry["table"], entry["root"])
    return ShardRecord(shard, entry["layout"], digest)


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse *content* as a JSON object, after bounding the cost of parsing it.

    Raises:
        ValueError: Too large, not JSON, not an object, or with a duplicate name.
    """
    _require(len(content) <= MANIFEST_BYTES_MAX, f"it is larger than {MANIFEST_BYTES_MAX} bytes")
    _require(
        content.count(b",") <= _COMMAS_MAX
        and content.count(b"{") <= _OBJECTS_MAX
        and content.count(b"[") <= _BRACKETS_MAX,
        "it has more members than a manifest can have",
    )
    try:
        values = json.loads(content, object_pairs_hook=_unique_keys)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    _require(isinstance(values, dict), "it is not a JSON object")
    return values  # type: ignore[no-any-return]


def _check_schema(schema: object, source: str) -> None:
    if schema == SCHEMA:
        return
    family, _, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    newer = version.isascii() and version.isdigit() and len(version) < 10
    if family == _FAMILY and newer and int(version) > int(_VERSION):
        raise CheckpointError(
            f"{source} has version {version} of the format; this gpuops reads {_VERSION}. "
            "Install the gpuops that wrote it, or a later one, to read it"
        )
    raise ValueError(f"its schema is {str(schema)[:80]!r}, not {SCHEMA!r}")


def _matches_own_digest(content: bytes) -> bool:
    header = content[:_BODY_AT]
    digest = blake3(memoryview(content)[_BODY_AT:]).hexdigest().encode()
    return header == _DIGEST_START + digest + _DIGEST_END


def _build_manifest(values: Mapping[str, Any]) -> Manifest:
    found = _read_members(values, _MEMBERS)
    state = _read_members(found.pop("state"), _STATE)
    records = [record_from_json(file, entry) for file, entry in found.pop("shards").items()]
    del found["digest"], found["schema"]
    return Manifest(
        state=StateId(**state),
        shards=tuple(sorted(records, key=lambda record: record.shard)),
        **found,
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    _require(len(values) == len(pairs), "a name occurs twice")
    return values


def _read_members(value: object, kinds: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(kinds):
        raise ValueError(f"expected an object with {', '.join(kinds)}")
    found = {}
    for name, kind in kinds.items():
        try:
            found[name] = read(kind, value[name])
        except MessageFormatError as exc:
            raise ValueError(f"{name}: {exc}") from exc
    return found


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)
