"""What a sweep's coordinator and participants write into the control store."""

import json
from dataclasses import dataclass
from typing import TypeVar

from gpuops.burnin.pairs import NodePair, PairOutcome
from gpuops.control.store import ControlStoreError, Entry
from gpuops.errors import ConfigError
from gpuops.host.records import from_json, to_json

COORDINATOR_KEY = "coordinator"
STEP_KEY = "step"
ALIVE, ORDER, PORT, REPORT, FINDING, LEFT = "alive", "order", "port", "report", "finding", "left"
DETAIL_CHARS_MAX = 300

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A node that takes part. ``address``: where its peers reach it.

    ``domain``: its leaf switch; ``devices``: how many GPUs, 0 if it tests on its CPU; ``unfit``:
    why its own health check keeps it out of pair tests.
    """

    node: str
    address: str
    devices: int = 0
    domain: str | None = None
    unfit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStep:
    """The step that the sweep is at. ``is_over``: there are no more, also if it was interrupted."""

    number: int
    is_over: bool = False
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """A test of two nodes. ``a`` listens; ``devices``: how many of each node take part, 0: its CPU.

    ``size_bytes``: the buffer of each rank; ``seconds``: for how long to measure; ``timeout_s``: of
    one collective.
    """

    a: str
    b: str
    devices: int
    size_bytes: int
    seconds: float
    timeout_s: float

    @property
    def nodes(self) -> NodePair:
        return self.a, self.b


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """What one node of a pair saw; ``value``: the median bus bandwidth in GB/s."""

    outcome: PairOutcome
    value: float | None = None
    detail: str = ""


def key(*words: object) -> str:
    """Return the key of *words*, as ``order/1/n3``; with ``""`` last, the beginning of many."""
    return "/".join(map(str, words))


def encode(message: object) -> bytes:
    """Return *message*, a dataclass of this module, as bytes."""
    return json.dumps(to_json(message)).encode()


def decode(kind: type[T], entry: Entry, what: str) -> T:
    """Return the *kind* in *entry*.

    Raises:
        ControlStoreError: It is not one; *what* names it.
    """
    try:
        return from_json(kind, json.loads(entry.value), what)
    except (ConfigError, ValueError) as exc:
        raise ControlStoreError(f"another version of gpuops takes part: {exc}") from exc
