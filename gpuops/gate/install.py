"""How to install the gate in Slurm: the hooks, and the lines of slurm.conf for this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import UsageError
from gpuops.host.trust import atomic_write

HOOKS = ("prolog.sh", "epilog.sh", "health_check.sh")
CONF = "slurm.conf.example"
# The paths in the shipped files.
SHIPPED_HOOKS = "/etc/slurm/gpuops"
SHIPPED_GPUOPS = "/opt/gpuops/bin/gpuops"


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
