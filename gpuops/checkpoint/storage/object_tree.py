"""The objects below one prefix of a store, by short keys; a failed call is retried for a while."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from uuid import uuid4

from gpuops.checkpoint.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest, parse_manifest
from gpuops.checkpoint.storage.api import NoStateError, Throttle
from gpuops.checkpoint.types import CheckpointError, CorruptError, StateId
from gpuops.errors import EXIT_TRY_LATER
from gpuops.host.clock import Clock
from gpuops.scrub import scrub

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
PAUSE_MAX_S = 10.0
# A retry does not help with these, nor with other 4xx responses.
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
    MemoryError,
)
_FINAL_NAMES = ("Credential", "Authentication", "Forbidden")
_RETRYABLE_STATUS = {408, 409, 425, 429}
_TEXT_MAX = 300


class ShortReadError(OSError):
    """The store returned fewer bytes than it announced, or than exist."""


class UploadLostError(OSError):
    """The store no longer knows a multipart upload, and has no object of it either."""


class ObjectStoreUnreachableError(CheckpointError):
    """The store's address has never answered."""

    exit_code = EXIT_TRY_LATER


@dataclass(slots=True)
class Retrying:
    """Retries calls, with growing pauses, for *deadline_s* from the first attempt of each.

    The deadline limits when the last attempt may begin; how long one may take is a setting of the
    library that implements the store's protocol. Until the store has responded once, if only with
    an error (*has_responded*), a call takes *first_response_timeout_s* at most, whatever that
    library does meanwhile: an address without a server is given up sooner than a busy one.
    """

    deadline_s: float
    clock: Clock
    sleep: Callable[[float], object] = time.sleep
    random: Callable[[], float] = random.random
    first_response_timeout_s: float | None = None
    has_responded: bool = False

    def call(self, action: str, function: Callable[[], T]) -> T:
        """Return the result of *function*; *action* names it in errors.

        Raises:
            FileNotFoundError: There is no such object.
            ObjectStoreUnreachableError: The store has never answered, and did not within
                *first_response_timeout_s*.
            CheckpointError: It failed permanently, or until the deadline. A CheckpointError of
                *function* is raised unchanged.
        """
        begin_ns = self.clock.mono_ns()
        last: Exception | None = None
        for n_attempts, pause_s in enumerate(_pauses(), start=1):
            try:
                result = self._attempt(function, self._left_s(begin_ns))
            except FileNotFoundError:
                self.has_responded = True
                raise
            except _NoResponseError as exc:
                raise self._unreachable(action, last) from exc
            except CheckpointError:
                raise
            except Exception as exc:  # boundary: each protocol's library has errors of its own
                last = exc
                self.has_responded = self.has_responded or _status_of(exc) is not None
                varied_s = pause_s * (0.5 + self.random())
                if is_final(exc) or varied_s >= self._left_s(begin_ns):
                    raise self._failure(action, exc, n_attempts) from exc
            else:
                self.has_responded = True
                return result
            self.sleep(varied_s)
        raise AssertionError("the pauses are infinite")

    @property
    def _is_known(self) -> bool:
        return self.has_responded or self.first_response_timeout_s is None

    @property
    def _limit_s(self) -> float:
        if self.has_responded or self.first_response_timeout_s is None:
            return self.deadline_s
        return min(self.first_response_timeout_s, self.deadline_s)

    def _left_s(self, begin_ns: int) -> float:
        return self._limit_s - (self.clock.mono_ns() - begin_ns) / 1e9

    def _attempt(self, function: Callable[[], T], left_s: float) -> T:
        """Return the result of *function*; time out where the store has never responded."""
        if self._is_known:
            return function()
        result: Future[T] = Future()
        # Not a thread of a pool: the process may end while it hangs.
        threading.Thread(target=_run_into_future, args=(function, result), daemon=True).start()
        try:
            return result.result(max(left_s, 0.0))
        except TimeoutError as exc:
            if result.done():
                raise
            raise _NoResponseError from exc

    def _failure(self, action: str, exc: Exception, n_attempts: int) -> CheckpointError:
        if not self._is_known and not is_final(exc):
            return self._unreachable(action, exc)
        times = f" ({n_attempts} attempts)" if n_attempts > 1 else ""
        return CheckpointError(f"cannot {action}: {_error_text(exc)}{times}")

    def _unreachable(self, action: str, last: Exception | None) -> ObjectStoreUnreachableError:
        why = "" if last is None else f" ({_error_text(last)})"
        return ObjectStoreUnreachableError(
            f"cannot {action}: no answer, timed out after {self._limit_s:g} s{why}; check that the "
            "server is up and that this is its address"
        )


class _NoResponseError(Exception):
    """An attempt timed out."""


def _error_text(exc: Exception) -> str:
    return scrub(f"{type(exc).__name__}: {exc}"[:_TEXT_MAX])


