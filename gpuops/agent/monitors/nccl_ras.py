"""What NCCL itself says of a job that makes no progress: its RAS, which answers on this node.

NCCL (2.24 and newer) listens on ``localhost:28028`` unless ``NCCL_RAS_ADDR`` or ``NCCL_RAS_ENABLE``
says otherwise. Its answer is evidence; no verdict follows from it: on a shared node it may be that
of another job.
Source: NVIDIA/nccl, ``src/ras/client_support.cc``, and the user guide, chapter RAS.
"""

import logging
import socket
import time
from collections.abc import Mapping, Sequence

from gpuops.agent.monitors.api import Monitor
from gpuops.host.clock import Clock
from gpuops.log import printable
from gpuops.model import Evidence, Role
from gpuops.scrub import scrub
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

PORT = 28028
ANSWER_S = 4.0
# After so many seconds RAS answers without the processes that do not answer it.
RAS_TIMEOUT_S = 2
BYTES_MAX = 256 * 1024
LINES_MAX = 60
_LINE_CHARS = 200


class RasMonitor(Monitor):
    """Collects the status that NCCL gives of its communicators."""

    name = "nccl-ras"

    def __init__(self, clock: Clock, env: Mapping[str, str]) -> None:
        self._clock = clock
        self._address = ras_address(env)

    def evidence(self, deadline_ns: int) -> Sequence[Evidence]:
        """Return what RAS says, nothing where nobody answers in time."""
        left_s = min(ANSWER_S, (deadline_ns - self._clock.mono_ns()) / NS_PER_S)
        if self._address is None or left_s <= 0:
            return ()
        host, port = self._address
        try:
            lines = status_lines(ask_status(host, port, left_s))
        except (OSError, ValueError) as exc:
            log.debug("NCCL's RAS at %s:%d is not read: %s", host, port, exc)
            return ()
        text = f"NCCL's RAS at {host}:{port} reports"
        return (Evidence(role=Role.SYMPTOM, text=text, lines=lines),)


def ras_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where the RAS of workers with *env* listens, None where it is off."""
    if env.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = env.get("NCCL_RAS_ADDR", "").rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    return (host.strip("[]") or "localhost", int(port) if is_port else PORT)


def ask_status(host: str, port: int, timeout_s: float) -> str:
    """Return the text of ``VERBOSE STATUS``, at most `BYTES_MAX` of it.

    Raises:
        OSError: Nobody listens there, or the answer does not come within *timeout_s*.
        ValueError: It is another service.
    """
    words = f"CLIENT PROTOCOL 2\nTIMEOUT {RAS_TIMEOUT_S}\nVERBOSE STATUS\n"
    end_s, answer = time.monotonic() + timeout_s, bytearray()
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(words.encode())
        while len(answer) < BYTES_MAX:
            connection.settimeout(max(end_s - time.monotonic(), 0.001))
            part = connection.recv(BYTES_MAX - len(answer))
            if not part:
                break
            answer += part
    text = answer.decode(errors="replace")
    if not text.upper().startswith("SERVER PROTOCOL "):
        raise ValueError(f"{text[:80]!r} is no answer of NCCL's RAS")
    return text


def status_lines(text: str) -> tuple[str, ...]:
    """Return the lines of an answer behind those of its protocol, at most `LINES_MAX`."""
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [printable(scrub(line))[:_LINE_CHARS] for line in lines[1:] if line not in {"", "OK"}]
    return tuple(kept[:LINES_MAX])
