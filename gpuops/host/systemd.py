"""The state of systemd units, and whether the container runtime answers."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process.command import ask, find
from gpuops.model import UnknownReason

_PROPERTIES = ("Id", "Names", "LoadState", "ActiveState", "SubState", "Result", "NRestarts")
_MARGIN_S = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit as it was asked for; ``restarts`` by systemd itself, None: not told."""

    name: str
    load: str
    active: str
    sub: str = ""
    result: str = ""
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class Units:
    """The units that were asked about; ``systemd`` is False where something else is process 1."""

    systemd: bool
    units: tuple[Unit, ...] = ()


def read_units(root: Path, budget_s: float, asked: tuple[str, ...]) -> Units:
    """Return the state of the units *asked*.

    Raises:
        ProbeError: ``systemctl`` is missing, gave no answer in time, or failed.
    """
    # sd_booted(3): that folder is there where systemd is the system manager.
    if not (root / "run/systemd/system").is_dir():
        return Units(systemd=False)
    if not asked:
        return Units(systemd=True)
    tool = find(root, "systemctl")
    if tool is None:
        raise ProbeError("systemctl is not installed", UnknownReason.MISSING_TOOL)
    argv: list[Path | str] = [tool, "show", f"--property={','.join(_PROPERTIES)}", "--", *asked]
    answer = ask(argv, max(budget_s - _MARGIN_S, 0.1))
    if answer.timed_out:
        raise ProbeError(f"systemctl {answer.ending}", UnknownReason.TIMEOUT)
    if answer.exit_code != 0:
        text = f"systemctl {answer.ending}: {answer.first_line()}"
        raise ProbeError(text, UnknownReason.NOT_SUPPORTED)
    return Units(systemd=True, units=parse_show(answer.output, asked))


def parse_show(text: str, asked: tuple[str, ...]) -> tuple[Unit, ...]:
    """Return the units of *asked* in the output of ``systemctl show``, a block for each."""
    units = []
    for block in text.split("\n\n"):
        said = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        names = {said.get("Id", ""), *said.get("Names", "").split()}
        for name in asked:
            if not names & {name, f"{name}.service"}:
                continue
            restarts = said.get("NRestarts", "")
            units.append(
                Unit(
                    name=name,
                    load=said.get("LoadState", ""),
                    active=said.get("ActiveState", ""),
                    sub=said.get("SubState", ""),
                    result=said.get("Result", ""),
                    restarts=int(restarts) if restarts.isdecimal() else None,
                )
            )
    return tuple(units)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeAnswer:
    """What came of the command; all None where none is configured or it is not installed."""

    command: tuple[str, ...] = ()
    found: bool = False
    exit_code: int | None = None
    ending: str | None = None
    said: str | None = None
    elapsed_s: float = 0.0


def read_runtime(root: Path, budget_s: float, command: tuple[str, ...]) -> RuntimeAnswer:
    """Return what came of *command*, its first word looked for below *root*.

    Raises:
        ProbeError: It is there and cannot be started.
    """
    tool = find(root, command[0]) if command else None
    if tool is None:
        return RuntimeAnswer(command=command)
    answer = ask([tool, *command[1:]], max(budget_s - _MARGIN_S, 0.1), unless_stuck=True)
    return RuntimeAnswer(
        command=command,
        found=True,
        exit_code=answer.exit_code,
        ending=answer.ending,
        said=answer.first_line(),
        elapsed_s=answer.elapsed_s,
    )
