"""Cluster reliability toolkit for people who train on GPU clusters.

Importing this package imports nothing else: a Slurm prolog pays for what it uses only. The
functions for training scripts are fetched when first used.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "phase", "progress", "should_stop"]

TYPE_CHECKING = False  # as in typing, which is not imported here
if TYPE_CHECKING:
    from gpuops.worker.api import phase, progress, should_stop


def __getattr__(name: str) -> object:
    if name not in {"phase", "progress", "should_stop"}:
        raise AttributeError(f"module 'gpuops' has no attribute {name!r}")
    from gpuops.worker import api

    function = getattr(api, name)
    globals()[name] = function
    return function
