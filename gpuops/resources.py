"""Where the folders that operators read and edit are: ``checks``, ``runbooks``, ``slurm``.

In a wheel they lie inside the package; in a checkout beside it. An editable install is the
second case, whatever hatchling copied to site-packages.
"""

from pathlib import Path
from typing import Literal

from gpuops.errors import MissingDataError

_PACKAGE = Path(__file__).parent


def data_dir(name: Literal["checks", "runbooks", "slurm"]) -> Path:
    """Return the shipped folder called *name*.

    Raises:
        MissingDataError: Neither the wheel nor a checkout has it.
    """
    candidates = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    tried = " and ".join(str(candidate) for candidate in candidates)
    raise MissingDataError(f"looked for the shipped folder {name!r} at {tried}; reinstall gpuops")
