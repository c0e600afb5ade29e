"""One node's side of a pair test: the processes that measure, and what they say of it."""

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gpuops.burnin.pairs import PairOutcome
from gpuops.host.net.traffic import interface_of
from gpuops.host.process.command import CommandEnd, module_command, run_bounded
from gpuops.sweep.coordinator import START_S
from gpuops.sweep.messages import DETAIL_CHARS_MAX, PairOrder, PairReport
from gpuops.sweep.participant import Exchange, IsOver

PROGRAM = "gpuops.worker.burnin.pair"
_IS_OVER_S = 2.0  # rare: what the question sends is on the link that is measured


@dataclass(frozen=True, slots=True)
class PairTestRunner:
    """Runs this node's side of pair tests, with *env* as the environment of the processes."""

    env: Mapping[str, str]
    command: tuple[str, ...] = module_command(PROGRAM)

    def __call__(
        self, order: PairOrder, node: str, address: str, exchange: Exchange, is_over: IsOver
    ) -> PairReport:
        """Run one test; a `gpuops.sweep.participant.PairTester`."""
        is_first = node == order.a
        with ExitStack() as stack:
            if is_first:
                listener = stack.enter_context(socket.create_server((address, 0)))
                place = address, listener.getsockname()[1]
                exchange(place[1])
            else:
                listener = None
                found = exchange(None)
                if found is None:
                    return PairReport(
                        outcome=PairOutcome.UNKNOWN, detail=f"{order.a} did not begin the test"
                    )
                place = found
            ends = self._run(order, is_first, address, place, listener, is_over)
        return report_of(ends, is_first=is_first)

    def _run(
        self,
        order: PairOrder,
        is_first: bool,
        address: str,
        place: tuple[str, int],
        listener: socket.socket | None,
        is_over: IsOver,
    ) -> list[CommandEnd]:
        """Return how the process of each device ended; all end once one failed or it *is_over*."""
        n_local = max(order.devices, 1)
        failed = threading.Event()
        interface = interface_of(address)
        env = {
            **self.env,
            **(
                {}
                if interface is None
                else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
            ),
        }

        def run_one(local: int) -> CommandEnd:
            rank = local + (0 if is_first else n_local)
            argv = [
                *self.command,
                *("--rank", str(rank), "--world", str(2 * n_local)),
                *("--host", place[0], "--port", str(place[1])),
                *("--device", f"cuda:{local}" if order.devices else "cpu"),
                *("--size-bytes", str(order.size_bytes), "--seconds", f"{order.seconds:g}"),
                *("--timeout", f"{order.timeout_s:g}"),
            ]
            fds: tuple[int, ...] = ()
            if rank == 0 and listener is not None:
                fds = (listener.fileno(),)
                argv += ["--listen-fd", str(fds[0])]
            limit_s = START_S + 3 * order.seconds + order.timeout_s
            end = run_bounded(argv, env, limit_s, failed.is_set, pass_fds=fds)
            if end is None or end.exit_code != 0:
                failed.set()
            return end or CommandEnd(exit_code=0, output=b"{}")

        with ThreadPoolExecutor(n_local) as pool:
            try:
                ends = [pool.submit(run_one, local) for local in range(n_local)]
                while wait(ends, _IS_OVER_S).not_done:
                    if is_over():
                        failed.set()
                return [end.result() for end in ends]
            finally:
                failed.set()  # Ctrl-C waits for no test


def report_of(ends: Sequence[CommandEnd], *, is_first: bool) -> PairReport:
    """Return what the ends of a node's processes say; the first one of the first node measured."""
    values: list[float] = []
    for number, end in enumerate(ends):
        if end.exit_code is None:
            return PairReport(
                outcome=PairOutcome.TIMEOUT, detail=f"no result in {end.seconds:.0f} s"
            )
        said = _last_object(end.output)
        if end.exit_code != 0 or said is None:
            return PairReport(outcome=PairOutcome.UNKNOWN, detail=_cut(_why_unknown(end)))
        for key, outcome in (
            ("wrong", PairOutcome.FAIL),
            ("failed", PairOutcome.FAIL),
            ("timeout", PairOutcome.TIMEOUT),
        ):
            if key in said:
                return PairReport(outcome=outcome, detail=_cut(str(said[key])))
        if is_first and number == 0:
            values = [float(said["busbw_gbs"])] if "busbw_gbs" in said else []
            if not values or not values[0] > 0:
                return PairReport(outcome=PairOutcome.UNKNOWN, detail="it measured nothing")
    return PairReport(outcome=PairOutcome.PASS, value=values[0] if values else None)


def _last_object(output: bytes) -> Mapping[str, Any] | None:
    for line in reversed(output.decode("utf-8", errors="replace").splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None


def _why_unknown(end: CommandEnd) -> str:
    lines = [line for line in end.errors.decode("utf-8", errors="replace").split("\n") if line]
    ending = f"the test program exited with code {end.exit_code}"
    if (end.exit_code or 0) < 0:
        ending = f"the test program was ended by signal {-(end.exit_code or 0)}"
    return f"{ending}: {lines[-1].strip()}" if lines else ending


def _cut(text: str) -> str:
    return " ".join(text.split())[:DETAIL_CHARS_MAX]
