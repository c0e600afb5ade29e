"""A sweep from one process: reaching its control store, taking part, leading, or both."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gpuops.control.store import ControlStoreError, ControlStoreUnreachableError
from gpuops.control.tcp.process import start_server
from gpuops.control.tcp.store import TcpControlStore
from gpuops.host.clock import Clock
from gpuops.host.process.remote import start_remote
from gpuops.model import Finding
from gpuops.sweep.coordinator import JOIN_S, OnRound, SweepResult, SweepSettings, coordinate
from gpuops.sweep.messages import Participant
from gpuops.sweep.pair_test import PairTestRunner
from gpuops.sweep.participant import participate

_RETRY_S = 0.2
# Of the server, where the process that leads was killed and cannot end it; who takes part asks it
# every few seconds.
_LEASE_S = 30.0


class SweepInterruptedError(Exception):
    """Ctrl-C or SIGTERM: *cause*. ``result``: what was done until then, to be recorded."""

    def __init__(self, result: SweepResult, cause: KeyboardInterrupt) -> None:
        super().__init__("the sweep was interrupted")
        self.result = result
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAddress:
    """Where the nodes of a sweep meet, which sweep it is, and its token."""

    host: str
    port: int
    run_key: str
    token: str


def take_part(place: SweepAddress, me: Participant, env: Mapping[str, str]) -> Sequence[Finding]:
    """Take part in the sweep at *place* as *me*, whose address is found; see `participate`.

    *env*: the environment of the test programs.

    Raises:
        ControlStoreError: See `participate`; or the sweep does not begin within `JOIN_S`.
    """
    store = _reach(place)
    try:
        me = replace(me, address=store.local_address)
        return participate(store, me, PairTestRunner(env), time.sleep)
    finally:
        store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLeader:
    """Leads a sweep with *settings* from this process; *on_round*: see `coordinate`."""

    settings: SweepSettings
    clock: Clock
    on_round: OnRound

    def lead_step(
        self, place: SweepAddress, me: Participant, env: Mapping[str, str]
    ) -> tuple[SweepResult, Sequence[Finding]]:
        """Start the store at *place*, lead the sweep there, and take part in it as *me*.

        Returns the result, and what was found about this node. No thread is left.

        Raises:
            ControlStoreError: See `take_part`.
            SweepInterruptedError: See there.
        """
        server = start_server(
            place.host, place.port, run_key=place.run_key, token=place.token, lease_s=_LEASE_S
        )
        try:
            return self._lead(place, dict, lambda: take_part(place, me, env))
        finally:
            server.kill()

    def lead_remote(
        self,
        address: str,
        ssh: Sequence[str],
        words: Callable[[str, SweepAddress], Sequence[str]],
        env: Mapping[str, str],
    ) -> SweepResult:
        """Sweep the expected hosts over *ssh* from here; they reach this machine at *address*.

        *words*: the command on a host, which gets the token on its input.

        Raises:
            ControlStoreError: The store cannot be started or reached.
            SweepInterruptedError: See there.
            UsageError: The ssh command cannot be started.
        """
        token, run_key = secrets.token_hex(32), f"sweep-{secrets.token_hex(8)}"
        server = start_server(address, 0, run_key=run_key, token=token, lease_s=_LEASE_S)
        place = SweepAddress(host=address, port=server.port, run_key=run_key, token=token)
        try:
            hosts = self.settings.expected
            remote = start_remote(ssh, hosts, lambda host: words(host, place), token, env)
            try:
                return self._lead(place, remote.failures, tuple)[0]
            finally:
                remote.close()
        finally:
            server.kill()

    def _lead(
        self,
        place: SweepAddress,
        failed: Callable[[], Mapping[str, str]],
        meanwhile: Callable[[], Sequence[Finding]],
    ) -> tuple[SweepResult, Sequence[Finding]]:
        """Lead in a thread, whose talk with the store no signal interrupts; do *meanwhile* here."""
        stopped = threading.Event()
        settings = replace(self.settings, is_stopped=stopped.is_set)
        with ThreadPoolExecutor(1) as pool:
            leading = pool.submit(self._coordinate, settings, place, failed)
            try:
                found = meanwhile()
                return leading.result(), found
            except KeyboardInterrupt as exc:
                stopped.set()
                raise SweepInterruptedError(leading.result(), exc) from exc
            except BaseException:  # boundary: the thread waits for nobody
                stopped.set()
                raise

    def _coordinate(
        self,
        settings: SweepSettings,
        place: SweepAddress,
        failed: Callable[[], Mapping[str, str]],
    ) -> SweepResult:
        store = _reach(place)
        try:
            return coordinate(
                store, settings, self.clock, time.sleep, failed=failed, on_round=self.on_round
            )
        finally:
            store.close()


def _reach(place: SweepAddress) -> TcpControlStore:
    """Return the control store at *place*, which the first node may only be starting.

    Raises:
        ControlStoreUnreachableError: It is not there within `JOIN_S`.
        ControlStoreError: It is another sweep's, or has another token.
    """
    end_s = time.monotonic() + JOIN_S
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
