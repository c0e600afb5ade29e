"""Reaching the control store of a sweep, and leading one beside taking part."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from gpuops.control.store import ControlStoreError, ControlStoreUnreachableError
from gpuops.control.tcp.store import TcpControlStore

_RETRY_S = 0.2
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAddress:
    """Where the nodes of a sweep meet, which sweep it is, and its token."""

    host: str
    port: int
    run_key: str
    token: str


def reach(place: SweepAddress, limit_s: float) -> TcpControlStore:
    """Return the control store at *place*, which the first node may only be starting.

    Raises:
        ControlStoreUnreachableError: It is not there within *limit_s*.
        ControlStoreError: It is another sweep's, or has another token.
    """
    end_s = time.monotonic() + limit_s
    while True:
        store = TcpControlStore(place.host, place.port, run_key=place.run_key, token=place.token)
        try:
            store.get("step")
        except ControlStoreUnreachableError:
            store.close()
            if time.monotonic() >= end_s:
                raise
            time.sleep(_RETRY_S)
        except ControlStoreError:
            store.close()
            raise
        else:
            return store


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run *work* in a thread; return its result, or its error, as a future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:  # noqa: BLE001 boundary: raised again by who asks for the result
            future.set_exception(exc)

    threading.Thread(target=run, name="gpuops-sweep", daemon=True).start()
    return future
