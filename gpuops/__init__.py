"""Cluster reliability toolkit for people who train on GPU clusters.

Importing this package imports nothing else: a Slurm prolog pays for what it uses only. What
training scripts use is fetched when first used.
"""

__version__ = "0.1.0"
__all__ = ["Checkpointer", "__version__", "phase", "progress", "should_stop"]

TYPE_CHECKING = False  # as in typing, which is not imported here
if TYPE_CHECKING:
    from gpuops.worker.api import phase, progress, should_stop
    from gpuops.worker.checkpointer import Checkpointer


def __getattr__(name: str) -> object:
    if name not in {"Checkpointer", "phase", "progress", "should_stop"}:
        raise AttributeError(f"module 'gpuops' has no attribute {name!r}")
    if name == "Checkpointer":  # needs torch, which the rest does not
        from gpuops.worker.checkpointer import Checkpointer

        found: object = Checkpointer
    else:
        from gpuops.worker import api

        found = getattr(api, name)
    globals()[name] = found
    return found
