"""Run a tool of others within bounds, and read the rates in its JSON."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpuops.config.resolve import environ
from gpuops.errors import ProbeError
from gpuops.host.process.command import OUTPUT_BYTES_MAX, module_command, run_bounded
from gpuops.model import Entity, UnknownReason

# For start-up and memory allocation, in addition to the time that a tool measures.
START_S = 30.0


@dataclass(frozen=True, slots=True)
class ToolRate:
    """Rates in GB/s (1e9 bytes) of the same work; ``part`` None: they are the node's."""

    parameters: Mapping[str, str]
    values: tuple[float, ...]
    part: Entity | None = None


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool measured, and its version. ``wrong``: which results it found to be wrong."""

    version: str
    rates: tuple[ToolRate, ...]
    wrong: tuple[str, ...] = ()


def measure(
    argv: Callable[[str], Sequence[str]],
    parse: Callable[[Any], ToolOutput],
    seconds: float,
    pass_fds: Sequence[int] = (),
) -> ToolOutput:
    """Return what the tool *argv* measured in about *seconds*; *argv* gets a file to write to.

    *parse* gets the JSON object in that file, or else in what was printed.

    Raises:
        ProbeError: It did not end in time (``timeout``), it failed, or there is no proof that it
            measured (``crash``).
    """
    with TemporaryDirectory(prefix="gpuops-tools-") as folder:
        path = Path(folder, "out.json")
        try:
            text = run_tool(argv(str(path)), seconds, pass_fds=pass_fds)
        except ProbeError:
            # A tool that found wrong results may call that its own failure.
            with suppress(OSError, ProbeError):
                output = parse_output(parse, _read(path))
                if output.wrong:
                    return output
            raise
        return parse_output(parse, _read(path) if path.exists() else text)


def _read(path: Path) -> str:
    with path.open(errors="replace") as file:
        return file.read(OUTPUT_BYTES_MAX)


def run_tool(
    argv: Sequence[str],
    seconds: float,
    *,
    is_over: Callable[[], bool] = lambda: False,
    pass_fds: Sequence[int] = (),
    exit_codes: Sequence[int] = (0,),
) -> str:
    """Return what *argv* printed: nothing if *is_over* said so first. It ends with this process.

    Raises:
        ProbeError: See `measure`.
    """
    command, limit_s = module_command("gpuops.host.process.sidecar", *argv), seconds + START_S
    end = run_bounded(command, environ(), limit_s, is_over, pass_fds=pass_fds, own_session=False)
    if end is None or end.exit_code in exit_codes:
        return "" if end is None else end.output.decode(errors="replace")
    if end.exit_code is None:
        raise ProbeError(f"it did not end in {limit_s:.0f} s", UnknownReason.TIMEOUT)
    if max(len(end.output), len(end.errors)) >= OUTPUT_BYTES_MAX:
        text = f"it printed more than {OUTPUT_BYTES_MAX >> 20} MiB"
        raise ProbeError(text, UnknownReason.CRASH)
    lines = (end.output + b"\n" + end.errors).decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    raise ProbeError(f"it exited with {end.exit_code}: {last}", UnknownReason.CRASH)


def parse_output(parse: Callable[[Any], ToolOutput], text: str) -> ToolOutput:
    """Return what *parse* makes of the JSON object in *text*; lines around it are ignored.

    Raises:
        ProbeError: There is none, or it is no proof that the tool measured.
    """
    try:
        output = parse(json.JSONDecoder().raw_decode(text, max(text.find("{"), 0))[0])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as exc:
        problem = f"its output does not say what was measured: {type(exc).__name__}: {exc}"
        raise ProbeError(problem, UnknownReason.CRASH) from exc
    if not output.rates:
        raise ProbeError("its output has no results", UnknownReason.CRASH)
    return output


def rate_of(value: object) -> float:
    """Return *value*, a number or the text of one.

    Raises:
        ValueError: It is no rate: zero, negative, NaN, infinite, or no number.
    """
    rate = float(value) if isinstance(value, int | float | str) else math.nan
    if value is True or not math.isfinite(rate) or rate <= 0:
        raise ValueError(f"{value!r} is no rate")
    return rate
