"""The state of systemd units, and whether the container runtime answers."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process.abandoned import abandoned
from gpuops.host.process.command import ask, find
from gpuops.model import UnknownReason

_PROPERTIES = ("Id", "Names", "LoadState", "ActiveState", "SubState", "Result", "NRestarts")
_MARGIN_S = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit by its requested name; ``restarts`` by systemd, None: not reported."""

    name: str
    load: str
    active: str
    sub: str = ""
    result: str = ""
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class Units:
    """The requested units; ``systemd`` is False if another program is process 1."""

    systemd: bool
    units: tuple[Unit, ...] = ()


def read_units(root: Path, budget_s: float, names: tuple[str, ...]) -> Units:
    """Return the state of the units *names*.

    Raises:
        ProbeError: ``systemctl`` is missing, gave no answer in time, or failed.
    """
    # sd_booted(3): that folder exists if systemd is the system manager.
    if not (root / "run/systemd/system").is_dir():
        return Units(systemd=False)
    if not names:
        return Units(systemd=True)
    tool = find(root, "systemctl")
    if tool is None:
        raise ProbeError("systemctl is not installed", UnknownReason.MISSING_TOOL)
    argv: list[Path | str] = [tool, "show", f"--property={','.join(_PROPERTIES)}", "--", *names]
    answer = ask(argv, max(budget_s - _MARGIN_S, 0.1))
    if answer.timed_out:
        raise ProbeError(f"systemctl {answer.ending}", UnknownReason.TIMEOUT)
    if answer.exit_code != 0:
        text = f"systemctl {answer.ending}: {answer.first_line()}"
        raise ProbeError(text, UnknownReason.NOT_SUPPORTED)
    return Units(systemd=True, units=parse_show(answer.output, names))


def parse_show(text: str, names: tuple[str, ...]) -> tuple[Unit, ...]:
    """Return the units of *names* in the output of ``systemctl show``, a block for each."""
    units = []
    for block in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        aliases = {values.get("Id", ""), *values.get("Names", "").split()}
        for name in names:
            if not aliases & {name, f"{name}.service"}:
                continue
            restarts = values.get("NRestarts", "")
            units.append(
                Unit(
                    name=name,
                    load=values.get("LoadState", ""),
                    active=values.get("ActiveState", ""),
                    sub=values.get("SubState", ""),
                    result=values.get("Result", ""),
                    restarts=int(restarts) if restarts.isdecimal() else None,
                )
            )
    return tuple(units)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeAnswer:
    """The result of the command; all None if none is configured or it is not installed."""

    command: tuple[str, ...] = ()
    found: bool = False
    exit_code: int | None = None
    ending: str | None = None
    said: str | None = None
    elapsed_s: float = 0.0


def read_runtime(root: Path, budget_s: float, command: tuple[str, ...]) -> RuntimeAnswer:
    """Return the result of *command*, whose first word is searched below *root*.

    Raises:
        ProbeError: It exists and cannot be started.
    """
    tool = find(root, command[0]) if command else None
    if tool is None:
        return RuntimeAnswer(command=command)
    answer = ask([tool, *command[1:]], max(budget_s - _MARGIN_S, 0.1), left=abandoned())
    return RuntimeAnswer(
        command=command,
        found=True,
        exit_code=answer.exit_code,
        ending=answer.ending,
        said=answer.first_line(),
        elapsed_s=answer.elapsed_s,
    )
