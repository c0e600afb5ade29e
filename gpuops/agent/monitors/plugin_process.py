"""The process of one detector: ``python -m gpuops.agent.monitors.plugin_process NAME CONTEXT``.

Its verdicts go to the original standard output, a line of JSON each; whatever it prints goes to
standard error. A detector that returns is not restarted; one that raises reports the exception and
is restarted.
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
    """Write the verdicts of the detector, until it or the agent ends."""
    name, context = arguments
    output = os.dup(1)
    os.dup2(2, 1)
    die_with_parent()
    os.nice(NICE)
    with os.fdopen(output, "w", encoding="utf-8", buffering=1) as stream:
        try:
            for verdict in _load(name)(json.loads(context)):
                stream.write(json.dumps(verdict, allow_nan=False) + "\n")
        except Exception as exc:  # noqa: BLE001 boundary: it is reported, and the agent decides
            stream.write(json.dumps({"error": repr(exc)}) + "\n")
            return EXIT_FAIL
    return EXIT_UNKNOWN


def _load(name: str) -> Callable[[dict[str, Any]], Iterable[object]]:
    """Return the detector *name*.

    Raises:
        Exception: Whatever its module raises; KeyError where it is not installed.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    return found[name].load()  # type: ignore[no-any-return]  # a plug-in's function


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
