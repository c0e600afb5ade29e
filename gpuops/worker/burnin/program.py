"""What the programs of all tests share: the device under test, timed repeats, and their lines."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gpuops.burnin.measurement import Measurement, canonical
from gpuops.burnin.results import (
    NotMeasured,
    ProgramNote,
    Record,
    WrongResult,
)
from gpuops.hostlist import expand
from gpuops.model import Entity, EntityKind, UnknownReason

REPEATS = 20
REPEATS_MIN = 3
VALUES_MAX = 1000
# Clocks rise and caches fill meanwhile.
WARM_UP = 0.1

Emit = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Reporter:
    """Emits what one test found out about one part."""

    test: str
    part: Entity
    emit: Emit

    def measured(
        self,
        parameters: Mapping[str, str],
        values: Sequence[float],
        unit: str,
        *,
        higher_is_better: bool = True,
    ) -> None:
        self.emit(
            Measurement(
                test=self.test,
                part=self.part,
                parameters=parameters,
                values=tuple(values),
                unit=unit,
                higher_is_better=higher_is_better,
            )
        )

    def wrong(self, parameters: Mapping[str, str], message: str) -> None:
        text = canonical(parameters)
        self.emit(WrongResult(test=self.test, part=self.part, parameters=text, message=message))

    def not_measured(self, reason: UnknownReason, message: str) -> None:
        self.emit(NotMeasured(test=self.test, part=self.part, reason=reason, message=message))

    def note(self, message: str) -> None:
        self.emit(ProgramNote(test=self.test, part=self.part, message=message))


@dataclass(frozen=True, slots=True)
class DeviceUnderTest:
    """A GPU, or a group of processors (``cpus``) that one process computes on.

    Devices of the same ``model`` give the same bits for the same work.
    """

    torch_device: torch.device
    part: Entity
    model: str
    cpus: tuple[int, ...] = ()

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)


def open_device(name: str, part: str | None = None) -> DeviceUnderTest:
    """Return the device *name*: ``cuda:0``, or ``cpu:0-3,8`` for a list of processors.

    This process is bound to those processors. *part*: ``KIND:ID`` of the entity that its
    measurements are about.

    Raises:
        ValueError: Malformed.
    """
    kind, _, which = name.partition(":")
    if kind == "cuda":
        return _gpu(int(which or 0), part)
    if kind != "cpu":
        raise ValueError(f"--device {name!r}: expected cuda:N or cpu:LIST")
    cpus = parse_cpus(which) if which else tuple(sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))
    return DeviceUnderTest(
        torch.device("cpu"),
        _entity(part) or Entity(EntityKind.CPU, which or "all"),
        f"{torch.backends.cpu.get_cpu_capability()}, {len(cpus)} threads",
        cpus,
    )


def _gpu(index: int, part: str | None) -> DeviceUnderTest:
    about = torch.cuda.get_device_properties(index)
    torch.cuda.set_device(index)
    return DeviceUnderTest(
        torch.device("cuda", index),
        _entity(part) or Entity(EntityKind.GPU, f"GPU-{about.uuid}"),
        f"{about.name}, {about.multi_processor_count} multiprocessors",
    )


def _entity(text: str | None) -> Entity | None:
    if text is None:
        return None
    kind, _, name = text.partition(":")
    return Entity(EntityKind(kind), name)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the processors in *text*, as ``0-3,8``, the format of cpuset(7).

    Raises:
        ValueError: Malformed.
    """
    return tuple(sorted(map(int, expand(f"[{text}]"))))


def rates(
    once: Callable[[], object],
    device: DeviceUnderTest,
    seconds: float,
    amount: float,
    after_repeat: Callable[[], None] = lambda: None,
) -> tuple[float, ...]:
    """Return how much of *amount* per second *once* does, for each repeat within *seconds*.

    A repeat is as many calls as take about 1/20 of the time, at least one, and there are at least
    three. Before that *once* runs for a tenth of the time, unmeasured. *after_repeat* is called
    between two repeats, and its time is not measured.
    """
    per_call_s = _warm_up(once, device, seconds * WARM_UP)
    calls = max(1, round(seconds / REPEATS / per_call_s))
    ends_s, values = time.monotonic() + seconds * (1 - WARM_UP), list[float]()
    while len(values) < REPEATS_MIN or (time.monotonic() < ends_s and len(values) < VALUES_MAX):
        started_s = time.perf_counter()
        for _ in range(calls):
            once()
        device.synchronize()
        values.append(amount * calls / (time.perf_counter() - started_s))
        after_repeat()
    return tuple(values)


def _warm_up(once: Callable[[], object], device: DeviceUnderTest, seconds: float) -> float:
    """Run *once* for *seconds*, at least twice; return the seconds of the last call."""
    ends_s, took_s = time.monotonic() + seconds, 0.0
    for number in range(1_000_000):
        started_s = time.perf_counter()
        once()
        device.synchronize()
        took_s = max(time.perf_counter() - started_s, 1e-7)
        if number and time.monotonic() >= ends_s:
            break
    return took_s
