"""The process of one detector: ``python -m gpuops.agent.monitors.plugin_process NAME TOLD``.

Its verdicts go, a line of JSON each, where standard output was; what it prints goes to standard
error. One that comes to its end has nothing more to say, one that raises says so and is started
again.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from gpuops.errors import EXIT_FAIL, EXIT_UNKNOWN
from gpuops.host.process.sidecar import die_with_parent

GROUP = "gpuops.detectors"
NICE = 10  # training comes first


def main(arguments: list[str]) -> int:
    """Say what the detector says, until it or the agent ends."""
    name, told = arguments
    said = os.dup(1)
    os.dup2(2, 1)
    die_with_parent()
    os.nice(NICE)
    with os.fdopen(said, "w", encoding="utf-8", buffering=1) as stream:
        try:
            for verdict in _loaded(name)(json.loads(told)):
                stream.write(json.dumps(verdict, allow_nan=False) + "\n")
        except Exception as exc:  # noqa: BLE001 boundary: it is told, and is all that happens
            stream.write(json.dumps({"error": repr(exc)}) + "\n")
            return EXIT_FAIL
    return EXIT_UNKNOWN


def _loaded(name: str) -> Callable[[dict[str, Any]], Iterable[object]]:
    """Return the detector *name*.

    Raises:
        Exception: Whatever its module raises; KeyError where it is not installed.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    return found[name].load()  # type: ignore[no-any-return]  # a stranger's function


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
