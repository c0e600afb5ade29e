"""The evidence of a Python exception in a rank: one small JSON file, read by the agent."""

import json
import os
import time
import traceback
from pathlib import Path

SCHEMA = "gpuops.worker-exception/1"
MESSAGE_CHARS_MAX = 4000
TRACEBACK_LINES_MAX = 200


def write_exception(error: BaseException, path: Path, *, now_us: int, mono_ns: int) -> None:
    """Write type, message, traceback and time of *error* to *path*, atomically."""
    lines = [line for text in traceback.format_exception(error) for line in text.splitlines()]
    kind = type(error)
    _replace(
        path,
        {
            "schema": SCHEMA,
            "type": kind.__qualname__
            if kind.__module__ in {"builtins", "__main__"}
            else f"{kind.__module__}.{kind.__qualname__}",
            "message": str(error)[:MESSAGE_CHARS_MAX],
            "traceback": lines[-TRACEBACK_LINES_MAX:],
            "time_us": now_us,
            "mono_ns": mono_ns,
        },
    )


def write_torchelastic_error(error: BaseException, path: Path) -> None:
    """Write the error file that torch's ``@record`` would have written, unless one exists."""
    if path.exists():
        return
    info = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
    }
    _replace(path, {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": info}})


def _replace(path: Path, data: dict[str, object]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data), encoding="utf-8", errors="backslashreplace")
    partial.replace(path)
