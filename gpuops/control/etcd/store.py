"""A control store in etcd, so that any minority of its members may be lost.

Each call is one transaction, which is done only while the run's first key is the one that this
handle saw first: a run that was cleaned up is noticed at the next call. A key's version is etcd's,
its arrival the revision that created it. A waiting heartbeat polls every `POLL_S`, as in Postgres:
a poll is a read that one member answers alone.

All keys hang on one lease of `KEEP_DAYS`, which the agents renew: nothing of a dead run stays. With
a token every value is signed, as in Postgres.
"""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuops.control.etcd.address import EtcdAddress
from gpuops.control.etcd.session import EtcdSession, MemberClock
from gpuops.control.memory import check_key, check_prefix, check_value, is_own_write
from gpuops.control.signing import SignatureError, ValueSigner, run_digest
from gpuops.control.store import (
    NO_ENTRY,
    ControlStoreError,
    ControlStoreResetError,
    Entry,
    HeartbeatReply,
    OtherTokenError,
)
from gpuops.host.net.job_proof import nonce

DEADLINE_S = 5.0
POLL_S = 0.25
KEEP_DAYS = 7
RENEW_S = 3600.0

_Txn = dict[str, Any]


class EtcdControlStore:
    """A `ControlStore` in the etcd at *url*; safe from several threads.

    Its time is the clock of the member that answered first, in seconds since the epoch, to a
    second. Every call ends within *deadline_s* (a heartbeat: and its hold). Where it raises
    `ControlStoreUnreachableError`, what it asked for may still have been done.

    Raises:
        ControlStoreError: *url* is malformed, or a file that it names cannot be used.
    """

    def __init__(
        self, url: str, *, run_key: str, token: str = "", deadline_s: float = DEADLINE_S
    ) -> None:
        self.address = EtcdAddress.parse(url)
        self._deadline_s = deadline_s
        self._signer = ValueSigner(run_key, token)
        self._root = f"gpuops/{run_digest(run_key).hex()}/"
        self._clock = MemberClock()
        self._calls = EtcdSession(self.address, self._clock)
        self._heartbeats = EtcdSession(self.address, self._clock)
        self._first: Mapping[str, Any] | None = None
        self._instance = b""
        self._lease = 0
        self._renew_at_s = 0.0
        self.revision = 0  # of etcd, at the last answer: it grows with each writing

    @property
    def instance(self) -> str:
        """Return the name of this run's keys, "" before the first answer."""
        return self._instance[:16].hex()

    def get(self, key: str) -> Entry:
        return self._entry(key, self._read(self._calls, self._range(check_key(key))))

    def list(self, prefix: str) -> Mapping[str, Entry]:
        ordered = {"sort_target": "CREATE", "sort_order": "ASCEND"}
        found = self._read(self._calls, self._range(check_prefix(prefix), is_prefix=True) | ordered)
        names = [_decoded(pair["key"]).decode().removeprefix(self._data("")) for pair in found]
        return {name: self._entry(name, [pair]) for name, pair in zip(names, found, strict=True)}

    def put(self, key: str, value: bytes) -> None:
        check_value(check_key(key), value)
        self._transact(self._calls, lambda: {"success": [self._put(key, value)]})

    def compare_and_set(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        check_value(check_key(key), value)
        read = {"request_range": self._range(key)}

        def swap() -> _Txn:
            compare = {"key": _encoded(self._data(key)), "target": "VERSION"}
            return {
                "compare": [compare | {"version": version, "result": "EQUAL"}],
                "success": [self._put(key, value, version + 1), read],
                "failure": [read],
            }

        done, answers = self._transact(self._calls, swap)
        entry = self._entry(key, _pairs(answers[-1]))
        return done or is_own_write(entry, value, version), entry

    def heartbeat(
        self, key: str, value: bytes, *, watch: str, seen_version: int, hold_s: float
    ) -> HeartbeatReply:
        check_value(check_key(key), value)
        watched = self._range(check_key(watch))
        hold_end_s = time.monotonic() + hold_s

        def beat() -> _Txn:
            return {"success": [self._put(key, value), {"request_range": watched}]}

        _done, answers = self._transact(self._heartbeats, beat)
        entry = self._entry(watch, _pairs(answers[-1]))
        while entry.version <= seen_version and (left_s := hold_end_s - time.monotonic()) > 0:
            self._heartbeats.wait(min(left_s, POLL_S))
            entry = self._entry(watch, self._read_local(watched))
        self._renew_lease()
        now_s = self._clock.read_s(time.monotonic())
        return HeartbeatReply(entry if entry.version > seen_version else None, now_s)

    def delete(self, prefix: str) -> None:
        ranges = [self._range(check_prefix(prefix), is_prefix=True)]
        if not prefix:  # the run is over: the next one of this name is another
            ranges.append({"key": _encoded(self._root + "first")})
        deletions = [{"request_delete_range": keys} for keys in ranges]
        self._transact(self._calls, lambda: {"success": deletions})
        if not prefix:
            self._first = None

    def disconnected_s(self) -> float:
        return 0.0  # each member sees its own connections alone: silence tells

    def close(self) -> None:
        self._calls.close()
        self._heartbeats.close()

    def _read(self, session: EtcdSession, wanted: _Txn) -> Sequence[Any]:
        _done, answers = self._transact(session, lambda: {"success": [{"request_range": wanted}]})
        return _pairs(answers[0])

    def _read_local(self, wanted: _Txn) -> Sequence[Any]:
        """Return what one member knows, which may be old: it may not have this run's first key."""
        local = wanted | {"serializable": True}
        found: Sequence[Any] = self._heartbeats.call("kv/range", local, self._deadline_s).get(
            "kvs", []
        )
        return found

    def _transact(
        self, session: EtcdSession, build: Callable[[], _Txn]
    ) -> tuple[bool, Sequence[Any]]:
        """Do what *build* returns while the run's first key is there; say which branch was taken.

        Raises:
            ControlStoreResetError: It is not, or another is in its place.
        """
        if self._first is None:
            self._open(session)
        assert self._first is not None
        txn: _Txn = build()
        # etcd takes a transaction in another one for a write, also where it only reads.
        is_nested = "compare" in txn
        done = [{"request_txn": txn}] if is_nested else txn["success"]
        answer = session.call(
            "kv/txn", {"compare": [self._first], "success": done}, self._deadline_s
        )
        self.revision = int(answer["header"].get("revision", 0))
        if not answer.get("succeeded"):
            raise ControlStoreResetError(
                f"the control store at {self.address} was cleaned up and forgot this run"
            )
        if not is_nested:
            return True, answer.get("responses", [])
        nested = answer["responses"][0]["response_txn"]
        return bool(nested.get("succeeded")), nested.get("responses", [])

    def _open(self, session: EtcdSession) -> None:
        """Find this run's first key, or write it."""
        key = _encoded(f"{self._root}first")
        granted = session.call("lease/grant", {"TTL": KEEP_DAYS * 86_400}, self._deadline_s)
        lease = int(granted["ID"])
        body = nonce()[:16] + lease.to_bytes(8, "big")
        put = {
            "key": key,
            "value": _encoded(self._signer.sign_value("", body, 1)),
            "lease": lease,
        }
        read = [{"request_range": {"key": key}}]
        is_absent = {"key": key, "target": "VERSION", "version": 0, "result": "EQUAL"}
        answer = session.call(
            "kv/txn",
            {
                "compare": [is_absent],
                "success": [{"request_put": put}, *read],
                "failure": read,
            },
            self._deadline_s,
        )
        (pair,) = _pairs(answer["responses"][-1])
        try:
            self._instance = self._signer.verify_value("", _decoded(pair["value"]), 1)
        except SignatureError as exc:
            raise OtherTokenError(
                f"the control store at {self.address} has another token for this run: {exc}"
            ) from None
        self._lease = int.from_bytes(self._instance[16:], "big")
        self._renew_at_s = time.monotonic() + RENEW_S
        if self._lease != lease:
            session.call("lease/revoke", {"ID": lease}, self._deadline_s)
        created = {"target": "CREATE", "create_revision": pair["create_revision"]}
        self._first = {"key": key, "result": "EQUAL", **created}

    def _renew_lease(self) -> None:
        if time.monotonic() >= self._renew_at_s:
            self._heartbeats.call("lease/keepalive", {"ID": self._lease}, self._deadline_s)
            self._renew_at_s = time.monotonic() + RENEW_S

    def _data(self, key: str) -> str:
        return f"{self._root}k/{key}"

    def _range(self, key: str, *, is_prefix: bool = False) -> _Txn:
        full = self._data(key).encode()
        if not is_prefix:
            return {"key": _encoded(full)}
        # Keys are ASCII, so that the last byte has a next one.
        return {"key": _encoded(full), "range_end": _encoded(full[:-1] + bytes([full[-1] + 1]))}

    def _put(self, key: str, value: bytes, version: int = 0) -> _Txn:
        signed = self._signer.sign_value(key, bytes(value), version)
        wanted = {"key": _encoded(self._data(key)), "value": _encoded(signed)}
        return {"request_put": wanted | {"lease": self._lease}}

    def _entry(self, key: str, pairs: Sequence[Any]) -> Entry:
        if not pairs:
            return NO_ENTRY
        (pair,) = pairs
        version, arrival = int(pair["version"]), int(pair["create_revision"])
        try:
            value = self._signer.verify_value(key, _decoded(pair.get("value", "")), version)
        except SignatureError as exc:
            raise ControlStoreError(
                f"the control store's key {key!r} in etcd is not to be trusted: {exc}"
            ) from None
        return Entry(value, version, arrival)


def _pairs(answer: Mapping[str, Any]) -> Sequence[Any]:
    found: Sequence[Any] = answer["response_range"].get("kvs", [])
    return found


def _encoded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)
