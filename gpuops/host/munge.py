"""A round trip through munged: a credential is made and read back (munge(1), unmunge(1))."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process.command import CommandAnswer, ask, find
from gpuops.model import UnknownReason

_MARGIN_S = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MungeTrip:
    """The result. ``installed``: both programs exist. ``error``: of the first that failed.

    ``decoding``: the credential was made and could not be read. ``elapsed_s``: of both programs.
    """

    installed: bool
    elapsed_s: float = 0.0
    error: str | None = None
    decoding: bool = False


def read_munge(root: Path, budget_s: float) -> MungeTrip:
    """Return the result of one round trip.

    Raises:
        ProbeError: munged gave no answer in time (``timeout``).
    """
    encode, decode = find(root, "munge"), find(root, "unmunge")
    if encode is None or decode is None:
        return MungeTrip(installed=False)
    each_s = max((budget_s - _MARGIN_S) / 2, 0.1)
    made = _answer([encode, "--no-input"], each_s)
    if made.exit_code != 0:
        return MungeTrip(installed=True, elapsed_s=made.elapsed_s, error=_why("munge", made))
    read = _answer([decode, "--no-output"], each_s, made.output)
    elapsed_s = made.elapsed_s + read.elapsed_s
    error = None if read.exit_code == 0 else _why("unmunge", read)
    return MungeTrip(installed=True, elapsed_s=elapsed_s, error=error, decoding=error is not None)


def _answer(argv: list[Path | str], timeout_s: float, stdin: str = "") -> CommandAnswer:
    answer = ask(argv, timeout_s, stdin=stdin)
    if answer.timed_out:
        raise ProbeError(f"{Path(argv[0]).name} {answer.ending}", UnknownReason.TIMEOUT)
    return answer


def _why(program: str, answer: CommandAnswer) -> str:
    return f"{program} {answer.ending}: {answer.first_line()}"
