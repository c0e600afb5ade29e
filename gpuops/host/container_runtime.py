"""Whether the container runtime answers: a command of the operator's, run with bounds."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.host.commands import ask, find

_MARGIN_S = 0.6


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
