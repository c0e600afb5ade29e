"""How to install the gate in Slurm: the hooks, and the lines of slurm.conf for this machine."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ConfigError, UsageError
from gpuops.host.trust import atomic_write, read_file, refuse_foreign_file

HOOKS = ("prolog.sh", "epilog.sh", "health_check.sh")
CONF = "slurm.conf.example"
# The paths in the shipped files.
SHIPPED_HOOKS = "/etc/slurm/gpuops"
SHIPPED_GPUOPS = "/opt/gpuops/bin/gpuops"
_PROGRAM_BYTES_MAX = 2**16
# What pip writes if the interpreter's path is too long for the first line, or has spaces.
_LONG_SHEBANG = re.compile(rb"""#!/bin/sh\n'''exec' "?([^"\n]+?)"? "\$0" "\$@\"""")


@dataclass(frozen=True, slots=True)
class Installation:
    """``conf``: the lines for slurm.conf; ``hooks``: the text of each script by its name."""

    conf: str
    hooks: Mapping[str, str]


def installation(shipped: Path, hooks_dir: Path, program: Path) -> Installation:
    """Return the files in *shipped* with the paths of this machine.

    Raises:
        UsageError: A path has characters that are special to a shell or slurm.conf.
    """
    for path in (hooks_dir, program):
        text = str(path)
        if not path.is_absolute() or any(not (c.isalnum() or c in "/._-+") for c in text):
            raise UsageError(f"{text!r}: an absolute path of letters, digits and /._-+ is expected")
    conf = (shipped / CONF).read_text(encoding="utf-8").replace(SHIPPED_HOOKS, str(hooks_dir))
    hooks = {
        name: (shipped / name).read_text(encoding="utf-8").replace(SHIPPED_GPUOPS, str(program))
        for name in HOOKS
    }
    return Installation(conf, hooks)


def check_program(program: Path, package: Path, uid: int) -> None:
    """Check that no other user can write what the hooks run as root; only root (*uid* 0) installs.

    That is *program*, its interpreter, the folders that it imports from, and *package*, gpuops
    itself. What is missing is not checked: the hooks may be for other nodes.

    Raises:
        UsageError: Names what another user owns or may write.
    """
    for path in (*_parts_of(program), package):
        try:
            refuse_foreign_file(path, uid=uid)
        except ConfigError as exc:
            raise UsageError(f"the hooks would run {program} as root, but {exc}") from exc


def _parts_of(program: Path) -> Iterator[Path]:
    yield program
    target = program.resolve()
    found = read_file(target, _PROGRAM_BYTES_MAX)
    first = b"" if found is None else found[0].partition(b"\n")[0]
    if first.startswith(b"#!") and first[2:].split():
        interpreter = Path(os.fsdecode(first[2:].split()[0]))
        yield interpreter
        if interpreter.name == "env":
            raise UsageError(
                f"{program} runs the Python that PATH names, which may be anyone's: install "
                "gpuops in a venv with pip"
            )
    if found is not None and (exec_line := _LONG_SHEBANG.match(found[0])):
        yield Path(os.fsdecode(exec_line[1]))
    yield from sorted(target.parent.parent.glob("lib/python3*/site-packages"))


def write_hooks(hooks: Mapping[str, str], folder: Path) -> None:
    """Write *hooks* into *folder*, writable by root and executable by all.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name, text in hooks.items():
            atomic_write(folder / name, text.encode(), 0o755)
    except OSError as exc:
        raise UsageError(f"cannot write {exc.filename or folder}: {exc.strerror}") from exc
