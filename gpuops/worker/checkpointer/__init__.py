"""The state of a training job, saved and restored from inside a rank; the one part with torch."""

from gpuops.worker.checkpointer.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
