"""The process that runs a site's decision plug-in: JSON in, one call, JSON out.

``python -m gpuops.incident.override_child PLUGIN``. The plug-in's output goes to standard error;
the answer goes to the original standard output.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

DEFAULT_FUNCTION = "decide"


def main() -> None:
    """Answer the question on standard input; an exception prints its traceback and exits with 1."""
    # The site's module may be in the run's folder, which comes last: it hides no other module.
    with suppress(OSError):
        sys.path.append(str(Path.cwd()))
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    answer = load_function(sys.argv[1])(question)
    with os.fdopen(answer_fd, "w", encoding="utf-8") as stream:
        json.dump(answer, stream, allow_nan=False)


def load_function(plugin: str) -> Callable[[Any], Any]:
    """Return the function that *plugin* names: ``module:function`` or ``/path.py[:function]``.

    Raises:
        ImportError, AttributeError, OSError: It does not exist.
    """
    module_name, _, name = plugin.rpartition(":") if ":" in plugin else (plugin, "", "")
    function = getattr(_import_module(module_name), name or DEFAULT_FUNCTION)
    if not callable(function):
        raise TypeError(f"{plugin} is not a function")
    return function  # type: ignore[no-any-return]  # any callable of the site's module


def _import_module(module_name: str) -> Any:  # noqa: ANN401 a module of the site
    if not module_name.endswith(".py"):
        return importlib.import_module(module_name)
    spec = importlib.util.spec_from_file_location("gpuops_site_decision", module_name)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {module_name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