def _run_into_future(function: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(function())
    except BaseException as exc:  # noqa: BLE001 boundary: the waiting thread raises it
        result.set_exception(exc)


def is_final(error: BaseException) -> bool:
    """Return whether a call that raised *error* would fail again."""
    if isinstance(error, _FINAL) and not isinstance(error, UnicodeError):
        return True
    if any(name in type(error).__name__ for name in _FINAL_NAMES):
        return True
    status = _status_of(error)
    return status is not None and 400 <= status < 500 and status not in _RETRYABLE_STATUS


def is_upload_gone(error: BaseException) -> bool:
    """Return whether S3 has answered that a multipart upload does not exist."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "NoSuchUpload"


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind *error*, which may be of any library."""
    current: BaseException | None = error
    for _ in range(4):
        if current is None:
            break
        response = getattr(current, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "status_code", "code"):
            status = getattr(current, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
        current = current.__cause__
    return None


def _pauses() -> Iterator[float]:
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


SESSIONS_FOLDER = ".parts"
# The names that fsspec's file systems have for them.
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")
_VERSION_KEYS = ("ETag", "etag", "VersionId", "generation", *_TIME_KEYS)
# Their folders are not created; asking for one would create a bucket.
_S3_PROTOCOLS = {"s3", "s3a"}
_FLAT_PROTOCOLS = _S3_PROTOCOLS | {"gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
# An object's metadata in S3: the upload that made it.
_UPLOAD_KEY = "gpuops-upload"


class ObjectTree:
    """The objects below *root* in fsspec's *filesystem*; *address* names it in errors."""

    def __init__(self, filesystem: Any, root: str, address: str, retrying: Retrying) -> None:  # noqa: ANN401 fsspec has no types
        self._fs = filesystem
        self._root = root.rstrip("/")
        self.address = address.rstrip("/")
        self._retrying = retrying
        protocols = filesystem.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        self._is_flat = bool(names & _FLAT_PROTOCOLS)
        self._is_s3 = bool(names & _S3_PROTOCOLS)

    def list_names(self) -> list[str]:
        """Return the names directly below the root.

        Raises:
            CheckpointError: It cannot be listed.
        """
        return [name for name, _ in self._list("")]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the objects directly in *folder*, by name; -1: it is a folder.

        Raises:
            CheckpointError: It cannot be listed.
        """
        return {
            name: info["size"] if info.get("type") == "file" else -1
            for name, info in self._list(folder)
        }

    def size(self, key: str) -> int | None:
        """Return the size of the object *key*; None: there is none.

        Raises:
            CheckpointError: The request fails.
        """
        info = self._info(key)
        return None if info is None else int(info["size"])

    def version(self, key: str) -> str | None:
        """Return a text that changes when *key* is written again; None: there is no such object.

        Raises:
            CheckpointError: The request fails.
        """
        info = self._info(key)
        if info is None:
            return None
        return "|".join(f"{name}={info[name]}" for name in _VERSION_KEYS if name in info)

    def read(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes *begin* to *end* of the object *key*.

        Raises:
            CheckpointError: They cannot be read.
        """

        def ask() -> bytes:
            content: bytes = self._fs.cat_file(self._path(key), start=begin, end=end)
            if len(content) != end - begin:
                self._fs.invalidate_cache()
                size_bytes = self._fs.info(self._path(key))["size"]
                if size_bytes < end:  # another attempt gets no more
                    raise CheckpointError(f"{self._url(key)} ends at byte {size_bytes}")
                raise ShortReadError(f"received {len(content)} of {end - begin} bytes")
            return content

        try:
            return self._call(f"read bytes {begin} to {end} of", key, ask)
        except FileNotFoundError as exc:
            raise CheckpointError(f"{self._url(key)} is not there") from exc

    def write(self, key: str, content: bytes) -> None:
        """Write *content* to the object *key*, atomically.

        Raises:
            CheckpointError: It cannot be written.
        """

        def put() -> None:
            self._make_folder(key)
            self._fs.pipe_file(self._path(key), content)

        self._call_in_bucket("write", key, put)

    def upload(self, key: str, source_fd: int, throttle: Throttle) -> str:
        """Write the file *source_fd* to the object *key*, several parts in parallel.

        Return the ID of the upload, for `is_uploaded`.

        Raises:
            CheckpointError: It cannot be written; *throttle* may raise it, too.
        """
        from fsspec.callbacks import Callback

        nbytes, upload_id = os.fstat(source_fd).st_size, uuid4().hex
        options = {"Metadata": {_UPLOAD_KEY: upload_id}} if self._is_s3 else {}

        class Paced(Callback):  # type: ignore[misc] # fsspec has no types
            def relative_update(self, inc: int = 1) -> None:
                throttle(inc)

        def put() -> None:
            self._make_folder(key)
            # A path of this process leads to memory that has no other name.
            source = f"/proc/self/fd/{source_fd}"
            try:
                self._fs.put_file(source, self._path(key), callback=Paced(), **options)
            except FileNotFoundError as exc:
                if not is_upload_gone(exc):
                    raise
                # The completion was answered by an error and retried: it may have succeeded.
                if not self._bears(key, nbytes, upload_id):
                    raise UploadLostError("the store no longer knows the upload") from None

        self._call_in_bucket("write", key, put)
        return upload_id

    def is_uploaded(self, key: str, nbytes: int, upload_id: str) -> bool:
        """Return whether *key* has *nbytes* and is of that `upload`; False where it is not S3.

        Raises:
            CheckpointError: The request fails.
        """
        if not self._is_s3:
            return False
        return self._call("inspect", key, lambda: self._bears(key, nbytes, upload_id))

    def remove(self, key: str) -> None:
        """Remove the object *key*, if it is there.

        Raises:
            CheckpointError: It cannot be removed.
        """
        if self._info(key) is None:
            return
        with suppress(FileNotFoundError):
            self._call("remove", key, lambda: self._fs.rm_file(self._path(key)))

    def remove_all(self, folder: str) -> None:
        """Remove everything below *folder*.

        Raises:
            CheckpointError: It cannot be removed.
        """
        with suppress(FileNotFoundError):
            self._call("remove", folder, lambda: self._fs.rm(self._path(folder), recursive=True))

    def remove_empty(self, folder: str) -> None:
        """Remove *folder* where the store has folders and nothing is in it."""
        try:
            if not self.sizes(folder):
                self._fs.rmdir(self._path(folder))
        except Exception:  # noqa: BLE001 boundary: an empty folder that stays does no harm
            return

    def last_modified_s(self, folder: str) -> float | None:
        """Return when an object in *folder* was last written, in seconds since the epoch.

        None: the store does not report it.

        Raises:
            CheckpointError: It cannot be listed.
        """
        latest = None
        for _, info in self._list(folder):
            found = next((info[name] for name in _TIME_KEYS if name in info), None)
            seconds = found.timestamp() if isinstance(found, datetime) else found
            if not isinstance(seconds, int | float):
                return None
            latest = seconds if latest is None else max(latest, seconds)
        return latest

    def read_manifest(self, state: StateId) -> Manifest:
        """Return the manifest of *state*.

        Raises:
            NoStateError: There is none.
            CorruptError: It is not what was written.
            CheckpointError: It cannot be read, or is of a later version.
        """
        key = f"{state.name}/{MANIFEST}"
        nbytes = self.size(key)
        if nbytes is None:
            raise NoStateError(f"there is no {state} in {self.address}")
        if not 0 <= nbytes <= MANIFEST_BYTES_MAX:
            raise CorruptError(f"{self._url(key)} has {nbytes} bytes, more than any manifest")
        manifest = parse_manifest(self.read(key, 0, nbytes), self._url(key))
        if manifest.state != state:
            raise CorruptError(f"{self._url(key)} is of {manifest.state}")
        return manifest

    def contains(self, manifest: Manifest) -> bool:
        """Return whether the state of *manifest* is there, with all its shards of the right size.

        Raises:
            CheckpointError: Another state has its name, or the store cannot be read.
        """
        try:
            stored = self.read_manifest(manifest.state)
        except (NoStateError, CorruptError):
            return False
        if not manifest.has_same_shards(stored):
            raise CheckpointError(
                f"{self._url(manifest.state.name)} is another state of that name, saved by "
                f"{stored.job or 'a run'} at {stored.created}. Give each run a prefix of its own"
            )
        sizes = self.sizes(manifest.state.name)
        return all(
            sizes.get(record.shard.file_name) == record.digest.nbytes for record in manifest.shards
        )

    def _list(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        def ask() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            found: list[dict[str, Any]] = self._fs.ls(self._path(folder), detail=True)
            return found

        try:
            infos = self._call("list", folder, ask)
        except FileNotFoundError:
            return
        prefix = self._path(folder).rstrip("/") + "/"
        for info in infos:
            name = str(info["name"]).rstrip("/")
            # Some stores list the folder itself, as an object without bytes.
            if name.startswith(prefix) and "/" not in name[len(prefix) :]:
                yield name[len(prefix) :], info

    def _info(self, key: str) -> dict[str, Any] | None:
        def ask() -> dict[str, Any]:
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.info(self._path(key))
            return found

        try:
            info = self._call("inspect", key, ask)
        except FileNotFoundError:
            return None
        return info if info.get("type") == "file" else None

    def _bears(self, key: str, nbytes: int, upload_id: str) -> bool:
        try:
            self._fs.invalidate_cache()
            path = self._path(key)
            has_size = self._fs.info(path)["size"] == nbytes
            return has_size and bool(self._fs.metadata(path).get(_UPLOAD_KEY) == upload_id)
        except FileNotFoundError:
            return False

    def _make_folder(self, key: str) -> None:
        if not self._is_flat:
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    def _call_in_bucket(self, action: str, key: str, function: Callable[[], None]) -> None:
        try:
            self._call(action, key, function)
        except FileNotFoundError as exc:
            raise CheckpointError(
                f"cannot {action} {self._url(key)}: {exc}; does the bucket exist?"
            ) from exc

    def _call(self, action: str, key: str, function: Callable[[], T]) -> T:
        return self._retrying.call(f"{action} {self._url(key)}", function)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _url(self, key: str) -> str:
        return f"{self.address}/{key}" if key else self.address
