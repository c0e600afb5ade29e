"""gpuops with longer limits in its hooks: on a busy machine Python alone takes seconds to start.

The shipped limits are tested by `tests/integration/test_slurm_files.py`.
"""

import re
import shutil
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
DEADLINE_S = 60


def patient_install(folder):
    """Return *folder*, for the start of PYTHONPATH, with gpuops and suites of longer deadlines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("gpuops", "runbooks", "slurm"):
        (folder / name).symlink_to(_CHECKOUT / name)
    shutil.copytree(_CHECKOUT / "checks", folder / "checks")
    for name in ("prolog", "epilog", "health", "sweep"):
        suite = folder / "checks" / "suites" / f"{name}.toml"
        text, count = re.subn(
            r"^deadline_s = .*$",
            f"deadline_s = {DEADLINE_S}",
            suite.read_text(),
            flags=re.MULTILINE,
        )
        assert count == 1
        suite.write_text(text)
    return folder
