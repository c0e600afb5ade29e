"""What a soak writes down, where ``SOAK_OUT`` names a file for it."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path


def keep_soak(result, *, command, seed, began_s, name=""):
    """Write *result* of *command*, which began at *began_s* (monotonic), as JSON.

    *name* makes the file's name another for each kind of one test.
    """
    out = os.environ.get("SOAK_OUT")
    if not out:
        return
    body = {
        "command": command,
        "date": f"{datetime.now(tz=UTC):%Y-%m-%d}",
        "seed": seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **result,
    }
    path = Path(out)
    path = path.with_stem(f"{path.stem}_{name}") if name else path
    path.write_text(json.dumps(body, indent=2) + "\n")
